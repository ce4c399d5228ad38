# SPDX-License-Identifier: Apache-2.0
"""Sums of a batch that can be trusted: a second read where the first lost digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nnx_norm.sums import Sums, align_leading, float_dtype, sums

LOST = 2.5
"""Cancellation above which a batch is read again: `S2` over what it adds to M2."""

READS = 2
"""Further reads at most: about the midpoint if a sum was not finite, then the mean."""


class BatchSums(NamedTuple):
    """Sums over the samples of a batch, one entry per leaf where a list.

    Attributes:
      shift: Shifts `[*feat]` that the sums are about.
      sums: `Sums` per leaf.
      count: float64 scalar, the sum of weights.
      rows: float64 scalar, the number of samples that count.
      skipped: float64 scalar, the number of samples left out as not finite.
    """

    shift: list[jax.Array]
    sums: list[Sums]
    count: jax.Array
    rows: jax.Array
    skipped: jax.Array


class _Weight(NamedTuple):
    """Weights as `sums` takes them, and what they add up to."""

    weight: jax.Array | None
    count: jax.Array
    rows: jax.Array
    skipped: jax.Array


def batch_sums(
    leaves: Sequence[jax.Array],
    lead: int,
    *,
    shift: Sequence[jax.Array] | None = None,
    prior: jax.Array | float = 0.0,
    mask: jax.Array | None = None,
    weights: jax.Array | None = None,
    skip: bool = False,
) -> BatchSums:
    """Sums of deviations of a batch from a shift, read again only where needed.

    The first read is about `shift`. Where a sum is not finite, or the shift was so far
    from the batch's mean that the squares drown the variance, the batch is read again
    about a better shift (the constant itself if a feature doesn't move, so that its
    deviations are exactly zero). Call it inside `extended.double()`.

    The second read is the body of a while loop of at most `READS` trips, not a
    `lax.cond`: mapped over seeds a cond becomes a select and runs both branches, and
    an unguarded loop body is hoisted, being invariant; the barrier prevents that.

    Args:
      leaves: Arrays `[*lead, *feat]` of one batch.
      lead: Number of leading axes.
      shift: Arrays `[*feat]`, such as the running mean; zeros if None.
      prior: Number of samples behind `shift` if it is a running mean. Squares of a
        distance that the merge adds to M2 anyway are no loss.
      mask: Bool array, shaped like the leading axes or a leading prefix of them.
      weights: Real array of such a shape. Negative and non-finite ones count as
        skipped.
      skip: Whether to leave out samples with a NaN or infinity in any leaf.

    Returns:
      The sums, about shifts of their own.

    Example:
      >>> from nnx_norm.extended import double
      >>> with double():
      ...     x = jnp.array([[1e6], [1e6 + 1], [jnp.nan]], jnp.float32)
      ...     b = batch_sums([x], 1, skip=True)
      ...     [float(v[0]) for v in b.sums[0]], float(b.rows), float(b.skipped)
      ([0.0, 0.5], 2.0, 1.0)
    """
    floats = [float_dtype(x.dtype) for x in leaves]
    if shift is None:
        shift = [
            jnp.zeros(x.shape[lead:], f) for x, f in zip(leaves, floats, strict=True)
        ]
    shift = [s.astype(f) for s, f in zip(shift, floats, strict=True)]
    given = _read_weights(leaves[0].shape[:lead], mask, weights)
    first = [sums(x, s, given.weight, lead) for x, s in zip(leaves, shift, strict=True)]
    first = BatchSums(shift, first, given.count, given.rows, given.skipped)

    def needed(state: tuple[jax.Array, BatchSums]) -> jax.Array:
        reads, batch = state
        lost = [_lost_digits(s, batch.count, prior) for s in batch.sums]
        return (reads < READS) & jnp.any(jnp.stack(lost))

    def again(state: tuple[jax.Array, BatchSums]) -> tuple[jax.Array, BatchSums]:
        reads, batch = state
        data, reads = lax.optimization_barrier((list(leaves), reads))
        batch = _read_again(data, lead, batch, given, skip)
        return _varying_like_data((reads + 1, batch))

    start = _varying_like_data((jnp.zeros((), jnp.int32), first))
    return lax.while_loop(needed, again, start)[1]


def _read_weights(
    sizes: tuple[int, ...], mask: jax.Array | None, weights: jax.Array | None
) -> _Weight:
    """One weight per sample from mask and weights, and their sums."""
    total = jnp.asarray(float(math.prod(sizes)), jnp.float64)
    nothing = jnp.zeros((), jnp.float64)
    if mask is None and weights is None:
        return _Weight(None, total, total, nothing)
    masks = [] if mask is None else [_over(mask, len(sizes))]
    if weights is None:
        return _tally(masks[0], sizes, nothing)
    weight = _over(weights, len(sizes))
    weight = weight if weight.dtype == jnp.float64 else weight.astype(jnp.float32)
    valid = jnp.isfinite(weight) & (weight >= 0)
    refused = ~valid if mask is None else ~valid & masks[0]
    for keep in (valid, *masks):
        weight = jnp.where(keep, weight, 0)
    return _tally(weight, sizes, _times(refused, sizes))


def _over(weight: jax.Array, lead: int) -> jax.Array:
    """A leading prefix `[T, B]`, with axes of size 1 up to `lead`."""
    return weight.reshape(weight.shape + (1,) * (lead - weight.ndim))


def _tally(weight: jax.Array, sizes: tuple[int, ...], skipped: jax.Array) -> _Weight:
    rows = _times(weight.astype(jnp.bool_), sizes)
    return _Weight(weight, _times(weight, sizes), rows, skipped)


def _times(weight: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """float64 sum of weights; those of a prefix stand for several samples each."""
    dtype = jnp.int32 if weight.dtype == jnp.bool_ else jnp.float64
    total = jnp.sum(weight.astype(dtype)).astype(jnp.float64)
    shape = (1,) * (len(sizes) - weight.ndim) + weight.shape
    return total * math.prod(n for n, m in zip(sizes, shape, strict=True) if m == 1)


def _lost_digits(s: Sums, count: jax.Array, prior: jax.Array | float) -> jax.Array:
    """Whether a feature's sums are not finite, or mostly the shift's own distance."""
    delta = s.first / jnp.where(count > 0, count, 1.0)
    within = jnp.maximum(s.second - s.first * delta, 0.0)
    both = count + prior
    between = delta**2 * (count * prior / jnp.where(both > 0, both, 1.0))
    return ~jnp.all(s.second <= LOST * (within + between))  # NaN compares false


def _read_again(
    leaves: list[jax.Array], lead: int, last: BatchSums, given: _Weight, skip: bool
) -> BatchSums:
    """One careful read: which samples count, a better shift, and the sums about it."""
    weight, skipped = given.weight, given.skipped
    if skip:
        finite = _finite_samples(leaves, lead)
        counted = finite if weight is None else finite & weight.astype(jnp.bool_)
        left_out = ~finite if weight is None else ~finite & weight.astype(jnp.bool_)
        skipped = skipped + _times(left_out, finite.shape)
        if weight is None or weight.dtype == jnp.bool_:
            weight = counted
        else:
            weight = jnp.where(counted, weight, 0)
    tally = given if weight is None else _tally(weight, leaves[0].shape[:lead], skipped)
    shift = [
        _better_shift(x, s, about, weight, last.count, lead)
        for x, s, about in zip(leaves, last.sums, last.shift, strict=True)
    ]
    again = [sums(x, s, weight, lead) for x, s in zip(leaves, shift, strict=True)]
    return BatchSums(shift, again, tally.count, tally.rows, skipped)


def _finite_samples(leaves: list[jax.Array], lead: int) -> jax.Array:
    """Bool `[*lead]`: the samples that are finite in all features of all leaves."""
    finite = jnp.ones(leaves[0].shape[:lead], jnp.bool_)
    for x in leaves:
        if jnp.issubdtype(x.dtype, jnp.floating):
            finite &= jnp.all(jnp.isfinite(x), axis=tuple(range(lead, x.ndim)))
    return finite


def _better_shift(
    x: jax.Array,
    s: Sums,
    shift: jax.Array,
    weight: jax.Array | None,
    count: jax.Array,
    lead: int,
) -> jax.Array:
    """The mean by the last sums, kept within the samples; or their midpoint."""
    axes = tuple(range(lead))
    values = x.astype(shift.dtype)
    counted = None if weight is None else align_leading(weight, x).astype(jnp.bool_)
    low = jnp.min(values, axis=axes, initial=jnp.inf, where=counted)
    high = jnp.max(values, axis=axes, initial=-jnp.inf, where=counted)
    mean = shift.astype(jnp.float64) + s.first / jnp.where(count > 0, count, 1.0)
    mean = jnp.clip(mean.astype(shift.dtype), low, high)
    better = jnp.where(jnp.isfinite(mean), mean, low / 2 + high / 2)
    return jnp.where(jnp.isfinite(better), better, 0)  # no sample, or all of them bad


def _varying_like_data(
    state: tuple[jax.Array, BatchSums],
) -> tuple[jax.Array, BatchSums]:
    """Mark all of a loop's state as varying over the mesh axes that the data does.

    `shard_map` checks that a loop carry keeps its type; `lax.pcast` is refused under
    a vmapped axis, so the type is taken from the data by a select between equal values.
    """
    batch = state[1]
    probes = [s.first.ravel()[:1] for s in batch.sums] + [batch.count.reshape(1)]
    probe = jnp.isnan(jnp.sum(jnp.concatenate(probes)))
    return jax.tree.map(lambda v: jnp.where(probe, v, v), state)
