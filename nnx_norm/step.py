# SPDX-License-Identifier: Apache-2.0
"""A batch merged into stored statistics, or refused: all or nothing."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_norm import distributed, moments
from nnx_norm.extended import join, split
from nnx_norm.kernels import all_pair, together
from nnx_norm.moments import Moments

PyTree = Any


class Statistics(NamedTuple):
    """What a normalizer stores; the trees are lists of leaves `[*feat]` here."""

    mean: PyTree
    M2: PyTree
    counter: jax.Array
    skipped: jax.Array

    @property
    def moments(self) -> Moments:
        """The moments among them."""
        return Moments(self.mean, self.M2, self.counter)


class Lifted(NamedTuple):
    """Moments of a batch, the samples that they count, and those left out."""

    moments: Moments
    rows: jax.Array
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to fold; static under jit.

    Attributes:
      skip: Whether samples that are not finite, and updates that float32 can't hold,
        stay out and are counted.
      axis_name: Mapped axes to reduce over.
      decay: Factor on the old count and M2, or None.
      max_count: Number of samples from which on nothing is folded, or None.
    """

    skip: bool = True
    axis_name: distributed.AxisName | None = None
    decay: float | None = None
    max_count: float | None = None


def joined(value: Statistics, residual: Statistics) -> Statistics:
    """Statistics in float64; inside `double()`, or of NumPy arrays."""
    return jax.tree.map(join, value, residual)


def separated(statistics: Statistics) -> tuple[Statistics, Statistics]:
    """Values and residuals of statistics in float64; as `joined`."""
    leaves, treedef = jax.tree.flatten(statistics)
    pairs = [split(leaf) for leaf in leaves]
    value, residual = (
        jax.tree.unflatten(treedef, side) for side in zip(*pairs, strict=True)
    )
    return value, residual


def advance(
    value: Statistics,
    residual: Statistics,
    batch: Lifted,
    rule: Rule,
) -> tuple[Statistics, Statistics]:
    """Merge a batch, or refuse it; one collective if there is an axis.

    Call it inside `double()`. It compiles to few kernels, each with many results, see
    `kernels`: a kernel takes longer to compile than all that is computed here.

    Args:
      value: Statistics of float32 leaves `[*feat]`.
      residual: Their residuals.
      batch: What to merge, in float64.
      rule: How to fold.

    Returns:
      New values and residuals; bit for bit the old ones if nothing was to fold.
    """
    if rule.axis_name is not None:
        ranks = distributed.gather(batch, rule.axis_name)
        batch = Lifted(
            moments.reduce(ranks.moments), jnp.sum(ranks.rows), jnp.sum(ranks.skipped)
        )
    old = joined(value, residual)
    merged = moments.merge(_forget(old.moments, rule.decay), batch.moments)
    leaves = zip(merged.mean, merged.M2, strict=True)
    both = [together(*leaf) for leaf in leaves]
    merged = Moments([a for a, _ in both], [b for _, b in both], merged.count)

    is_open = jnp.full((), True)
    if rule.max_count is not None:
        is_open = old.counter < rule.max_count
    offered = is_open & (batch.moments.count > 0)
    held = _all_finite(merged) if rule.skip else jnp.full((), True)
    left_out = batch.skipped + jnp.where(offered & ~held, batch.rows, 0.0)

    kept, more = offered & held, is_open & (left_out > 0)
    leaves = [
        _chosen((kept, kept), news, olds, finite=rule.skip)
        for news, *olds in zip(
            both, value.mean, residual.mean, value.M2, residual.M2, strict=True
        )
    ]
    counts = _chosen(
        (kept, more),
        (merged.count, old.skipped + left_out),
        (value.counter, residual.counter, value.skipped, residual.skipped),
    )
    mean, mean_rest, M2, M2_rest = ([leaf[i] for leaf in leaves] for i in range(4))
    counter, counter_rest, skipped, skipped_rest = counts
    return (
        Statistics(mean, M2, counter, skipped),
        Statistics(mean_rest, M2_rest, counter_rest, skipped_rest),
    )


def _chosen(
    when: Sequence[jax.Array],
    news: Sequence[jax.Array],
    olds: Sequence[jax.Array],
    *,
    finite: bool = False,
) -> tuple[jax.Array, ...]:
    """Value and residual of each new array where it is wanted, else the old ones."""
    pairs = [part for new in news for part in split(new, finite=finite)]
    flags = [flag for flag in when for _ in range(2)]
    return together(*map(lax.select, flags, pairs, olds))


def _forget(running: Moments, decay: float | None) -> Moments:
    if decay is None:
        return running
    M2 = jax.tree.map(lambda v: v * decay, running.M2)
    return Moments(running.mean, M2, running.count * decay)


def _all_finite(merged: Moments) -> jax.Array:
    """Whether float32 holds means, M2s and the counter."""

    def held(x: jax.Array) -> jax.Array:  # also between it and the next, which rounds
        return jnp.abs(x) <= float(np.finfo(np.float32).max)

    leaves = zip(merged.mean, merged.M2, strict=True)
    flags = [all_pair(held(mean), held(M2)) for mean, M2 in leaves]
    return reduce(operator.and_, flags, held(merged.count))
