# SPDX-License-Identifier: Apache-2.0
"""Arguments of constructors and setters, checked."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnx_norm.distributed import AxisName
from nnx_norm.extended import double
from nnx_norm.spec import refuse_dtype


def number(
    value: Any, name: str, low: float, high: float = math.inf, *, strict: bool = True
) -> float:
    """A Python number within bounds, as a float.

    Args:
      value: The argument.
      name: Its name.
      low: Lower bound, excluded if `strict`.
      high: Upper bound, included.
      strict: Whether `low` itself is refused.

    Returns:
      The number.

    Raises:
      TypeError: It isn't a real number.
      ValueError: It is out of bounds, or NaN.

    Example:
      >>> number(1, "epsilon", 0)
      1.0
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} is {value!r}; expected a number.")
    x = float(value)
    if not ((low < x if strict else low <= x) and x <= high):
        bound = f"{'>' if strict else '>='} {low:g}"
        raise ValueError(
            f"{name} is {value!r}; expected a number {bound}"
            + (f" and <= {high:g}." if high < math.inf else ".")
        )
    return x


def choice(value: Any, name: str, *options: str) -> str:
    """One of several words.

    Args:
      value: The argument.
      name: Its name.
      *options: What it may be.

    Returns:
      The word.

    Raises:
      ValueError: It is something else.

    Example:
      >>> choice("skip", "nonfinite", "skip", "propagate")
      'skip'
    """
    if value not in options:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(options)}.")
    return value


def axis_names(axis_name: Any) -> AxisName | None:
    """`axis_name` as None, a str or a tuple of str.

    Args:
      axis_name: The argument.

    Returns:
      The same, hashable.

    Raises:
      TypeError: It holds something else.

    Example:
      >>> axis_names(["data", "seed"])
      ('data', 'seed')
    """
    if axis_name is None or isinstance(axis_name, str):
        return axis_name
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name is {axis_name!r}; expected the name(s) of axes.")
    return names


def float64_array(
    value: Any,
    shape: tuple[int, ...],
    where: str,
    *,
    fill: bool = False,
    minimum: float = -math.inf,
) -> Any:
    """A statistic given from outside, in float64: NumPy, or JAX if it is traced.

    Args:
      value: Array, number or list of numbers.
      shape: The shape that it must have.
      where: What it is called in messages.
      fill: Whether a scalar fills the shape.
      minimum: Lower bound of the values.

    Returns:
      A float64 array of that shape. A traced one must be used inside
      `extended.double()`.

    Raises:
      TypeError: It doesn't hold real numbers.
      ValueError: Its shape differs, or a value is not finite or below the minimum.

    Example:
      >>> float64_array([1, 2], (2,), "mean").tolist()
      [1.0, 2.0]
    """
    traced = isinstance(value, Tracer)
    array = value if traced else np.asarray(value)
    if array.dtype.kind in "OUSVMm" and array.size:
        raise TypeError(f"{where} is {value!r:.80}; expected real numbers.")
    refuse_dtype(array.dtype, where)
    if fill and array.ndim == 0:
        array = (jnp if traced else np).broadcast_to(array, shape)
    if array.shape != shape:
        raise ValueError(f"{where} has shape {array.shape}; expected {shape}.")
    if traced:
        with double():
            return array.astype(jnp.float64)
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array)) or np.any(array < minimum):
        raise ValueError(
            f"{where} holds {array.tolist()!s:.80}; expected finite numbers"
            + (f" >= {minimum:g}." if minimum > -math.inf else ".")
        )
    return array
