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
from agreement import LIMIT, assert_agreement, assert_moments, batches
from rsl_rl.extensions import RandomNetworkDistillation
from rsl_rl.modules import (
    EmpiricalDiscountedVariationNormalization,
    EmpiricalNormalization,
)
from tensordict import TensorDict
from torchrl.envs.transforms import VecNorm

from nnx_norm import Normalizer, RewardRunningMeanStd
from nnx_norm.interop import (
    from_rsl_rl,
    from_rsl_rl_rewards,
    from_skrl,
    from_torchrl,
    to_rsl_rl,
    to_skrl,
)
from nnx_norm.moved import exported


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


def scaled(theirs: Any, rewards: np.ndarray) -> np.ndarray:
    """What rsl_rl makes of rewards, without learning from them."""
    theirs.eval()
    out = theirs(of(rewards)).numpy()
    theirs.train()
    return out


REWARDS = np.random.default_rng(0).normal(2, 3, size=(50, 4)).astype(np.float32)


@pytest.mark.parametrize("shape", [[], [1]])
@pytest.mark.parametrize("port", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_rsl_rl_rewards(shape: list[int], port: bool, scale: float):
    theirs = EmpiricalDiscountedVariationNormalization(shape=shape, gamma=0.9)
    for r in REWARDS * np.float32(scale):
        theirs(of(r.reshape(4, *shape)))
    x = np.array([-3.0, 0.0, 20.0], np.float32) * np.float32(scale)
    into = RewardRunningMeanStd(gamma=0.9, epsilon=1e-16) if port else None
    norm = from_rsl_rl_rewards(theirs, into=into)
    wanted = scaled(theirs, x.reshape(3, *shape)).reshape(3)
    assert np.asarray(norm.normalize(x)) == pytest.approx(wanted, rel=LIMIT)
    assert float(exported(norm).count) == 200 and norm.gamma == 0.9
    carried = norm.discounted_reward if port else norm.running_return
    returns = theirs.disc_avg.avg.numpy().reshape(4)
    assert np.asarray(carried.get_value()) == pytest.approx(returns, rel=1e-6)
    back = EmpiricalDiscountedVariationNormalization(shape=[], gamma=0.9)
    back.emp_norm.load_state_dict(tensors(to_rsl_rl(norm, epsilon=0.0)))
    assert scaled(back, x) == pytest.approx(np.asarray(norm.normalize(x)), rel=LIMIT)


def test_rsl_rl_rewards_go_on_as_they_do():
    theirs = EmpiricalDiscountedVariationNormalization(shape=[], gamma=0.9)
    for r in REWARDS[:20]:
        theirs(of(r))
    norm = from_rsl_rl_rewards(theirs)
    for r in REWARDS[20:]:
        theirs(of(r))
    norm.update(REWARDS[20:], np.zeros((30, 4), bool))  # it knows of no ends
    assert norm.count == int(theirs.emp_norm.count) == 200
    x = REWARDS[0]  # its sums are in float32, ours are not
    assert np.asarray(norm.normalize(x)) == pytest.approx(scaled(theirs, x), rel=1e-5)


@pytest.mark.parametrize("rewards", [[], [[2.0]], [[2.0, 2.0]], [[0.0], [0.0]]])
def test_rsl_rl_rewards_before_two_differ(rewards: list[list[float]]):
    theirs = EmpiricalDiscountedVariationNormalization(shape=[])
    for r in rewards:
        theirs(torch.tensor(r))
    norm = from_rsl_rl_rewards(theirs)
    x = np.array([-3.0, 0.0, 20.0], np.float32)
    assert norm.count == sum(map(len, rewards))
    assert np.asarray(norm.normalize(x)).tolist() == scaled(theirs, x).tolist()
    assert scaled(theirs, x).tolist() == x.tolist()


def test_rsl_rl_rewards_of_a_saved_rnd_module():
    settings: Any = {"predictor_hidden_dims": [4], "target_hidden_dims": [4]}
    rnd = RandomNetworkDistillation(
        5, {"rnd_state": ["rnd_state"]}, 3, reward_normalization=True, **settings
    )
    for x in batches():
        rnd.get_intrinsic_reward(TensorDict({"rnd_state": of(x)}, batch_size=[64]))
    theirs, x = rnd.reward_normalizer, REWARDS[0]
    norm = from_rsl_rl_rewards(rnd.state_dict(), "reward_normalizer")
    assert norm.count == 192 and norm.gamma == 0.99
    assert np.asarray(norm.normalize(x)) == pytest.approx(scaled(theirs, x), rel=LIMIT)


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
