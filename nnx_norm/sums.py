# SPDX-License-Identifier: Apache-2.0
"""The one read: sums of deviations from a shift, over the leading axes.

For samples `x` with weights `w` and a shift `s`,

    S1 = Σ w (x - s)
    S2 = Σ w (x - s)²

About a shift near the mean the two lose no digits to an offset. There are three ways
to read, none of which materialises anything of the history's size:

- A batch that lies whole on one CPU device: one loop over slices, see `slices`.
- Anything else: two native reductions, which XLA splits over devices (no reshape:
  flattening a sharded `[T, B]` makes XLA gather it; an all-reduce of the sums is all
  that devices exchange) and fuses into one read on accelerators. On CPU they add in
  float64; a term shared by both would be materialised, so the second reads through an
  optimization barrier, and a select would be too, so a weight of zero multiplies;
  should a NaN stand there, the careful read follows, where such samples are raised to
  the power of zero.
- Dtypes that XLA's CPU reductions don't convert by themselves: one reduction of two
  operands, which converts anything, but for which XLA gathers the sums of all devices,
  `[devices, *feat]`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    # A restored state may hold NumPy arrays, which go where the others are.
    placed = [x.sharding for x in arrays if hasattr(x, "sharding")]
    devices = set().union(*(sharding.device_set for sharding in placed))
    return len(devices) <= 1 and all(device.platform == "cpu" for device in devices)


def in_slices(leaves: Sequence[jax.Array]) -> bool:
    """Whether arrays that lie whole on one CPU device are read in slices, all of them.

    Args:
      leaves: Arrays of samples.

    Returns:
      False if one is empty or of a dtype that is converted as a whole.

    Example:
      >>> in_slices([jnp.ones(3)]), in_slices([jnp.ones(3), jnp.ones(3, jnp.bfloat16)])
      (True, False)
    """
    return all(x.size and x.dtype not in WHOLE_ON_CPU for x in leaves)


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
    if jax.default_backend() != "cpu":
        return _on_accelerator(x, shift, weight, lead, careful)
    if x.dtype in FUSED_ON_CPU:
        return _native(x, shift, weight, lead, careful)
    return _converting(x, shift, weight, lead)


def _on_accelerator(
    x: jax.Array, shift: jax.Array, weight: jax.Array | None, lead: int, careful: bool
) -> Sums:
    """Two reductions that share what they read, in float64 if careful."""
    if careful:
        x, shift = x.astype(jnp.float64), shift.astype(jnp.float64)
    d = deviation(x, shift)
    w: Any = 1
    if weight is not None:
        w = align_leading(weight, x)
        d = jnp.where(w.astype(jnp.bool_), d, 0) if careful else d
        w = w.astype(d.dtype)
    axes = tuple(range(lead))
    # w first: a zero forestalls overflow
    first, second = (jnp.sum(term, axes) for term in (w * d, (w * d) * d))
    return Sums(first.astype(jnp.float64), second.astype(jnp.float64))


def _native(
    x: jax.Array, shift: jax.Array, weight: jax.Array | None, lead: int, careful: bool
) -> Sums:
    """Two reductions on CPU of what its fusions know: no select, no comparison.

    In float32 they would take two thirds of the time and have a bias in short chains:
    samples far from zero are multiples of one spacing, the squares of odd multiples
    are 1 modulo 8, and a sum that has dropped three bits rounds each of them down.
    """
    if weight is not None and weight.dtype == jnp.bool_:
        weight = weight.astype(jnp.float32)
    clean = careful and jnp.issubdtype(x.dtype, jnp.floating)

    def weighted(square: bool, x: Any, shift: Any, weight: Any) -> jax.Array:
        w: Any = 1
        if weight is not None:
            w = jnp.broadcast_to(align_leading(weight, x), x.shape)
            if clean:  # x ** 0 is 1 whatever x is, and x ** 1 is x
                x = lax.pow(x, jnp.sign(w).astype(x.dtype))
            w = w.astype(jnp.float64)
        d = x.astype(jnp.float64) - shift.astype(jnp.float64)
        return jnp.sum((w * d) * d if square else w * d, axis=tuple(range(lead)))

    # The first barrier keeps a weight from being made anew in every form it is used in.
    read = lax.optimization_barrier((x, shift, weight))
    again = lax.optimization_barrier(read)
    return Sums(weighted(False, *read), weighted(True, *again))


def _converting(
    x: jax.Array, shift: jax.Array, weight: jax.Array | None, lead: int
) -> Sums:
    """One reduction of two operands in float64 on CPU, slow and sure."""
    d = x.astype(jnp.float64) - shift.astype(jnp.float64)
    w: Any = 1.0
    if weight is not None:
        w = align_leading(weight, x)
        d = jnp.where(w.astype(jnp.bool_), d, 0.0)
        w = w.astype(jnp.float64)
    return Sums(*total_pair(w * d, w * d * d, tuple(range(lead))))
