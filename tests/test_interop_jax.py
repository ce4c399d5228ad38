# SPDX-License-Identifier: Apache-2.0
"""Statistics of nnx-ppo and Flax themselves; Brax and Acme: interop/check_jax.py."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_ppo.networks.normalizer import Normalizer as Theirs

from nnx_norm import Normalizer, RunningMeanStd
from nnx_norm.interop import (
    from_acme,
    from_brax,
    from_flax_batch_norm,
    from_nnx_ppo,
    to_acme,
    to_brax,
    to_flax_batch_norm,
    to_nnx_ppo,
)
from nnx_norm.moved import exported

SHAPE = {"body": 3, "goal": {"id": 2}}


def history(seed: int) -> Any:
    """A history `[T=4, B=8]` whose features have many scales; one of them is dead."""
    rng = np.random.default_rng(seed)
    body = [1e3, 0.0, 3.0] + np.array([1.0, 1e-2, 0.0]) * rng.normal(size=(4, 8, 3))
    leaves = {"body": body, "goal": {"id": rng.normal(size=(4, 8, 2)) * 50}}
    return jax.tree.map(jnp.float32, leaves)


def near(ours: Any, theirs: Any, module: Any) -> bool:
    """Whether outputs agree to 1e-6 of their size, an offset counting to it."""
    out = exported(module)
    pairs = map(jax.tree.leaves, (ours, theirs, out.mean, out.std))
    return all(
        np.max(np.abs(a - b) / (1 + np.abs(b) + np.abs(m) / s)) <= 1e-6
        for a, b, m, s in zip(*pairs, strict=True)
    )


@pytest.fixture
def ours() -> Normalizer:
    norm = Normalizer(SHAPE)
    norm.update_statistics(history(0))
    norm.update_statistics(history(1))
    return norm


@pytest.mark.usefixtures("x64_off")
def test_nnx_ppo_there_and_back_is_exact():
    theirs = Theirs(SHAPE)
    fresh = from_nnx_ppo(theirs)
    x = jax.tree.map(lambda v: v[0], history(2))
    assert near(fresh.normalize(x), theirs((), x).output, fresh)
    for seed in range(2):
        theirs.update_statistics(history(seed))
    norm = from_nnx_ppo(theirs)
    assert norm.count == 64 and norm.epsilon == theirs.epsilon
    assert near(norm.normalize(x), theirs((), x).output, norm)
    back = Theirs(SHAPE)
    nnx.update(back, to_nnx_ppo(norm))
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.tobytes() == b.tobytes(),
            nnx.to_pure_dict(nnx.state(theirs)),
            nnx.to_pure_dict(nnx.state(back)),
        )
    )


@pytest.mark.usefixtures("x64_off")
def test_nnx_ppo_goes_on_where_ours_stopped(ours: Normalizer):
    theirs = Theirs(SHAPE)
    nnx.update(theirs, to_nnx_ppo(ours))
    theirs.update_statistics(history(2))
    ours.update_statistics(history(2))
    x = jax.tree.map(lambda v: v[0], history(3))
    assert near(ours.normalize(x), theirs((), x).output, ours)
    assert float(theirs.counter.get_value()) == ours.count == 96
    nnx.update(theirs, to_nnx_ppo(Normalizer(SHAPE)))  # back to no sample at all
    assert near(Normalizer(SHAPE).normalize(x), theirs((), x).output, Normalizer(SHAPE))


@pytest.mark.parametrize("linen", [False, True])
def test_flax_batch_norm(linen: bool):
    batches = [history(seed)["body"].reshape(-1, 3) for seed in range(3)]
    if linen:
        layer = nn.BatchNorm(use_running_average=False, epsilon=1e-3)
        variables = layer.init(jax.random.key(0), batches[0])
        for x in batches:
            _, new = layer.apply(variables, x, mutable=["batch_stats"])
            variables = {**variables, **new}
        evaluated = nn.BatchNorm(use_running_average=True, epsilon=1e-3)
        theirs = evaluated.apply(variables, batches[0])
        norm = from_flax_batch_norm(variables["batch_stats"], count=50, epsilon=1e-3)
    else:
        module = nnx.BatchNorm(3, epsilon=1e-3, rngs=nnx.Rngs(0))
        for x in batches:
            module(x)
        module.eval()
        theirs = module(batches[0])
        norm = from_flax_batch_norm(module, count=50)
    assert norm.count == 50
    assert near(norm.normalize(batches[0]), theirs, norm)
    back = nnx.BatchNorm(3, rngs=nnx.Rngs(0), use_running_average=True)
    nnx.update(back, to_flax_batch_norm(norm))
    assert near(norm.normalize(batches[0]), back(batches[0]), norm)


def test_trained_batch_norm_is_refused():
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    assert module.bias is not None
    module.bias.set_value(jnp.ones(3))
    with pytest.raises(ValueError, match="bias of the BatchNorm is learned"):
        from_flax_batch_norm(module, count=9)
    statistics = {"mean": module.mean, "var": module.var}
    assert from_flax_batch_norm(statistics, count=9).count == 9


def test_brax_and_acme_fields(ours: Normalizer):
    ours.set_statistics(0.5, 1e-3, 2**33 + 5)
    for back in (from_brax(to_brax(ours)), from_acme(to_acme(ours))):
        assert back.count == ours.count
        assert exported(back).std["body"] == pytest.approx(exported(ours).std["body"])
    port = RunningMeanStd(SHAPE, epsilon=1e-9)
    assert from_brax(to_brax(ours), into=port) is port
    assert port.to_numpy().var["body"] == pytest.approx(np.full(3, 1e-3 - 1e-9))


def test_brax_std_is_what_counts_not_its_sum():
    mean = np.zeros(3)
    std = np.array([1e-6, 2.0, 1e6])  # its bounds have cut the first and the last
    fields = {"mean": mean, "std": std, "count": 10.0}
    norm = from_brax(fields | {"summed_variance": np.array([0.0, 40.0, 1e20])})
    assert exported(norm).std == pytest.approx(std)
    ema = {"summed_variance": np.array([0.0, 4.0, 1e20]), "mode": 1}
    assert exported(from_brax(fields | ema)).variance[1] == pytest.approx(4.0)
