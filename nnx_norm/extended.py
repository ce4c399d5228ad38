# SPDX-License-Identifier: Apache-2.0
"""Double precision out of two float32 arrays, whatever `jax_enable_x64` says.

A statistic `v` is stored as a float32 *value* `h = float32(v)` and a float32 *residual*
`l = float32(v - h)`: 48 bits in all. `join` reads the
pair as one float64 array inside `double()`, where the arithmetic is done; `split`
rounds the result back. Checkpoints hold float32 only and so move between x64 modes.

Why a local 64-bit context and not two-float arithmetic: the formulas stay the ones
of the textbook; XLA folds a two-float sum with a constant operand wrongly on jax
0.10 and contracts products to FMA, while float64 inside the context was exact under
jit, nnx.jit, scan, nnx.scan, vmap, cond, while_loop, shard_map with psum, pmap,
eval_shape and export on jax 0.10 and 0.12. The arrays it touches have the size of
the statistics, never that of a history. Nothing of float64 may leave the context: an
escaped array is cut to float32 at the next jit boundary. NumPy arrays need no context.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any  # of JAX, or of NumPy: then all is done on the host, and nothing compiled


def double() -> AbstractContextManager[Any]:
    """Context in which float64 arrays can be made, also while tracing.

    Returns:
      A context manager; x64 mode is restored on leaving it.

    Example:
      >>> with double():
      ...     x = jnp.asarray(2.0**24, jnp.float64) + 1
      ...     print(int(x))
      16777217
    """
    return jax.enable_x64(True)


def namespace(array: Array) -> Any:
    """The module to compute with: `numpy` for its own arrays, else `jax.numpy`.

    Args:
      array: Array of NumPy or JAX.

    Returns:
      The module.

    Example:
      >>> namespace(np.zeros(2)).__name__, namespace(jnp.zeros(2)).__name__
      ('numpy', 'jax.numpy')
    """
    return np if isinstance(array, (np.ndarray, np.generic)) else jnp


def spacing(value: Array) -> Array:
    """Distance from `|value|` to the next larger float32.

    Args:
      value: float32 array of any shape, of JAX or NumPy.

    Returns:
      float32 array of the same shape.

    Example:
      >>> float(spacing(jnp.float32(2.0**24)))
      2.0
    """
    # Two to the exponent, times 2^-23. It is a step function: no gradient.
    if namespace(value) is np:
        power = (value.view(np.int32) & np.int32(0x7F800000)).view(np.float32)
        return power * np.float32(2.0**-23)
    bits = lax.bitcast_convert_type(lax.stop_gradient(value), jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return power * 2.0**-23


def join(value: Array, residual: Array) -> Array:
    """The float64 array that a value and its residual stand for.

    A residual larger than one spacing of its value doesn't belong to it (the value
    was written directly, or restored from elsewhere) and counts as zero.
    Call it inside `double()`.

    Args:
      value: float32 array of any shape, of JAX or NumPy.
      residual: float32 array of the same shape.

    Returns:
      float64 array of that shape.

    Example:
      >>> with double():
      ...     own = float(join(jnp.float32(2.0**24), jnp.float32(1.0)))
      ...     foreign = float(join(jnp.float32(5.0), jnp.float32(1.0)))
      >>> own, foreign
      (16777217.0, 5.0)
    """
    kept = residual_of(value, residual)
    return value.astype(np.float64) + kept.astype(np.float64)


def residual_of(value: Array, residual: Array) -> Array:
    """The residual where it belongs to `value`, else zero; float32 throughout.

    Args:
      value: float32 array of any shape, of JAX or NumPy.
      residual: float32 array of the same shape.

    Returns:
      float32 array of that shape, for readers that stay in float32.

    Example:
      >>> value = jnp.float32([2.0**24, 5.0])
      >>> residual_of(value, jnp.float32([1.0, 1.0])).tolist()
      [1.0, 0.0]
    """
    owned = abs(residual) <= spacing(value)
    return _either(owned, residual, namespace(value).zeros_like(residual))


def split(x: Array, *, finite: bool = False) -> tuple[Array, Array]:
    """Value and residual of a float64 array; the inverse of `join`.

    Call it inside `double()`. `split(join(*split(x))) == split(x)` bit for bit, but
    for the sign of a zero. What float32 can't hold becomes an infinite value with
    residual zero.

    Args:
      x: float64 array of any shape, of JAX or NumPy.
      finite: Whether only elements are used that float32 holds: not to look for others
        saves a sixth of an update's operations, see `slices.TINY`.

    Returns:
      Two float32 arrays of that shape.

    Example:
      >>> with double():
      ...     value, residual = split(jnp.asarray(0.1, jnp.float64))
      >>> float(value), float(residual)
      (0.10000000149011612, -1.4901161415892261e-09)
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values, as said
        value = x.astype(np.float32)
        rest = (x - value.astype(np.float64)).astype(np.float32)
        # Rounding the residual can carry into the value (a tie): their sum settles it.
        settled = value + rest
        if not finite:
            settled = _either(_is_finite(value), settled, value)
        rest = rest - (settled - value)
    if finite:
        return settled, rest
    return settled, _either(_is_finite(settled), rest, namespace(x).zeros_like(rest))


def _either(flag: Array, yes: Array, no: Array) -> Array:
    """Of two arrays of one shape; `jnp.where` takes longer to trace and to compile."""
    return (
        np.where(flag, yes, no) if namespace(yes) is np else lax.select(flag, yes, no)
    )


def _is_finite(x: Array) -> Array:
    return np.isfinite(x) if namespace(x) is np else lax.is_finite(x)
