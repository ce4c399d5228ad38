# SPDX-License-Identifier: Apache-2.0
r"""The one read: sums of deviations from a shift, over the leading axes.

For samples $x_i$ with weights $w_i$ and a shift $s$,

$$S_1 = \sum w_i (x_i - s), \qquad S_2 = \sum w_i (x_i - s)^2 .$$

About a shift near the mean the two lose no digits to an offset. There are three ways
to read, none of which materialises anything of the history's size:

- A batch that lies whole on one CPU device: one loop over slices, see `slices`.
- Anything else: two native reductions, which XLA splits over devices (no reshape:
  flattening a sharded `[T, B]` makes XLA gather it) and fuses into one read on
  accelerators. On CPU a term shared by both would be materialised, so the second
  reads through an optimization barrier, and a select would be too, so a weight of
  zero multiplies; should a NaN stand there, the careful read follows.
- The careful read of such a batch: the same in float64, or on CPU one reduction of
  two operands. XLA gathers the sums of all devices for that, `[devices, *feat]`, where
  native reductions take an all-reduce.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from nnx_norm.kernels import total_pair
from nnx_norm.samples import align_leading, deviation
from nnx_norm.slices import sums_in_slices

FUSED_ON_CPU = (jnp.float32, jnp.float64, jnp.uint8, jnp.int8, jnp.bool_)
"""What XLA's CPU compiler converts inside a native reduction; it writes others down."""


WHOLE_ON_CPU = (jnp.bfloat16,)
"""What XLA's CPU compiler converts as a whole, ahead of a loop over its slices."""


class Sums(NamedTuple):
    """Sums of deviations and of their squares about a shift, float64 `[*feat]`."""

    first: jax.Array
    second: jax.Array


def on_one_cpu(*arrays: jax.Array) -> bool:
    """Whether arrays are known to lie whole on one CPU device.

    Args:
      *arrays: Concrete or traced arrays. What is traced under a jit may be sharded
        unless there is only one device, or `shard_map` or `pmap` has cut it already.

    Returns:
      True if they are, False if that can't be known.

    Example:
      >>> on_one_cpu(jnp.ones(3))
      True
    """
    if any(isinstance(x, Tracer) for x in arrays):
        kinds = jax.sharding.get_abstract_mesh().axis_types
        cut = bool(kinds) and all(kind == AxisType.Manual for kind in kinds)
        return jax.default_backend() == "cpu" and (cut or jax.device_count() == 1)
    devices = set().union(*(x.sharding.device_set for x in arrays))
    return len(devices) <= 1 and all(device.platform == "cpu" for device in devices)


def sums(
    x: jax.Array,
    shift: jax.Array,
    weight: jax.Array | None,
    lead: int,
    *,
    careful: bool = False,
    local: bool | None = None,
) -> Sums:
    """Sums of deviations of `x` from `shift` over its `lead` leading axes.

    Call it inside `extended.double()`.

    Args:
      x: Samples `[*lead, *feat]` of any real dtype.
      shift: Float array `[*feat]`.
      weight: None, or bool or float weights broadcastable to `[*lead]`.
      lead: Number of leading axes.
      careful: Whether to compute in float64 from the start, and not to look at
        samples of weight zero: otherwise a NaN there may show as a NaN.
      local: Whether `x` lies whole on one CPU device; None finds out.

    Returns:
      `Sums` of float64 arrays `[*feat]`.

    Example:
      >>> from nnx_norm.extended import double
      >>> x = jnp.array([[1.0, 10.0], [3.0, 30.0]])
      >>> with double():
      ...     [v.tolist() for v in sums(x, jnp.array([2.0, 20.0]), None, 1)]
      [[0.0, 0.0], [2.0, 200.0]]
    """
    local = on_one_cpu(x) if local is None else local
    if local and not careful and x.dtype not in WHOLE_ON_CPU:
        return Sums(*sums_in_slices(x, shift, weight, lead))
    fused = jax.default_backend() != "cpu" or x.dtype in FUSED_ON_CPU
    read = _native if fused and not careful else _careful
    return read(x, shift, weight, lead)


def _native(
    x: jax.Array, shift: jax.Array, weight: jax.Array | None, lead: int
) -> Sums:
    """Two reductions in the dtype that samples are computed in."""

    def weighted(square: bool, x: Any, shift: Any, weight: Any) -> jax.Array:
        d = deviation(x, shift)
        w = 1 if weight is None else align_leading(weight, x).astype(d.dtype)
        term = (w * d) * d if square else w * d  # w first: a zero forestalls overflow
        return jnp.sum(term, axis=tuple(range(lead))).astype(jnp.float64)

    read = (x, shift, weight)
    again = lax.optimization_barrier(read) if jax.default_backend() == "cpu" else read
    return Sums(weighted(False, *read), weighted(True, *again))


def _careful(
    x: jax.Array, shift: jax.Array, weight: jax.Array | None, lead: int
) -> Sums:
    """One reduction of two operands in float64, slow and sure."""
    d = x.astype(jnp.float64) - shift.astype(jnp.float64)
    w: Any = 1.0
    if weight is not None:
        w = align_leading(weight, x)
        d = jnp.where(w.astype(jnp.bool_), d, 0.0)
        w = w.astype(jnp.float64)
    axes = tuple(range(lead))
    if jax.default_backend() != "cpu":
        return Sums(jnp.sum(w * d, axes), jnp.sum(w * d * d, axes))
    return Sums(*total_pair(w * d, w * d * d, axes))
