# SPDX-License-Identifier: Apache-2.0
"""Samples for the peers, and whether a module of ours normalizes them as they do."""

from typing import Any

import jax
import numpy as np

from nnx_norm.moved import exported

LIMIT = 1e-6
CENTRE = np.array([0.0, 1000.0, -3.0, 3.25, 5.0], np.float32)
SPREAD = np.array([1.0, 2.0, 0.01, 0.0, 300.0], np.float32)  # one feature is dead


def batches(number: int = 3, size: int = 64, seed: int = 0) -> list[np.ndarray]:
    """Batches `[size, 5]` of features of all kinds."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(number, size, len(CENTRE))).astype(np.float32)
    return list(CENTRE + SPREAD * noise)


def assert_agreement(module: Any, ours: Any, theirs: Any) -> None:
    """Outputs of both agree to `LIMIT` of their size, an offset counting to it."""
    moved = exported(module)
    leaves = [jax.tree.leaves(t) for t in (ours, theirs, moved.mean, moved.std)]
    assert leaves[0] and len({len(group) for group in leaves}) == 1
    for a, b, mean, std in zip(*leaves, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = 1 + np.abs(b) + np.abs(mean) / std
        assert a.shape == b.shape
        assert np.max(np.abs(a - b) / size) <= LIMIT


def assert_moments(module: Any, samples: np.ndarray, prior: float = 0.0) -> None:
    """A module's mean and variance are those of samples `[N, F]`, and a prior's."""
    moved = exported(module)
    (mine,), (mine_variance,) = map(jax.tree.leaves, (moved.mean, moved.variance))
    x = samples.astype(np.float64)
    n = len(x) + prior
    mean = x.sum(0) / n
    variance = (((x - mean) ** 2).sum(0) + prior * (1 + mean**2)) / n
    assert float(moved.count) == np.float64(n)
    assert np.allclose(mine, mean, rtol=1e-6, atol=1e-6)
    assert np.allclose(mine_variance, variance, rtol=2e-4, atol=2e-6)
