# SPDX-License-Identifier: Apache-2.0
"""Loops over slices of rows: the fastest read of a batch on one CPU device.

XLA's CPU reductions use all cores but read a history once for each sum; a loop reads
it once, on one core, in 0.6 of their CPU time and less wall time. Eight slices (four
in a small batch, one in a tiny one) are added pairwise in float32 and the result to
float64 lanes, so no float32 chain is longer than three additions and the sums are good
to about 1e-8
whatever the number of rows. The careful read adds rows up in float64, of all leaves
at once: whether a sample is finite is known where it is needed, and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx_norm.kernels import add_rows, all_pair, total_pair
from nnx_norm.samples import align_leading, deviation

LANES = 2048
"""Most numbers in a slice: slices and lanes stay in the first two caches."""

TINY = 2**14
"""Numbers in a batch below which every operation is one too many, see `CAREFUL`."""

SMALL = 2**16
"""Numbers in a batch below which careful steps are short, so that XLA runs inline."""

CAREFUL = (8, 4096)
"""Most numbers of all leaves in a careful step of a small batch, and of another.

XLA runs a program inline that has less than 1000 operations outside of loops and in
one trip of each: a small batch of up to 8 features is folded in half of the time.
"""

Pair = tuple[jax.Array, jax.Array]


def sums_in_slices(
    x: jax.Array,
    shift: jax.Array,
    weight: jax.Array | None,
    lead: int,
) -> Pair:
    """Sums of deviations of `x` from `shift` and of their squares.

    Call it inside `extended.double()`. Samples of weight zero are not looked at.

    Args:
      x: Samples `[*lead, *feat]` of any real dtype, on one device.
      shift: Float array `[*feat]`.
      weight: None, or bool or float weights broadcastable to `[*lead]`.
      lead: Number of leading axes.

    Returns:
      Two float64 arrays `[*feat]`.
    """
    sizes, row = x.shape[:lead], _flat(shift)
    zero = jnp.zeros(shift.shape, jnp.float64)
    if not x.size:
        return zero, zero
    rows = x.reshape(-1, *row.shape)
    weights = None if weight is None else jnp.broadcast_to(weight, sizes).reshape(-1)
    # A power of two, to add pairwise.
    unroll = 1 if x.size < TINY else 4 if x.size < SMALL else 8
    width = _width(rows.shape[0], row.size, unroll)
    step = width * unroll
    whole = rows.shape[0] - rows.shape[0] % step

    def terms(start: jax.Array, size: int) -> Pair:
        part = lax.dynamic_slice_in_dim(rows, start, size)
        w = None if weights is None else lax.dynamic_slice_in_dim(weights, start, size)
        return _terms(part, row, w)

    def add_step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start, *lanes = carry
        parts = [terms(start + i * width, width) for i in range(unroll)]
        added = [
            _pairwise(part).astype(jnp.float64) for part in zip(*parts, strict=True)
        ]
        return start + step, *map(jnp.add, lanes, added)

    # Like `rows`, so that under shard_map they vary over the mesh as the data do.
    lanes = jnp.zeros_like(rows, jnp.float64, shape=(width, *row.shape))
    start = jnp.zeros((), _index_dtype(rows.shape[0]))
    carry = (start, lanes, lanes)
    if whole:
        carry = lax.while_loop(lambda c: c[0] < whole, add_step, carry)
    first, second = total_pair(carry[1], carry[2], (0,))
    if whole < rows.shape[0]:
        rest = terms(jnp.full_like(start, whole), rows.shape[0] - whole)
        d, squares = (v.astype(jnp.float64) for v in rest)
        d, squares = total_pair(d, squares, (0,))
        first, second = first + d, second + squares
    return first.reshape(shift.shape), second.reshape(shift.shape)


def careful_in_slices(
    leaves: Sequence[jax.Array],
    shifts: Sequence[jax.Array],
    weight: jax.Array | None,
    lead: int,
    *,
    skip: bool,
    last: tuple[Sequence[Pair], Pair],
) -> tuple[list[Pair], Pair]:
    """The sums of `sums_in_slices` of all leaves in float64, where nothing overflows.

    Args:
      leaves: Samples `[*lead, *feat]` of any real dtypes, on one device, not empty.
      shifts: Float arrays `[*feat]`.
      weight: None, or bool or float weights broadcastable to `[*lead]`.
      lead: Number of leading axes.
      skip: Whether to leave out samples that aren't finite in all leaves.
      last: What an earlier read returned.

    Returns:
      Pairs of sums, as `last` has them; and, if `skip`, the sum of the weights and the
      number of samples that count, else those of `last`.
    """
    sizes = leaves[0].shape[:lead]
    count = math.prod(sizes)
    rows = [
        x.reshape(count, *_flat(shift).shape)
        for x, shift in zip(leaves, shifts, strict=True)
    ]
    features = sum(shift.size for shift in shifts)
    most = CAREFUL[count * features >= SMALL] // features
    size = max(1, min(most, count))
    weights = None if weight is None else jnp.broadcast_to(weight, sizes).reshape(-1)

    def add_step(carry: tuple[Any, list[Pair], Pair]) -> tuple[Any, list[Pair], Pair]:
        # The barrier keeps what a shift is converted to inside of the loop.
        start, about = lax.optimization_barrier((carry[0], list(shifts)))
        at, keep = start, jnp.ones(size, jnp.bool_)
        if count % size:  # the last slice overlaps
            at = jnp.minimum(start, count - size)
            keep = at + lax.iota(at.dtype, size) >= start
        parts = [lax.dynamic_slice_in_dim(x, at, size) for x in rows]
        for x in parts:
            if skip and jnp.issubdtype(x.dtype, jnp.floating):
                finite = jnp.isfinite(x)
                keep &= all_pair(finite, finite, tuple(range(1, x.ndim)))
        w = None
        if weights is not None:
            w = lax.dynamic_slice_in_dim(weights, at, size).astype(jnp.float64)
            keep &= w != 0

        def add(old: Pair, *terms: jax.Array) -> Pair:
            first, second = add_rows(old, terms)
            return first, second

        sums = [
            add(old, *_careful_terms(x, _flat(shift), w, keep))
            for x, shift, old in zip(parts, about, carry[1], strict=True)
        ]
        ones = keep.astype(jnp.float64)
        counts = add(carry[2], ones if w is None else w * ones, ones)
        return start + size, sums, counts

    # Like the data, as the lanes above.
    zeros = partial(jnp.zeros_like, rows[0])
    nothing = [zeros(jnp.float64, shape=_flat(s).shape) for s in shifts]
    none = zeros(jnp.float64, shape=())
    start = zeros(_index_dtype(count), shape=())
    carry = (start, [(zero, zero) for zero in nothing], (none, none))
    _, sums, counts = lax.while_loop(lambda c: c[0] < count, add_step, carry)
    pairs = zip(sums, shifts, strict=True)
    sums = [(a.reshape(s.shape), b.reshape(s.shape)) for (a, b), s in pairs]
    return sums, counts if skip else last[1]


def _flat(x: jax.Array) -> jax.Array:
    """One axis of features, or none: XLA copies a history to give it an axis of 1."""
    return x.reshape(()) if x.size == 1 else x.reshape(-1)


def _index_dtype(count: int) -> Any:
    return jnp.int32 if count < 2**31 else jnp.int64


def _terms(x: jax.Array, shift: jax.Array, weight: jax.Array | None) -> Pair:
    """Weighted deviations of rows `[N, F]` or `[N]`, and their squares."""
    d = deviation(x, shift)
    if weight is None:
        return d, d * d
    w = align_leading(weight, d)
    d = jnp.where(w.astype(jnp.bool_), d, 0)
    w = 1 if w.dtype == jnp.bool_ else w.astype(d.dtype)
    return w * d, w * d * d


def _careful_terms(
    x: jax.Array, shift: jax.Array, weight: jax.Array | None, keep: jax.Array
) -> Pair:
    """The same in float64; rows that aren't kept give zero, whatever stands there."""
    d = x.astype(jnp.float64) - shift.astype(jnp.float64)
    d = jnp.where(align_leading(keep, d), d, 0.0)
    wd = d if weight is None else align_leading(weight, d) * d
    return wd, wd * d


def _width(rows: int, features: int, unroll: int) -> int:
    """Rows in a slice: few in a small batch, and such that little is left over."""
    most = min(LANES, rows * features // 4096) // features
    most = max(1, min(most, rows // unroll))
    return min(range(most, most // 2, -1), key=lambda width: rows % (width * unroll))


def _pairwise(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of a power of two of arrays, as a balanced tree."""
    while len(parts) > 1:
        parts = list(map(jnp.add, parts[::2], parts[1::2]))
    return parts[0]
