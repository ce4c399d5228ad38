# SPDX-License-Identifier: Apache-2.0
r"""The one read: sums of deviations from a shift, over the leading axes.

For samples $x_i$ with weights $w_i$ and a shift $s$,

$$S_1 = \sum w_i (x_i - s), \qquad S_2 = \sum w_i (x_i - s)^2 .$$

About a shift near the mean the two lose no digits to an offset. Each is one native
reduction that XLA spreads over the cores; the shift of the second goes through an
optimization barrier, since a difference shared by two reductions is materialised, at
the history's size, by XLA's CPU compiler. No reshape: flattening a sharded `[T, B]`
makes XLA gather the history on every device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sums(NamedTuple):
    """Sums of deviations and of their squares about a shift, float64 `[*feat]`."""

    first: jax.Array
    second: jax.Array


def float_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that samples of `dtype` are computed in: float32, or float64.

    Args:
      dtype: Dtype of the samples.

    Returns:
      float64 for 64-bit samples, else float32.

    Example:
      >>> float_dtype(jnp.float16), float_dtype(jnp.uint8)
      (dtype('float32'), dtype('float32'))
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32)


def deviation(x: jax.Array, shift: jax.Array) -> jax.Array:
    """`x - shift` in float32 or better, exact for integers of 32 bits too.

    Args:
      x: Samples `[..., *feat]` of any real dtype.
      shift: float32 array `[*feat]`.

    Returns:
      float array of the shape of `x`.

    Example:
      >>> float(deviation(jnp.int32(2**30 + 1), jnp.float32(2**30)))
      1.0
    """
    dtype = float_dtype(x.dtype)
    shift = shift.astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 4:
        low = x & jnp.asarray(0xFFF, x.dtype)  # both parts fit in 24 bits
        return ((x - low).astype(dtype) - shift) + low.astype(dtype)
    return x.astype(dtype) - shift


def sums(x: jax.Array, shift: jax.Array, weight: jax.Array | None, lead: int) -> Sums:
    """Sums of deviations of `x` from `shift` over its `lead` leading axes.

    Call it inside `extended.double()`.

    Args:
      x: Samples `[*lead, *feat]` of any real dtype.
      shift: float32 array `[*feat]`.
      weight: None, or bool or float weights broadcastable to `[*lead]`. A sample of
        weight zero is not looked at: NaN there does not leak.
      lead: Number of leading axes.

    Returns:
      `Sums` of float64 arrays `[*feat]`.

    Example:
      >>> from nnx_norm.extended import double
      >>> x = jnp.array([[1.0, 10.0], [3.0, 30.0]])
      >>> with double():
      ...     [v.tolist() for v in sums(x, jnp.array([2.0, 20.0]), None, 1)]
      [[0.0, 0.0], [2.0, 200.0]]
    """
    axes = tuple(range(lead))

    def deviations(shift: jax.Array) -> jax.Array:
        d = deviation(x, shift)
        if weight is None:
            return d
        return jnp.where(align_leading(weight, x).astype(jnp.bool_), d, 0)

    def weighted(v: jax.Array) -> jax.Array:
        if weight is None or weight.dtype == jnp.bool_:
            return v
        return v * align_leading(weight, x).astype(v.dtype)

    again = lax.optimization_barrier(shift)
    first = jnp.sum(weighted(deviations(shift)), axis=axes)
    second = jnp.sum(weighted(jnp.square(deviations(again))), axis=axes)
    return Sums(first.astype(jnp.float64), second.astype(jnp.float64))


def align_leading(leading: Any, leaf: Any) -> Any:
    """An array over leading axes, with axes of size 1 for the others of `leaf`.

    Args:
      leading: Array `[*lead]` of NumPy or JAX, such as weights of samples.
      leaf: Array `[*lead, *feat]`.

    Returns:
      The array shaped to broadcast against `leaf`.

    Example:
      >>> align_leading(jnp.ones(4), jnp.ones((4, 3, 2))).shape
      (4, 1, 1)
    """
    return leading.reshape(leading.shape + (1,) * (leaf.ndim - leading.ndim))
