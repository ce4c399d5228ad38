# SPDX-License-Identifier: Apache-2.0
"""Mean, variance and count as exact as float64 buffers, in three float32 arrays each.

A value and its residual hold 48 bits, see `nnx_norm.extended`; a third array, the
*tail*, holds the last 5 of a float64, so that the statistics of code with float64
buffers come over and go back without the loss of a bit. (The exceptions are the range
of float32, which bounds them, and numbers below 1e-23, whose tail it can't hold.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx_norm import distributed, fold, moments
from nnx_norm.distributed import AxisName
from nnx_norm.explicit import automatic
from nnx_norm.extended import double, join, namespace, residual_of, split
from nnx_norm.moments import Moments

PyTree = Any


class Buffers(NamedTuple):
    """Statistics in the form that the ports store.

    Attributes:
      mean: Tree of arrays `[*feat]`, a list of leaves where they are computed with.
      var: The same tree: population variances.
      count: Scalar, the number of samples.
    """

    mean: PyTree
    var: PyTree
    count: Any


class Parts(NamedTuple):
    """Buffers of float32: what they are, and what float32 can't hold of that."""

    value: Buffers
    residual: Buffers
    tail: Buffers


def joined(parts: Parts) -> Buffers:
    """Buffers in float64; call it inside `extended.double()`, or with NumPy arrays.

    Example:
      >>> with double():
      ...     parts = separated(Buffers([], [], jnp.asarray(0.1, jnp.float64)))
      ...     float(parts.value.count), float(joined(parts).count)
      (0.10000000149011612, 0.1)
    """

    def add(value: Any, residual: Any, tail: Any) -> Any:
        owned, zero = residual_of(value, residual), np.float32(0)
        own = namespace(value).where(owned == residual, residual_of(owned, tail), zero)
        return join(value, owned) + own.astype(np.float64)

    return jax.tree.map(add, *parts)


def separated(buffers: Buffers) -> Parts:
    """Float32 parts of buffers in float64; inside `double()`, or of NumPy arrays."""

    def cut(x: Any) -> tuple[Any, Any, Any]:
        xp, (value, residual) = namespace(x), split(x)
        with np.errstate(invalid="ignore"):
            rest = x - (value.astype(np.float64) + residual.astype(np.float64))
        tail = xp.where(xp.isfinite(rest), rest, 0.0).astype(np.float32)
        return value, residual, tail

    leaves, treedef = jax.tree.flatten(buffers)
    sides = zip(*map(cut, leaves), strict=True)
    return Parts(*(jax.tree.unflatten(treedef, side) for side in sides))


@partial(jax.jit, static_argnames=("ema_decay", "axis_name"))
def record(
    parts: Parts,
    samples: list[jax.Array],
    *,
    ema_decay: float | None,
    axis_name: AxisName | None,
) -> Parts:
    """Buffers after a batch; one collective if there is an axis.

    Args:
      parts: Buffers with lists of leaves `[*feat]`.
      samples: Arrays `[N, *feat]`, one or more.
      ema_decay: None to count every sample alike, else the weight of the old.
      axis_name: Mapped axes to combine the batches over.

    Returns:
      New buffers; bit for bit the old ones if the batch is empty on every device.
    """

    def step(parts: Parts, samples: list[jax.Array]) -> Parts:
        old = _moments(joined(parts))
        if ema_decay is not None:
            # The batch's own variance is wanted to all its digits, not only those that
            # would be left of it beside the distance of the means.
            old = old._replace(count=jnp.zeros_like(old.count))
        batch = fold.lift(samples, old, lead=1, skip=False).moments
        batch = distributed.all_reduce(batch, axis_name)
        return _update(parts, batch, ema_decay)

    with double():
        return automatic(step, parts, samples, like=parts)


@partial(jax.jit, static_argnames=("ema_decay",))
def update(parts: Parts, batch: Buffers, *, ema_decay: float | None) -> Parts:
    """Buffers after a batch of which the moments are known.

    Call it inside `extended.double()`, with `batch` in float64.

    Args:
      parts: Buffers with lists of leaves `[*feat]`.
      batch: Mean, variance and count of the batch, lists of such leaves.
      ema_decay: As in `record`.

    Returns:
      New buffers; bit for bit the old ones if the batch's count is not positive.
    """
    with double():
        return _update(parts, _moments(batch), ema_decay)


def _moments(buffers: Buffers) -> Moments:
    # Rounding elsewhere may have left a variance a little below zero.
    M2 = [jnp.maximum(v, 0.0) * buffers.count for v in buffers.var]
    return Moments(buffers.mean, M2, buffers.count)


def _update(parts: Parts, batch: Moments, ema_decay: float | None) -> Parts:
    old = joined(parts)
    if ema_decay is None:
        merged = moments.merge(_moments(old), batch)
        new = Buffers(merged.mean, moments.variance(merged), merged.count)
    else:
        mean = _average(old.mean, batch.mean, ema_decay)
        var = _average(old.var, moments.variance(batch), ema_decay)
        new = Buffers(mean, var, old.count)
    arrived = batch.count > 0
    return jax.tree.map(lambda n, o: jnp.where(arrived, n, o), separated(new), parts)


def _average(old: list[Any], batch: list[Any], decay: float) -> list[Any]:
    return [decay * a + (1 - decay) * b for a, b in zip(old, batch, strict=True)]
