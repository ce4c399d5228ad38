# SPDX-License-Identifier: Apache-2.0
"""Moments of samples: a monoid under `merge`, with `zeros` as its identity.

`from_batch` lifts samples to their moments, `merge` unites two sets. Everything is
computed in float64 inside a local 64-bit context and returned in the precision of the
caller: float32 normally, float64 in x64 mode or inside `extended.double()`. A stored
running statistic keeps the rest in a residual, see `nnx_norm.extended`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from nnx_norm import spec
from nnx_norm.extended import double
from nnx_norm.reread import BatchSums, batch_sums
from nnx_norm.samples import align_leading

PyTree = Any
P = ParamSpec("P")
T = TypeVar("T")


class Moments(NamedTuple):
    """Mean, sum of squared deviations and number of samples.

    Attributes:
      mean: Tree of arrays `[*feat]`.
      M2: The same tree: sums of squared deviations from the mean.
      count: Scalar, the number of samples or the sum of their weights.

    Example:
      >>> m = Moments(jnp.array(1.0), jnp.array(2.0), jnp.array(2.0))
      >>> float(variance(m))
      1.0
    """

    mean: PyTree
    M2: PyTree
    count: jax.Array


def _in_double(function: Callable[P, T]) -> Callable[P, T]:
    """Compute with float64 arrays; return the caller's precision."""

    def lift(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.float64)

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        ours = jax.dtypes.canonicalize_dtype(jnp.float64)
        with double():
            out = function(*jax.tree.map(lift, args), **kwargs)
            return jax.tree.map(lambda x: x.astype(ours), out)

    return wrapped


def zeros(shape: Any) -> Moments:
    """Moments of no sample: the identity of `merge`.

    Args:
      shape: Feature shape or tree of them, as in `Normalizer`, or `Moments` whose
        structure to take.

    Returns:
      Moments with leaves `[*feat]` of zeros and count 0.

    Example:
      >>> zeros({"position": 2}).mean["position"].tolist()
      [0.0, 0.0]
    """
    tree = spec.parse(shape.mean if isinstance(shape, Moments) else shape)
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    empty = tree.unflatten([jnp.zeros(s, dtype) for s in tree.features])
    return Moments(empty, jax.tree.map(jnp.copy, empty), jnp.zeros((), dtype))


def from_batch(
    x: PyTree,
    axes: int | Sequence[int] = 0,
    *,
    mask: jax.Array | None = None,
    weights: jax.Array | None = None,
) -> Moments:
    """Moments of a batch of samples.

    Deviations are taken about a shift near the mean, so that an offset costs no
    digits; half precision and integers are accumulated as float32 or better.

    Args:
      x: Tree of arrays; all have the same sizes along `axes`.
      axes: Axis or axes that run over samples; `(0, 1)` for a history `[T, B, *feat]`.
      mask: Optional bool array of those sizes: which samples count. What stands in
        the others, NaN included, has no influence.
      weights: Optional non-negative array of those sizes; multiplied with `mask`.

    Returns:
      Moments with leaves `[*feat]`.

    Raises:
      ValueError: Leaves, mask or weights differ in their sizes along `axes`.

    Example:
      >>> m = from_batch(jnp.array([[1.0, 10.0], [3.0, 30.0]]))
      >>> m.mean.tolist(), m.M2.tolist(), float(m.count)
      ([2.0, 20.0], [2.0, 200.0], 2.0)

    References:
      Chan, Golub & LeVeque, *Algorithms for computing the sample variance*,
      The American Statistician 37(3), 1983 (shifted data).
    """
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    lead = tuple(range(len(axes)))
    ours = jax.dtypes.canonicalize_dtype(jnp.float64)
    with double():
        leaves, treedef = jax.tree.flatten(x)
        moved = [jnp.moveaxis(jnp.asarray(leaf), axes, lead) for leaf in leaves]
        _refuse_unequal(moved, axes, mask, weights)
        if not moved:
            return Moments(x, x, jnp.zeros((), ours))
        batch = from_sums(batch_sums(moved, len(axes), mask=mask, weights=weights))
        mean, M2 = (jax.tree.unflatten(treedef, v) for v in (batch.mean, batch.M2))
        batch = Moments(mean, M2, batch.count)
        return jax.tree.map(lambda v: v.astype(ours), batch)


def _refuse_unequal(
    leaves: Sequence[jax.Array], axes: Sequence[int], *weights: jax.Array | None
) -> None:
    sizes = {leaf.shape[: len(axes)] for leaf in leaves}
    sizes |= {jnp.shape(w) for w in weights if w is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"Leaves, mask and weights differ in their sizes along the axes {axes}: "
            f"{sorted(sizes)}. They must be equal."
        )


