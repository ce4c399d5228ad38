# SPDX-License-Identifier: Apache-2.0
"""Rows of vector environments, NumPy: as histories to fold, and as `final_obs`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_norm.rewards import RewardNormalizer
from nnx_norm.samples import align_leading

PyTree = Any


def copied(leaf: Any) -> Any:
    """An array of one's own: an environment may reuse its, and JAX's are read-only."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def history(steps: list[tuple[PyTree, np.ndarray]]) -> tuple[PyTree, jax.Array]:
    """Rows `[T, B, *feat]` and which of them are valid, `[T, B]`.

    T is rounded up to a power of two with rows that aren't: otherwise every rollout
    with another number of resets in it would compile anew.
    """
    missing = (1 << (len(steps) - 1).bit_length()) - len(steps)

    def stack(*rows: np.ndarray) -> jax.Array:
        return jnp.asarray(np.stack([*rows, *[np.zeros_like(rows[0])] * missing]))

    trees, valid = zip(*steps, strict=True)
    return jax.tree.map(stack, *trees), stack(*valid)


def restart(rewards: RewardNormalizer, rows: np.ndarray) -> None:
    """Running returns of some environments start anew.

    Those of another number of environments all do, at the next update.
    """
    leaves = jax.tree.leaves(rewards.running_return.get_value())
    if any(len(leaf) != len(rows) for leaf in leaves):
        return

    def cut(returns: jax.Array) -> jax.Array:
        ends = align_leading(jnp.asarray(rows), returns)
        return jnp.where(ends, jnp.zeros_like(returns), returns)

    rewards.running_return.set_value(
        jax.tree.map(cut, rewards.running_return.get_value())
    )


def in_rows(like: PyTree, final: Any, there: np.ndarray) -> PyTree:
    """Terminal observations in the rows of a batch of observations."""
    batch = jax.tree.map(np.array, like)
    for i in np.flatnonzero(there):
        jax.tree.map(lambda rows, leaf, i=i: rows.__setitem__(i, leaf), batch, final[i])
    return batch


def by_row(batch: PyTree, there: np.ndarray) -> np.ndarray:
    """The inverse of `in_rows`: an array of one observation, or None, each."""
    rows = np.full(len(there), None, object)
    for i in np.flatnonzero(there):
        rows[i] = jax.tree.map(lambda leaf, i=i: copied(leaf[i]), batch)
    return rows
