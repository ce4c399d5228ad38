# SPDX-License-Identifier: Apache-2.0
"""One weight per sample, from a mask, weights and what is not finite."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnx_norm.kernels import total_pair
from nnx_norm.sums import on_one_cpu


class Weighting(NamedTuple):
    """Weights as `sums` takes them, and what they add up to.

    Attributes:
      weight: Array that broadcasts to the leading axes; None weighs all samples 1.
      count: float64 scalar, the sum of weights.
      rows: float64 scalar, the number of samples that count.
      skipped: float64 scalar, the number of samples with a weight that can't be one.
    """

    weight: jax.Array | None
    count: jax.Array
    rows: jax.Array
    skipped: jax.Array


def weigh(
    sizes: tuple[int, ...],
    mask: jax.Array | None,
    weights: jax.Array | None,
    *,
    local: bool | None = None,
) -> Weighting:
    """One weight per sample from mask and weights; call it inside `double()`.

    Args:
      sizes: Sizes of the leading axes.
      mask: None, or bool array over a leading prefix of them.
      weights: None, or real array over such a prefix. Negative and non-finite ones
        where the mask is set count as skipped.
      local: Whether both lie whole on one CPU device; None finds out.

    Returns:
      The weights, with axes of size 1 behind a prefix.

    Example:
      >>> from nnx_norm.extended import double
      >>> with double():
      ...     w = weigh((2, 3), None, jnp.array([0.5, -1.0]))
      ...     float(w.count), float(w.rows), float(w.skipped)
      (1.5, 3.0, 3.0)
    """
    total = jnp.asarray(float(math.prod(sizes)), jnp.float64)
    nothing = jnp.zeros((), jnp.float64)
    if mask is None and weights is None:
        return Weighting(None, total, total, nothing)
    masks = [] if mask is None else [_over(mask, len(sizes))]
    if weights is None:
        return _tally(masks[0], sizes, nothing, local)
    weight = _over(weights, len(sizes))
    weight = weight if weight.dtype == jnp.float64 else weight.astype(jnp.float32)
    valid = jnp.isfinite(weight) & (weight >= 0)
    refused = ~valid if mask is None else ~valid & masks[0]
    for keep in (valid, *masks):
        weight = jnp.where(keep, weight, 0)
    skipped = _tally(refused, sizes, nothing, local).rows
    return _tally(weight, sizes, skipped, local)


def leave_out(given: Weighting, bad: jax.Array) -> Weighting:
    """Weights without some of the samples.

    Args:
      given: Weights of all samples.
      bad: Bool array `[*lead]`.

    Returns:
      Weights of the others; their `skipped` is that of `given`.

    Example:
      >>> from nnx_norm.extended import double
      >>> with double():
      ...     w = leave_out(weigh((3,), None, None), jnp.array([True, False, False]))
      ...     float(w.count)
      2.0
    """
    if given.weight is None:
        weight = ~bad
    else:
        weight = jnp.where(bad, jnp.zeros_like(given.weight), given.weight)
    return _tally(weight, bad.shape, given.skipped)


def _over(weight: jax.Array, lead: int) -> jax.Array:
    """A leading prefix `[T, B]`, with axes of size 1 up to `lead`."""
    return weight.reshape(weight.shape + (1,) * (lead - weight.ndim))


def _tally(
    weight: jax.Array,
    sizes: tuple[int, ...],
    skipped: jax.Array,
    local: bool | None = None,
) -> Weighting:
    """Sums of weights; those of a prefix stand for several samples each."""
    times = math.prod(
        n for n, m in zip(sizes, weight.shape, strict=True) if m == 1 and n != 1
    )
    axes = tuple(range(weight.ndim))
    if on_one_cpu(weight) if local is None else local:
        one = weight.astype(jnp.bool_).astype(jnp.int32)
        count, rows = total_pair(weight.astype(jnp.float64), one, axes)
    else:  # for a pair XLA gathers the sums of all devices
        exact = jnp.float32 if weight.size <= 2**24 else jnp.float64
        one = weight.astype(exact) if weight.dtype == jnp.bool_ else jnp.sign(weight)
        count = rows = jnp.sum(one.astype(exact), axes).astype(jnp.float64)
        if weight.dtype != jnp.bool_:
            count = jnp.sum(weight.astype(jnp.float64), axes)
    return Weighting(weight, count * times, rows.astype(jnp.float64) * times, skipped)
