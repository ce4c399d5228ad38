# SPDX-License-Identifier: Apache-2.0
"""Normalizing and its inverse: what to divide by, and all leaves in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_norm.explicit import automatic
from nnx_norm.extended import namespace, residual_of
from nnx_norm.samples import align_leading, deviation, float_dtype

# Into the program around it while that is traced; since jax 0.12 True means later, and
# what reads the trace, such as a converter to ONNX, would find a call there.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

# Spread and count to what a leaf is divided by; hashable, since it is static under jit.
Divisor = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class FlooredStd:
    """`sqrt(max(M2 / count, epsilon))`, and `initial_std` before any sample."""

    epsilon: float
    initial_std: float

    def __call__(self, M2: Any, count: Any) -> Any:
        """Divisor `[*feat]` of NumPy's or JAX's `M2`, in its dtype."""
        xp, seen = namespace(M2), align_leading(count, M2) > 0
        std = xp.sqrt(xp.maximum(variance_of(M2, count), self.epsilon))
        return xp.where(seen, std, self.initial_std).astype(M2.dtype)


@dataclasses.dataclass(frozen=True)
class ReturnStd:
    """`sqrt(max(M2 / count, epsilon))`, and 1 until two samples differ."""

    epsilon: float

    def __call__(self, M2: Any, count: Any) -> Any:
        """Divisor `[*feat]` of NumPy's or JAX's `M2`, in its dtype."""
        xp, known = namespace(M2), (align_leading(count, M2) >= 2) & (M2 != 0)
        std = xp.sqrt(xp.maximum(variance_of(M2, count), self.epsilon))
        return xp.where(known, std, 1.0).astype(M2.dtype)


@dataclasses.dataclass(frozen=True)
class AddedStd:
    """`sqrt(var + epsilon)`, whatever the count."""

    epsilon: float

    def __call__(self, var: Any, count: Any) -> Any:
        """Divisor `[*feat]` of NumPy's or JAX's `var`, in its dtype."""
        del count
        return namespace(var).sqrt(var + self.epsilon)


@dataclasses.dataclass(frozen=True)
class Scale:
    """One leaf over its divisor; the mean taken off before if `centred`.

    Attributes:
      centred: Whether there is a mean to take off.
      bound: What comes out is clipped to plus or minus this; None doesn't.
    """

    centred: bool
    bound: float | None

    def __call__(self, x: jax.Array, mean: Any, rest: Any, std: jax.Array) -> jax.Array:
        """`x` `[*lead, *feat]` in the dtype of `std`; statistics `[*feat]`."""
        y = deviation(x, mean) - rest if self.centred else x.astype(std.dtype)
        # Times the reciprocal: a division per element would be the slowest part.
        return clipped(y * (1 / std), self.bound)


@dataclasses.dataclass(frozen=True)
class Unscale:
    """The inverse of `Scale` inside the bound, to which the input is clipped first."""

    centred: bool
    bound: float | None

    def __call__(self, y: jax.Array, mean: Any, rest: Any, std: jax.Array) -> jax.Array:
        """`y` `[*lead, *feat]` in the dtype of `std`; statistics `[*feat]`."""
        x = clipped(y.astype(std.dtype), self.bound) * std
        return (x + rest) + mean if self.centred else x


def clipped(x: Any, bound: float | None) -> Any:
    """`x` clipped to plus or minus `bound`, or as it is if that is None."""
    return x if bound is None else jnp.clip(x, -bound, bound)


def variance_of(M2: Any, count: Any) -> Any:
    """`M2 / count` of NumPy or JAX arrays, zero before any sample."""
    n = align_leading(count, M2).astype(M2.dtype)
    return M2 / (n + (n == 0).astype(n.dtype))


@partial(jax.jit, static_argnames=("one", "divisor"), inline=INLINE)
def leafwise(
    one: Scale | Unscale,
    divisor: Divisor,
    xs: list[jax.Array],
    means: list[jax.Array],
    rests: list[jax.Array],
    spreads: list[jax.Array],
    count: jax.Array,
) -> list[jax.Array]:
    """`one` of every leaf, in the dtype that it computes in.

    Compiled as a whole, so that a first eager call is one program and not forty; under
    an outer jit it is as if written there.

    Args:
      one: What to do with a leaf.
      divisor: What to divide by.
      xs: Arrays `[*lead, *feat]`.
      means: float32 arrays `[*feat]`.
      rests: Their residuals.
      spreads: float32 arrays `[*feat]` that the divisor takes.
      count: float32 scalar.

    Returns:
      Arrays in the float dtypes of `xs` (float32 for integers).
    """

    def scaled(xs: Any, means: Any, rests: Any, spreads: Any, count: Any) -> Any:
        out = []
        for x, mean, rest, spread in zip(xs, means, rests, spreads, strict=True):
            dtype = float_dtype(x.dtype)
            rest = residual_of(mean, rest)
            std = divisor(spread.astype(dtype), count)
            y = one(x, mean.astype(dtype), rest.astype(dtype), std)
            kept = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else dtype
            out.append(y.astype(kept))
        return out

    return automatic(scaled, xs, means, rests, spreads, count, like=xs)


@partial(jax.jit, static_argnames=("function",), inline=INLINE)
def spreads(
    function: Divisor, M2s: list[jax.Array], count: jax.Array
) -> list[jax.Array]:
    """`function(M2, count)`, such as a divisor, of every leaf in one program."""
    return [function(M2, count) for M2 in M2s]