def from_sums(batch: BatchSums) -> Moments:
    """Moments from sums about a shift: mean `s + S1/n`, `M2 = S2 - S1²/n`.

    Call it inside `extended.double()`.

    Args:
      batch: Sums per leaf, as `reread.batch_sums` gives them.

    Returns:
      Moments in float64 whose trees are lists of leaves.

    Example:
      >>> with double():
      ...     m = from_sums(batch_sums([jnp.array([4.0, 6.0])], 1))
      >>> [float(v) for v in (m.mean[0], m.M2[0], m.count)]
      [5.0, 2.0, 2.0]
    """
    n = jnp.where(batch.count > 0, batch.count, 1.0)
    mean = [
        shift.astype(jnp.float64) + s.first / n
        for shift, s in zip(batch.shift, batch.sums, strict=True)
    ]
    # Rounding may leave it a little below zero; NaN stays NaN.
    M2 = [jnp.maximum(s.second - s.first * (s.first / n), 0.0) for s in batch.sums]
    return Moments(mean, M2, batch.count)


@_in_double
def merge(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two disjoint sets of samples.

    With `δ = mean(b) - mean(a)` and `n = n(a) + n(b)`,

        mean = mean(a) + δ · n(b) / n
        M2   = M2(a) + M2(b) + δ² · n(a) · n(b) / n

    Associative, commutative up to rounding; `zeros` is its identity.

    Args:
      a: Moments with leaves of shape `[*feat]`.
      b: Moments of the same tree structure and leaf shapes as `a`.

    Returns:
      Moments of `a.count + b.count` samples.

    Example:
      >>> one = Moments(jnp.array(1.0), jnp.array(2.0), jnp.array(2.0))
      >>> two = Moments(jnp.array(4.0), jnp.array(0.0), jnp.array(1.0))
      >>> [float(x) for x in merge(one, two)]
      [2.0, 8.0, 3.0]

    References:
      Chan, Golub & LeVeque, *Algorithms for computing the sample
      variance*, The American Statistician 37(3), 1983.
    """
    count = a.count + b.count
    fraction = b.count / jnp.where(count > 0, count, 1.0)  # two empty sets stay empty
    between = a.count * fraction
    delta = jax.tree.map(jnp.subtract, b.mean, a.mean)
    mean = jax.tree.map(lambda m, d: m + align_leading(fraction, d) * d, a.mean, delta)
    M2 = jax.tree.map(
        lambda p, q, d: p + q + align_leading(between, d) * d**2, a.M2, b.M2, delta
    )
    return Moments(mean, M2, count)


@_in_double
def reduce(stacked: Moments) -> Moments:
    """Moments of the union of many sets, stacked along a leading axis.

    Deviations are taken from the mean of the largest set, so equal means stay exact.

    Args:
      stacked: Moments with leaves `[sets, *feat]` and counts `[sets]`. Empty sets
        have no influence, whatever their mean.

    Returns:
      Moments with leaves `[*feat]`.

    Example:
      >>> means, M2s = jnp.array([0.0, 4.0, 10.0]), jnp.array([2.0, 2.0, 0.0])
      >>> m = reduce(Moments(means, M2s, jnp.array([2.0, 2.0, 1.0])))
      >>> round(float(m.mean), 6), round(float(m.M2), 4), float(m.count)
      (3.6, 71.2, 5.0)
    """
    counts = stacked.count
    count = jnp.sum(counts)
    n = jnp.where(count > 0, count, 1.0)
    # argmax is lowered outside the 64-bit context: nothing of 64 bits may enter it.
    largest = lax.argmax(counts.astype(jnp.float32), 0, jnp.int32) if counts.size else 0

    def occupied(v: jax.Array) -> jax.Array:
        return jnp.where(align_leading(counts, v) > 0, v, 0.0)

    def unite(mean: jax.Array, M2: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not counts.size:
            nothing = jnp.zeros(mean.shape[1:], mean.dtype)
            return nothing, nothing
        delta = occupied(mean - mean[largest])
        step = jnp.sum(align_leading(counts, delta) * delta, axis=0) / n
        spread = jnp.sum(align_leading(counts, delta) * (delta - step) ** 2, axis=0)
        return occupied(mean)[largest] + step, jnp.sum(occupied(M2), axis=0) + spread

    both = jax.tree.map(unite, stacked.mean, stacked.M2)
    mean, M2 = jax.tree.transpose(
        jax.tree.structure(stacked.mean), jax.tree.structure((0, 0)), both
    )
    return Moments(mean, M2, count)


@_in_double
def variance(moments: Moments) -> PyTree:
    """Population variance, `M2 / count`; zero where there is no sample.

    Args:
      moments: Moments with leaves `[*feat]`.

    Returns:
      Tree of arrays `[*feat]`.

    Example:
      >>> float(variance(from_batch(jnp.array([0.0, 2.0]))))
      1.0
    """
    n = jnp.where(moments.count > 0, moments.count, 1.0)
    return jax.tree.map(lambda M2: M2 / align_leading(n, M2), moments.M2)


@_in_double
def std(moments: Moments, epsilon: float = 0.0) -> PyTree:
    """Standard deviation, `sqrt(max(variance, epsilon))`.

    Args:
      moments: Moments with leaves `[*feat]`.
      epsilon: Floor of the variance, not of the standard deviation.

    Returns:
      Tree of arrays `[*feat]`.

    Example:
      >>> round(float(std(from_batch(jnp.array([3.0, 3.0])), epsilon=1e-4)), 6)
      0.01
    """
    return jax.tree.map(lambda v: jnp.sqrt(jnp.maximum(v, epsilon)), variance(moments))
