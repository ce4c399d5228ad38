# SPDX-License-Identifier: Apache-2.0
"""How samples are computed with, whatever their dtype and leading axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


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

    def add(x: Any, y: Any) -> tuple[Any, Any]:
        return x[0] + y[0], x[1] + y[1]

    first, second = lax.reduce((a, b), (zero_of(a), zero_of(b)), add, axes)
    return first, second


def all_pair(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether two bool arrays of one shape are all true, in one reduction.

    Args:
      a: Bool array.
      b: Bool array of that shape.

    Returns:
      Bool scalar.

    Example:
      >>> bool(all_pair(jnp.array([True, True]), jnp.array([True, False])))
      False
    """

    def both(x: Any, y: Any) -> tuple[Any, Any]:
        return x[0] & y[0], x[1] & y[1]

    true = jnp.ones((), jnp.bool_)
    first, second = lax.reduce((a, b), (true, true), both, tuple(range(a.ndim)))
    return first & second


def zero_of(x: jax.Array) -> jax.Array:
    """A scalar zero of the dtype of `x`."""
    return jnp.zeros((), x.dtype)
