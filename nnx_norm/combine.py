# SPDX-License-Identifier: Apache-2.0
"""The union of many sets of moments, given as means, variances and counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnx_norm.extended import double
from nnx_norm.samples import align_leading
from nnx_norm.state_dicts import as_numpy


def combine_moments(means: Any, vars: Any, counts: Any) -> tuple[Any, Any, Any]:
    """Mean, population variance and count of the union of several sets.

    Sets are united pairwise, neighbours first, so that rounding grows with the
    logarithm of their number. An empty set has no influence, whatever its mean.

    Args:
      means: List of arrays `[*feat]`, or one array `[sets, *feat]`.
      vars: The same: population variances.
      counts: List of numbers, or an array `[sets]`.

    Returns:
      `(mean, var, count)`, computed in float64. NumPy, Python and torch-like numbers
      give float64 NumPy arrays; a JAX array among them makes JAX arrays of all. The
      variance is never negative, whole counts are added exactly (a sum that no integer
      of JAX can hold stays NumPy's; inside jit JAX counts are added in their own
      dtype), and no sample at all gives zeros.

    Raises:
      ValueError: The numbers of means, variances and counts differ or are zero,
        shapes differ, or a count is negative.

    Example:
      >>> mean, var, count = combine_moments([0.0, 4.0], [1.0, 1.0], [2, 2])
      >>> float(mean), float(var), int(count)
      (2.0, 5.0, 4)

    References:
      Chan, Golub & LeVeque, *Algorithms for computing the sample variance*,
      The American Statistician 37(3), 1983.
    """
    sizes = {len(means), len(vars), len(counts)}
    if len(sizes) > 1 or sizes == {0}:
        raise ValueError(
            f"combine_moments got {len(means)} means, {len(vars)} variances and "
            f"{len(counts)} counts; expected as many of each, one or more."
        )
    leaves = jax.tree.leaves((means, vars, counts))
    if not any(isinstance(v, jax.Array) for v in leaves):
        with np.errstate(all="ignore"):  # NaN and infinity go their way
            return _combine(np, *(_stack(np, v) for v in (means, vars, counts)))
    real, whole = map(jax.dtypes.canonicalize_dtype, (jnp.float64, jnp.int64))
    with double():
        stacked = (_stack(jnp, v) for v in (means, vars, counts))
        mean, var, count = _combine(jnp, *stacked)
        if jnp.issubdtype(count.dtype, jnp.integer):
            count = _held(count, whole)
        else:
            count = count.astype(real)
        return mean.astype(real), var.astype(real), count


def _stack(xp: Any, values: Any) -> Any:
    """One array `[sets, ...]` out of a list of them, or as it is."""

    def convert(v: Any) -> Any:
        return v if isinstance(v, jax.Array) else xp.asarray(as_numpy(v))

    if hasattr(values, "ndim"):
        return convert(values)
    arrays = [convert(v) for v in values]
    shapes = {v.shape for v in arrays}
    if len(shapes) > 1:
        raise ValueError(f"combine_moments got sets of shapes {sorted(shapes)}.")
    whole = all(jnp.issubdtype(v.dtype, jnp.integer) for v in arrays)
    wide = np.int64 if whole else np.float64
    return xp.stack([v.astype(wide) for v in arrays])


def _combine(xp: Any, means: Any, vars: Any, counts: Any) -> tuple[Any, Any, Any]:
    """The three of the union, float64, and int64 for whole counts."""
    if means.shape != vars.shape or counts.shape != means.shape[:1]:
        raise ValueError(
            f"combine_moments got means {means.shape}, variances {vars.shape} and "
            f"counts {counts.shape}; expected (sets, *feat) twice and (sets,)."
        )
    if not isinstance(counts, Tracer) and np.any(np.asarray(counts) < 0):
        raise ValueError(f"counts are {counts}; expected numbers >= 0.")
    whole = jnp.issubdtype(counts.dtype, jnp.integer)
    if whole and not isinstance(counts, Tracer):
        # Beyond the integers it is as near as a float64 gets, never wrapped around.
        whole = sum(map(int, np.asarray(counts))) <= np.iinfo(np.int64).max
    count = xp.sum(counts.astype(np.int64 if whole else np.float64))
    n = counts.astype(np.float64)
    occupied = align_leading(n, means) > 0
    means = xp.where(occupied, means.astype(np.float64), 0.0)
    vars = xp.where(occupied, xp.maximum(vars.astype(np.float64), 0.0), 0.0)
    while len(n) > 1:
        means, vars, n = _pairwise(xp, means, vars, n)
    return xp.asarray(means[0]), xp.asarray(vars[0]), xp.asarray(count)


def _pairwise(xp: Any, means: Any, vars: Any, n: Any) -> tuple[Any, Any, Any]:
    """Half as many sets: each united with its neighbour, an odd one carried over."""
    even = len(n) // 2 * 2
    a, b = (slice(start, even, 2) for start in (0, 1))
    na, nb = (align_leading(n[s], means[s]) for s in (a, b))
    both = xp.where(na + nb > 0, na + nb, 1.0)
    delta = means[b] - means[a]
    mean = means[a] + delta * (nb / both)
    M2 = vars[a] * na + vars[b] * nb + delta**2 * (na * (nb / both))
    united = (mean, M2 / both, n[a] + n[b])
    return tuple(
        xp.concatenate([new, old[even:]])
        for new, old in zip(united, (means, vars, n), strict=True)
    )


def _held(count: jax.Array, dtype: Any) -> Any:
    """A whole count in JAX's own width, or on the host where that can't hold it."""
    narrow = count.astype(dtype)
    fits = isinstance(count, Tracer) or int(narrow) == int(count)
    return narrow if fits else np.asarray(count)
