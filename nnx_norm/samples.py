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
        # Both parts fit in 24 bits. The remainder has the sign of x: for -1 a bit mask
        # gave -4096 + 4095, and the first is too coarse beside a small shift.
        low = lax.rem(x, jnp.asarray(0x1000, x.dtype))
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
