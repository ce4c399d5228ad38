# SPDX-License-Identifier: Apache-2.0
"""Which samples count, how much, and where episodes end: checked at trace time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnx_norm import validation
from nnx_norm.samples import align_leading


def mask_array(
    mask: Any, lead: tuple[int, ...], *, prefix: bool = True
) -> jax.Array | None:
    """A bool mask over the leading axes or a leading prefix of them.

    Args:
      mask: None or an array of bool.
      lead: The leading axes of the history.
      prefix: Whether a leading prefix of them is enough.

    Returns:
      The mask as an array.

    Raises:
      TypeError: It isn't bool.
      ValueError: Its shape is no prefix of `lead`.
    """
    if mask is None:
        return None
    array = validation.as_array(mask, "mask")
    if array.dtype != jnp.bool_:
        also = ", or pass real numbers as weights=." if prefix else "."
        raise TypeError(
            f"mask has dtype {array.dtype}; expected bool. Write mask.astype(bool)"
            + also
        )
    _refuse_shape(array, lead, "mask", prefix)
    return array


def flags(
    value: Any, lead: tuple[int, ...], name: str, mask: jax.Array | None = None
) -> jax.Array:
    """Bool flags `[T, B]`, such as the ends of episodes.

    Args:
      value: Array of bool, or of zeros and ones as environments give them.
      lead: The shape that it must have.
      name: What it is called in messages.
      mask: None or a bool mask of that shape: flags are not looked at elsewhere.

    Returns:
      A bool array.

    Raises:
      TypeError: It isn't an array of real numbers.
      ValueError: Its shape differs, or, outside jit, a flag is neither 0 nor 1.

    Example:
      >>> flags(jnp.array([[0.0, 1.0]]), (1, 2), "terminated").tolist()
      [[False, True]]
    """
    array = validation.as_array(value, name)
    if array.shape != lead:
        raise ValueError(
            f"{name} has shape {array.shape}; expected (T, B) = {lead}, one flag for "
            "each step of each environment."
        )
    return as_bool(array, name, mask)


def as_bool(array: jax.Array, name: str, mask: jax.Array | None = None) -> jax.Array:
    """Flags as bool; under jit every other number than 0 is True.

    Args:
      array: Array of bool or of zeros and ones.
      name: What it is called in messages.
      mask: None or a bool mask of its shape: flags are not looked at elsewhere.

    Returns:
      A bool array.

    Raises:
      ValueError: Outside jit, a flag is neither 0 nor 1.
    """
    if array.dtype == jnp.bool_:
        return array
    if _readable(array) and (mask is None or _readable(mask)):
        read = np.asarray(array)[... if mask is None else np.asarray(mask)]
        if np.any(odd := (read != 0) & (read != 1)):
            raise ValueError(
                f"{name} holds {read[odd].flat[0]}; expected flags: bool, or zeros and "
                "ones. Were rewards, discounts or the steps' numbers passed instead?"
            )
    return array.astype(jnp.bool_)


def weight_array(
    weights: Any, lead: tuple[int, ...], mask: jax.Array | None = None
) -> jax.Array | None:
    """Non-negative weights over the leading axes or a leading prefix of them.

    Args:
      weights: None or an array of real numbers.
      lead: The leading axes of the history.
      mask: None or a mask over a prefix: weights are not looked at elsewhere.

    Returns:
      The weights as a float array.

    Raises:
      TypeError: They are bool.
      ValueError: Their shape is no prefix of `lead`, or, outside jit, one of them is
        negative or not finite.
    """
    if weights is None:
        return None
    array = validation.as_array(weights, "weights")
    if array.dtype == jnp.bool_:
        raise TypeError("weights has dtype bool; expected numbers. Pass it as mask=.")
    _refuse_shape(array, lead, "weights")
    if _readable(array) and (mask is None or _readable(mask)):
        refused = ~(np.isfinite(array) & (np.asarray(array) >= 0))
        if mask is not None:  # either may have axes that the other lacks
            counts = np.asarray(mask)
            refused = align_leading(refused, mask) & align_leading(counts, array)
        if np.any(refused):
            raise ValueError(
                "weights holds negative or non-finite values; expected weights >= 0."
            )
    return array.astype(jnp.float32)


def _readable(array: jax.Array) -> bool:
    return not isinstance(array, Tracer) and array.is_fully_addressable


def _refuse_shape(
    array: jax.Array, lead: tuple[int, ...], name: str, prefix: bool = True
) -> None:
    if array.shape != (lead[: array.ndim] if prefix and array.ndim else lead):
        also = " or a leading prefix of them" if prefix else ""
        raise ValueError(
            f"{name} has shape {array.shape}; expected the leading axes {lead} of the "
            f"history{also}, usually (T, B)."
        )
