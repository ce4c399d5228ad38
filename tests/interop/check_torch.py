# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""rsl_rl, skrl and TorchRL themselves, in and out."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import skrl.resources.preprocessors.jax as skrl_jax
import skrl.resources.preprocessors.torch as skrl_torch
import torch
from agreement import assert_agreement, assert_moments, batches
from rsl_rl.modules import EmpiricalNormalization
from tensordict import TensorDict
from torchrl.envs.transforms import VecNorm

from nnx_norm import Normalizer
from nnx_norm.interop import (
    from_rsl_rl,
    from_skrl,
    from_torchrl,
    to_rsl_rl,
    to_skrl,
)


def tensors(arrays: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(v)) for name, v in arrays.items()}


def of(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)


@pytest.fixture
def ours() -> Normalizer:
    norm = Normalizer(5, epsilon=1e-3)
    for x in batches():
        norm.update_statistics(x[None])
    return norm


@pytest.mark.parametrize("eps", [1e-2, 1e-8])
def test_rsl_rl(eps: float):
    theirs = EmpiricalNormalization(5, eps=eps, until=500)
    for x in batches():
        theirs.update(of(x))
    x = batches(seed=9)[0]
    norm = from_rsl_rl(theirs)
    assert norm.count == 192 and norm.max_count == 500
    assert_agreement(norm, norm.normalize(x), theirs(of(x)).numpy())
    state = {f"actor.obs_normalizer.{k}": v for k, v in theirs.state_dict().items()}
    saved = from_rsl_rl(state, "actor.obs_normalizer", epsilon=eps)
    assert_agreement(saved, saved.normalize(x), theirs(of(x)).numpy())
    back = EmpiricalNormalization(5, eps=eps)
    back.load_state_dict(tensors(to_rsl_rl(norm, epsilon=eps)))
    assert_agreement(norm, norm.normalize(x), back(of(x)).numpy())
    assert int(back.count) == 192


def test_rsl_rl_before_any_sample():
    norm = from_rsl_rl(theirs := EmpiricalNormalization(5))
    x = batches()[0]
    assert norm.count == 0
    assert_agreement(norm, norm.normalize(x), theirs(of(x)).numpy())


def test_rsl_rl_of_ours(ours: Normalizer):
    back = EmpiricalNormalization(5)
    back.load_state_dict(tensors(to_rsl_rl(ours)))
    x = batches(seed=9)[0]
    assert_agreement(ours, ours.normalize(x), back(of(x)).numpy())
    with pytest.raises(ValueError, match="epsilon"):
        to_rsl_rl(ours, epsilon=0.1)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_skrl(library: str, ours: Normalizer):
    kind = {"torch": skrl_torch, "jax": skrl_jax}[library].RunningStandardScaler
    array = {"torch": of, "jax": jnp.asarray}[library]
    theirs = kind(5, clip_threshold=2.0)
    for x in batches():
        theirs(array(x), train=True)
    x = batches(seed=9)[0]
    norm = from_skrl(theirs)
    assert norm.count == 193 and norm.clip == 2.0  # with its prior sample
    assert_agreement(norm, norm.normalize(x), np.asarray(theirs(array(x))))
    back, state = kind(5), to_skrl(ours)
    if library == "torch":
        back.load_state_dict(tensors(state))
        saved = from_skrl(
            {"obs." + k: v for k, v in theirs.state_dict().items()}, "obs"
        )
        assert saved.clip == 5.0 and saved.count == 193
    else:
        one = state["current_count"][None]
        back.state_dict = {k: jnp.float32(v) for k, v in state.items()} | {
            "current_count": jnp.float32(one)
        }
    x = np.clip(x, -2, 2)  # inside its clip
    clipped = np.clip(np.asarray(ours.normalize(x)), -5, 5)
    assert_agreement(ours, clipped, np.asarray(back(array(x))))


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_torchrl(new: bool, decay: float):
    settings = {"reduce_batch_dims": True} if new else {}
    theirs: Any = VecNorm(in_keys=["observation"], decay=decay, new_api=new, **settings)
    step = (lambda td: theirs._step(td, td)) if new else theirs._call
    rng = np.random.default_rng(0)
    data = rng.normal(2.0, [1.0, 3.0, 0.2], size=(5, 16, 3)).astype(np.float32)
    for x in data:
        step(TensorDict({"observation": of(x)}, batch_size=[16]))
    theirs.freeze()
    x = data[0]
    normalized = step(TensorDict({"observation": of(x)}, batch_size=[16]))
    norm = from_torchrl(theirs)
    assert_agreement(norm, norm.normalize(x), normalized["observation"].numpy())
    if decay == 1:
        assert_moments(norm, data.reshape(-1, 3))
    elif not new:  # it forgets once a step, and so do we
        other = Normalizer(3, decay=0.99)
        for x in data:
            other.update_statistics(x[None])
        assert norm.count == pytest.approx(other.count, rel=1e-6)
        assert np.allclose(norm.variance, other.variance, rtol=1e-4)
