# SPDX-License-Identifier: Apache-2.0
"""Sums of a batch that can be trusted: a second read where the first lost digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nnx_norm.samples import all_pair, float_dtype, total_pair
from nnx_norm.slices import finite_in_slices
from nnx_norm.sums import WHOLE_ON_CPU, Sums, on_one_cpu, sums

LOST = 2.5
"""Cancellation above which a batch is read again: `S2` over what it adds to M2."""

READS = 3
"""Further reads at most: one if a sum was not finite, two to find a constant."""


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


@partial(jax.jit, static_argnames=("lead", "skip", "local"))
def batch_sums(
    leaves: Sequence[jax.Array],
    lead: int,
    *,
    shift: Sequence[jax.Array] | None = None,
    prior: jax.Array | float = 0.0,
    mask: jax.Array | None = None,
    weights: jax.Array | None = None,
    skip: bool = False,
    local: bool | None = None,
) -> BatchSums:
    """Sums of deviations of a batch from a shift, read again only where needed.

    The first read is about `shift`. Where a sum is not finite, or the shift was so far
    from the batch's mean that the squares drown the variance, the batch is read again
    about a better shift. A feature that doesn't move then deviates from the float32
    nearest to its mean by a few spacings, which add up exactly: its mean is the
    constant and its M2 zero. Call it inside `extended.double()`.

    The second read is the body of a while loop of at most `READS` trips, not a
    `lax.cond`: mapped over seeds a cond becomes a select and runs both branches, and
    an unguarded loop body is hoisted, being invariant; the barrier prevents that.
    Jitted, since a loop called eagerly is compiled anew by every call.

    Args:
      leaves: Arrays `[*lead, *feat]` of one batch.
      lead: Number of leading axes.
      shift: Arrays `[*feat]`, such as the running mean; zeros if None.
      prior: Number of samples behind `shift` if it is a running mean. Squares of a
        distance that the merge adds to M2 anyway are no loss if added in slices.
      mask: Bool array, shaped like the leading axes or a leading prefix of them.
      weights: Real array of such a shape. Negative and non-finite ones count as
        skipped.
      skip: Whether to leave out samples with a NaN or infinity in any leaf.
      local: Whether the leaves lie whole on one CPU device; None finds out.

    Returns:
      The sums, about shifts of their own.

    Example:
      >>> from nnx_norm.extended import double
      >>> with double():
      ...     x = jnp.array([[1e6], [1e6 + 1], [jnp.nan]], jnp.float32)
      ...     b = batch_sums([x], 1, skip=True)
      ...     float(b.sums[0].second[0]), float(b.rows), float(b.skipped)
      (0.5, 2.0, 1.0)
    """
    floats = [float_dtype(x.dtype) for x in leaves]
    if shift is None:
        shift = [
            jnp.zeros(x.shape[lead:], f) for x, f in zip(leaves, floats, strict=True)
        ]
    shift = [s.astype(f) for s, f in zip(shift, floats, strict=True)]
    if local is None:
        local = on_one_cpu(*leaves)
    read = partial(_read, leaves, lead, local=local)
    given = _read_weights(leaves[0].shape[:lead], mask, weights)
    first = read(shift, given, careful=False)
    # Native reductions add long chains of float32, good to a few eps of the distance:
    # not enough where all of it goes to M2.
    allowed = prior if local else 0.0

    def needed(state: tuple[jax.Array, BatchSums]) -> jax.Array:
        reads, batch = state
        lost = [_lost_digits(s, batch.count, allowed) for s in batch.sums]
        return (reads < READS) & jnp.any(jnp.stack(lost))

    def again(state: tuple[jax.Array, BatchSums]) -> tuple[jax.Array, BatchSums]:
        reads, batch = state
        data, reads = lax.optimization_barrier((list(leaves), reads))
        counted = given
        if skip:
            counted = _leave_out(given, ~_finite_samples(data, lead, local))
        shift = [
            _better_shift(s, about, batch.count)
            for s, about in zip(batch.sums, batch.shift, strict=True)
        ]
        batch = _read(data, lead, shift, counted, careful=True, local=local)
        return _varying_like_data((reads + 1, batch))

    start = _varying_like_data((jnp.zeros((), jnp.int32), first))
    return lax.while_loop(needed, again, start)[1]


def _read(
    leaves: Sequence[jax.Array],
    lead: int,
    shift: list[jax.Array],
    given: _Weight,
    *,
    careful: bool,
    local: bool,
) -> BatchSums:
    read = [
        sums(x, s, given.weight, lead, careful=careful, local=local)
        for x, s in zip(leaves, shift, strict=True)
    ]
    return BatchSums(shift, read, given.count, given.rows, given.skipped)


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
    skipped = _tally(refused, sizes, nothing).rows
    return _tally(weight, sizes, skipped)


def _over(weight: jax.Array, lead: int) -> jax.Array:
    """A leading prefix `[T, B]`, with axes of size 1 up to `lead`."""
    return weight.reshape(weight.shape + (1,) * (lead - weight.ndim))


def _tally(weight: jax.Array, sizes: tuple[int, ...], skipped: jax.Array) -> _Weight:
    """Sums of weights; those of a prefix stand for several samples each."""
    times = math.prod(
        n for n, m in zip(sizes, weight.shape, strict=True) if m == 1 and n != 1
    )
    rows = weight.astype(jnp.bool_).astype(jnp.int32)
    axes = tuple(range(weight.ndim))
    count, rows = total_pair(weight.astype(jnp.float64), rows, axes)
    return _Weight(weight, count * times, rows.astype(jnp.float64) * times, skipped)


def _lost_digits(s: Sums, count: jax.Array, prior: jax.Array | float) -> jax.Array:
    """Whether a feature's sums are not finite, or mostly the shift's own distance."""
    delta = s.first / jnp.where(count > 0, count, 1.0)
    within = jnp.maximum(s.second - s.first * delta, 0.0)
    both = count + prior
    between = delta**2 * (count * prior / jnp.where(both > 0, both, 1.0))
    kept = s.second <= LOST * (within + between)  # NaN compares false
    return ~all_pair(kept, jnp.isfinite(s.second))


def _leave_out(given: _Weight, bad: jax.Array) -> _Weight:
    """Weights without the bad samples `[*lead]`, which count as skipped."""
    if given.weight is None:
        weight = ~bad
    else:
        weight = jnp.where(bad, jnp.zeros_like(given.weight), given.weight)
    kept = _tally(weight, bad.shape, given.skipped)
    return kept._replace(skipped=given.skipped + (given.rows - kept.rows))


def _finite_samples(leaves: list[jax.Array], lead: int, local: bool) -> jax.Array:
    """Bool `[*lead]`: the samples that are finite in all features of all leaves."""
    finite = jnp.ones(leaves[0].shape[:lead], jnp.bool_)
    for x in leaves:
        if jnp.issubdtype(x.dtype, jnp.floating):
            sliced = local and x.dtype not in WHOLE_ON_CPU
            finite &= finite_in_slices(x, lead) if sliced else _finite(x, lead)
    return finite


def _finite(x: jax.Array, lead: int) -> jax.Array:
    """Whether the largest and the smallest feature are: XLA fuses that everywhere."""

    def largest(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        return jnp.maximum(a[0], b[0]), jnp.maximum(a[1], b[1])  # NaN wins

    least = jnp.asarray(-jnp.inf, x.dtype)
    axes = tuple(range(lead, x.ndim))
    high, low = lax.reduce((x, -x), (least, least), largest, axes)
    none = jnp.asarray(bool(x.size), jnp.bool_)  # no feature at all: -inf, and finite
    return ~none | (jnp.isfinite(high) & jnp.isfinite(low))


def _better_shift(s: Sums, shift: jax.Array, count: jax.Array) -> jax.Array:
    """The mean by the last sums, or the old shift again where they were not finite.

    In float32 like the samples, so that the deviations of a constant are exact.
    """
    mean = shift.astype(jnp.float64) + s.first / jnp.where(count > 0, count, 1.0)
    mean = mean.astype(shift.dtype)
    return jnp.where(jnp.isfinite(mean), mean, shift)


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
