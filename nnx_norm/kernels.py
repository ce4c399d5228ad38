# SPDX-License-Identifier: Apache-2.0
"""Several results from one kernel, where XLA's CPU compiler would make several.

On CPU every fusion becomes a kernel of its own, which takes 10 to 15 ms to compile
however little it does, and has one output; only a reduction of several operands has
several. So sums of a pair are taken in one reduction, and small arrays that belong
together are computed by a reduction over one row each and a row of nothing: an update
of the statistics compiles to 15 different kernels instead of 35.

(XLA's CPU compiler marks small calls of its own to be one kernel, loops included. Set
by us, the mark halves the time that an update takes to compile; but inside of a
gradient or a cond jax 0.12 then aborts the process.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def total_pair(
    a: jax.Array, b: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Sums of two arrays of one shape over the same axes, in one reduction.

    XLA's CPU compiler fuses what a reduction of two operands reads; for one operand
    it writes conversions and selections down first, at the size of what they read.

    Args:
      a: Array `[*shape]`.
      b: Array `[*shape]`.
      axes: Axes to sum over.

    Returns:
      Two arrays without those axes.

    Example:
      >>> [float(v) for v in total_pair(jnp.ones(3), jnp.arange(3.0), (0,))]
      [3.0, 3.0]
    """
    zero = tuple(jnp.zeros((), x.dtype) for x in (a, b))
    first, second = lax.reduce((a, b), zero, _add, axes)
    return first, second


def all_pair(
    a: jax.Array, b: jax.Array, axes: tuple[int, ...] | None = None
) -> jax.Array:
    """Whether two bool arrays of one shape are all true, in one reduction.

    Args:
      a: Bool array.
      b: Bool array of that shape.
      axes: Axes to reduce over, or all of them.

    Returns:
      Bool array without those axes.

    Example:
      >>> bool(all_pair(jnp.array([True, True]), jnp.array([True, False])))
      False
    """

    def both(x: Any, y: Any) -> tuple[Any, Any]:
        return x[0] & y[0], x[1] & y[1]

    axes = tuple(range(a.ndim)) if axes is None else axes
    true = jnp.ones((), jnp.bool_)
    first, second = lax.reduce((a, b), (true, true), both, axes)
    return first & second


def together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays of one shape and float dtype as they are, from one kernel on CPU.

    Args:
      *arrays: Arrays `[*shape]`; not differentiable.

    Returns:
      The same arrays.

    Example:
      >>> [v.tolist() for v in together(jnp.ones(2), jnp.arange(2.0))]
      [[1.0, 1.0], [0.0, 1.0]]
    """
    if jax.default_backend() != "cpu":
        return arrays

    def first_number(a: Any, b: Any) -> tuple[Any, ...]:
        # Not a sum, which would flush what is smaller than the normal numbers.
        return tuple(lax.select(x != x, y, x) for x, y in zip(a, b, strict=True))

    nothing = [jnp.asarray(jnp.nan, x.dtype) for x in arrays]
    rows = [_first_row(x, 2, n) for x, n in zip(arrays, nothing, strict=True)]
    return tuple(lax.reduce(tuple(rows), tuple(nothing), first_number, (0,)))


def add_rows(
    totals: Sequence[jax.Array], rows: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Totals with the sums over some rows added, from one kernel on CPU.

    Args:
      totals: Arrays `[*shape]` of one shape and float dtype.
      rows: As many arrays `[n, *shape]` of that dtype.

    Returns:
      Arrays `[*shape]`.

    Example:
      >>> one, two = jnp.ones(()), jnp.full((), 2.0)
      >>> [float(v) for v in add_rows((one, two), (jnp.ones(3), jnp.ones(3)))]
      [4.0, 5.0]
    """
    nothing = [jnp.zeros((), x.dtype) for x in totals]
    terms = [
        x + _first_row(total, len(x), n)
        for total, x, n in zip(totals, rows, nothing, strict=True)
    ]
    return tuple(lax.reduce(tuple(terms), tuple(nothing), _add, (0,)))


def _first_row(x: jax.Array, n: int, nothing: jax.Array) -> jax.Array:
    """Array `[n, *shape]` that holds `x` first, and then nothing."""
    padding = [(0, n - 1, 0), *((0, 0, 0) for _ in x.shape)]
    return lax.pad(x[None], nothing, padding)


def _add(x: Any, y: Any) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(x, y, strict=True))
