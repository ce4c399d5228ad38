# SPDX-License-Identifier: Apache-2.0
"""Sums of a batch that can be trusted: a second read where the first lost digits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from nnx_norm.explicit import automatic, features_of
from nnx_norm.samples import float_dtype
from nnx_norm.slices import careful_in_slices
from nnx_norm.sums import FUSED_ON_CPU, Sums, in_slices, on_one_cpu, sums
from nnx_norm.weighting import Weighting, leave_out, weigh

LOST = 1.25
"""Cancellation above which a batch is read again: `S2` over what it adds to M2.

Below it the mean is safe, too. Of `n` samples at a distance `d` the first read knows
the mean to `1.8e-7 d` (three roundings in float32), and the merge takes `n / (n + m)`
of that. The excess of `S2` over `K`, what M2 gains, is `n² d² / (n + m)`: at most
`K / 4`, so the error is at most half of 1.8e-7 standard deviations of the union.
"""

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
    step = partial(_batch_sums, lead=lead, skip=skip, local=local)
    per_leaf: list[Any] = [features_of(x, lead) for x in leaves]
    n: Any = jax.ShapeDtypeStruct((), jnp.float64)  # on no mesh: whole
    arrays = list(leaves), shift, prior, mask, weights
    return automatic(step, *arrays, like=BatchSums(per_leaf, per_leaf, n, n, n))


def _batch_sums(
    leaves: list[jax.Array],
    shift: Sequence[jax.Array] | None,
    prior: jax.Array | float,
    mask: jax.Array | None,
    weights: jax.Array | None,
    *,
    lead: int,
    skip: bool,
    local: bool | None,
) -> BatchSums:
    floats = [float_dtype(x.dtype) for x in leaves]
    if shift is None:
        shift = [
            jnp.zeros(x.shape[lead:], f) for x, f in zip(leaves, floats, strict=True)
        ]
    shift = [s.astype(f) for s, f in zip(shift, floats, strict=True)]
    if local is None:
        local = on_one_cpu(*leaves)
    read = partial(_read, leaves, lead, local=local)
    given = weigh(leaves[0].shape[:lead], mask, weights, local=local)
    first = read(shift, given, careful=False)
    sliced = local and in_slices(leaves)
    # An accelerator's reductions add long chains of float32, good to a few eps of the
    # distance: not enough where all of it goes to M2.
    allowed = jnp.asarray(prior if jax.default_backend() == "cpu" else 0.0)

    def needed(state: tuple[jax.Array, BatchSums]) -> jax.Array:
        reads, batch = state
        again = [_in_need(s, batch.count, allowed, reads) for s in batch.sums]
        return reduce(operator.or_, again)

    def again(state: tuple[jax.Array, BatchSums]) -> tuple[jax.Array, BatchSums]:
        reads, batch = state
        data, reads = lax.optimization_barrier((list(leaves), reads))
        shift = [
            _better_shift(s, about, batch.count)
            for s, about in zip(batch.sums, batch.shift, strict=True)
        ]
        careful = _read_slices if sliced else _read_whole
        batch = careful(data, lead, shift, given, batch, skip)
        return _varying_like_data((reads + 1, batch))

    start = _varying_like_data((jnp.zeros((), jnp.int32), first))
    batch = lax.while_loop(needed, again, start)[1]
    left_out = given.rows - batch.rows if skip else 0.0
    return batch._replace(skipped=given.skipped + left_out)


def _read(
    leaves: Sequence[jax.Array],
    lead: int,
    shift: list[jax.Array],
    given: Weighting,
    *,
    careful: bool,
    local: bool,
) -> BatchSums:
    read = [
        sums(x, s, given.weight, lead, careful=careful, local=local)
        for x, s in zip(leaves, shift, strict=True)
    ]
    return BatchSums(shift, read, given.count, given.rows, given.skipped)


def _read_slices(
    leaves: Sequence[jax.Array],
    lead: int,
    shift: list[jax.Array],
    given: Weighting,
    last: BatchSums,
    skip: bool,
) -> BatchSums:
    """The careful read on one CPU device."""
    sums, (count, rows) = careful_in_slices(
        leaves,
        shift,
        given.weight,
        lead,
        skip=skip,
        last=([(s.first, s.second) for s in last.sums], (last.count, last.rows)),
    )
    return last._replace(
        shift=shift, sums=[Sums(*s) for s in sums], count=count, rows=rows
    )


def _read_whole(
    leaves: Sequence[jax.Array],
    lead: int,
    shift: list[jax.Array],
    given: Weighting,
    last: BatchSums,
    skip: bool,
) -> BatchSums:
    """The careful read anywhere else."""
    # Integers are finite: XLA would spend seconds on adding up constant flags.
    if skip and any(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        given = leave_out(given, ~_finite_samples(leaves, lead))
    batch = _read(leaves, lead, shift, given, careful=True, local=False)
    return batch._replace(skipped=last.skipped)


def _in_need(
    s: Sums, count: jax.Array, prior: jax.Array, reads: jax.Array
) -> jax.Array:
    """Whether sums are not finite, or mostly the shift's own distance, in a feature.

    With means `d = S1 / n` and `m` samples before, `S2 - S1 d` is from within the
    batch and `d² n m / (n + m)` what the merge adds; all times `n (n + m)` here, since
    a division of scalars would be a kernel of its own.
    """
    prior = prior.astype(jnp.float64)
    both = count + prior
    square, second = s.first**2, s.second * (count * both)
    kept = LOST * (jnp.maximum(second - square * both, 0.0) + square * prior)
    is_good = second - kept <= 0  # NaN compares false, and inf - inf is one
    allowed = jnp.where(is_good, jnp.int32(0), jnp.int32(READS))

    def larger(x: Any, y: Any) -> tuple[Any, Any]:
        return jnp.maximum(x[0], y[0]), jnp.maximum(x[1], y[1])

    zero = jnp.zeros((), jnp.int32)
    given = jnp.broadcast_to(reads, allowed.shape)
    axes = tuple(range(allowed.ndim))
    reads, most = lax.reduce((given, allowed), (zero, zero), larger, axes)
    return reads < most


def _finite_samples(leaves: Sequence[jax.Array], lead: int) -> jax.Array:
    """Bool `[*lead]`: the samples that are finite in all features of all leaves."""
    finite = jnp.ones(leaves[0].shape[:lead], jnp.bool_)
    for x in leaves:
        if jnp.issubdtype(x.dtype, jnp.floating):
            finite &= _finite(x, lead)
    return finite


def _finite(x: jax.Array, lead: int) -> jax.Array:
    """Whether all features are: bool `[*lead]`.

    On CPU a comparison would be written down for every feature. Zero times infinity is
    a NaN, and a sum of products is fused; for other dtypes, see `sums`, the largest
    and the smallest feature are, but XLA gathers both from devices with some of them.
    """
    axes = tuple(range(lead, x.ndim))
    if jax.default_backend() != "cpu":
        return jnp.all(jnp.isfinite(x), axis=axes)
    if x.dtype in FUSED_ON_CPU:
        return jnp.sum(x * jnp.zeros((), x.dtype), axis=axes) == 0

    def largest(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        return jnp.maximum(a[0], b[0]), jnp.maximum(a[1], b[1])  # NaN wins

    least = jnp.asarray(-jnp.inf, x.dtype)
    high, low = lax.reduce((x, -x), (least, least), largest, axes)
    none = jnp.asarray(bool(x.size), jnp.bool_)  # no feature at all: -inf, and finite
    return ~none | (jnp.isfinite(high) & jnp.isfinite(low))


def _better_shift(s: Sums, shift: jax.Array, count: jax.Array) -> jax.Array:
    """The mean by the last sums, or the old shift again where they were not finite.

    In float32 like the samples, so that the deviations of a constant are exact.
    """
    # A vector to divide by: the reciprocal of a scalar would be a kernel of its own.
    n = jnp.where(count > 0, count, 1.0) + 0.0 * s.first
    mean = (shift.astype(jnp.float64) + s.first / n).astype(shift.dtype)
    return jnp.where(jnp.isfinite(mean), mean, shift)


def _varying_like_data(
    state: tuple[jax.Array, BatchSums],
) -> tuple[jax.Array, BatchSums]:
    """Mark all of a loop's state as varying over the mesh axes that the data does.

    `shard_map` checks that a loop carry keeps its type; `lax.pcast` is refused under
    a vmapped axis, so the type is taken from the data by a select between equal values.
    """
    if AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return state  # and features may be sharded: no part of them to be had
    batch = state[1]
    probes = [s.first.ravel()[:1] for s in batch.sums] + [batch.count.reshape(1)]
    probe = jnp.isnan(jnp.sum(jnp.concatenate(probes)))
    return jax.tree.map(lambda v: jnp.where(probe, v, v), state)
