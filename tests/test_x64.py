# SPDX-License-Identifier: Apache-2.0
"""With x64 on: float64 in, float64 out, float32 Variables, digits as good or better."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import (
    Collector,
    Ledger,
    Normalizer,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    check_statistics,
    metrics,
    summary,
)

T, B, F = 5, 4, 3
X = np.random.default_rng(0).normal(1e4, 2.0, (T, B, F))  # no float32 holds these
R, ENDS = X[..., 0] - 1e4, X[..., 1] > 1e4 + 2
KINDS = {
    "Normalizer": lambda: Normalizer(F, clip=5.0),
    "moments": lambda: Normalizer(F, emit="moments"),
    "RewardNormalizer": lambda: RewardNormalizer(0.9, num_envs=B, clip=5.0),
    "RunningMeanStd": lambda: RunningMeanStd(F, initial_count=0, clamp_value=5.0),
    "lazy": lambda: RunningMeanStd(initial_count=0),
    "RewardRunningMeanStd": lambda: RewardRunningMeanStd(gamma=0.9, initial_count=0),
}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def fold(module: Any) -> None:
    """One update of any kind, with float64 samples."""
    if isinstance(module, RewardNormalizer):
        module.update(jnp.asarray(R), ENDS)
    elif isinstance(module, RewardRunningMeanStd):
        for r, ended in zip(R, ENDS, strict=True):
            module.record_reward(jnp.asarray(r), ended)
    elif isinstance(module, RunningMeanStd):
        module.record_moments(jnp.asarray(X.reshape(-1, F)))
    else:
        steps = [module((), jnp.asarray(x)).rollout_extras for x in X]
        module.update_statistics(jax.tree.map(lambda *v: jnp.stack(v), *steps))


def dtypes(module: nnx.Module) -> set[str]:
    return {str(v.dtype) for v in jax.tree.leaves(nnx.state(module))}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_variables_stay_float32_and_inputs_keep_their_dtype(make):
    module = make()
    fold(module)
    check_statistics(module)
    assert dtypes(module) == {"float32"}
    of_rewards = isinstance(module, RewardNormalizer | RewardRunningMeanStd)
    y = module.normalize(jnp.asarray(R if of_rewards else X))
    assert y.dtype == jnp.float64
    assert {str(v.dtype) for v in metrics(module).values()} == {"float32"}
    assert "mean" in summary(module)


@pytest.mark.parametrize("name", ["Normalizer", "moments", "RunningMeanStd", "lazy"])
def test_statistics_are_those_of_the_float64_samples(name):
    module = KINDS[name]()
    fold(module)
    rows = X.reshape(-1, F)
    if isinstance(module, Normalizer):
        d = module.to_dict()
        mean, variance = d["mean"], d["variance"]
    else:
        mean, variance, _ = module.to_numpy()
    assert np.all(np.abs(mean - rows.mean(0)) <= 1e-9 * rows.std(0))
    np.testing.assert_allclose(variance, rows.var(0), rtol=1e-7)
    y, right = module.normalize(jnp.asarray(X)), (X - rows.mean(0)) / rows.std(0)
    np.testing.assert_allclose(y, np.clip(right, -5, 5), rtol=1e-5, atol=1e-7)


def test_share_beyond_the_clip_and_drift_of_float64_inputs():
    norm = Normalizer(F, clip=1.0)
    norm.update_statistics(jnp.asarray(X))
    before = norm.to_dict()
    norm.update_statistics(jnp.asarray(X + 1))
    found = metrics(norm, extras=jnp.asarray(X), since=before)
    d = norm.to_dict()
    right = np.mean(np.abs(X - d["mean"]) > d["std"])
    assert float(found["clipped"]) == pytest.approx(right, rel=1e-6)
    moved = np.max(np.abs(d["mean"] - before["mean"]) / d["std"])
    assert float(found["drift"]) == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize("name", ["Normalizer", "RewardNormalizer"])
def test_what_was_saved_makes_float32_variables(name):
    norm: Any = KINDS[name]()
    fold(norm)
    again = type(norm).from_dict(norm.to_dict(flat=True))
    assert dtypes(again) == {"float32"} and again.count == norm.count
    fold(again)
    assert dtypes(again) == {"float32"} and again.count == 2 * norm.count


def test_increments_merge_as_without():
    ledger, collector = Ledger(Normalizer(F), 1), Collector(Normalizer(F), 0)
    collector.seen.update_statistics(jnp.asarray(X))
    assert ledger.merge(collector.take()) and ledger.model.count == T * B
    assert dtypes(ledger) == {"float32"}
