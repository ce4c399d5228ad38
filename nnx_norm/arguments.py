# SPDX-License-Identifier: Apache-2.0
"""Arguments of constructors and setters, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr

from nnx_norm.distributed import AxisName
from nnx_norm.extended import double
from nnx_norm.samples import align_leading
from nnx_norm.spec import Spec, refuse_dtype
from nnx_norm.tree import canonicalize, keys_of, path_name


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


def positive(value: Any, name: str) -> float:
    """A number > 0 that float32 holds: one that rounds to 0 would be a division by 0.

    Args:
      value: The argument.
      name: Its name.

    Returns:
      The number.

    Raises:
      TypeError: It isn't a real number.
      ValueError: It is not > 0, or beyond what float32 holds.

    Example:
      >>> positive(1e-6, "epsilon")
      1e-06
    """
    x, held = number(value, name, 0), np.finfo(np.float32)
    if not float(held.tiny) <= x <= float(held.max):
        raise ValueError(
            f"{name} is {value!r}; expected a number that float32 holds, between "
            f"{held.tiny:g} and {held.max:g}."
        )
    return x


def size(value: Any, name: str) -> int:
    """A number of things, such as environments.

    Args:
      value: The argument.
      name: Its name.

    Returns:
      The number.

    Raises:
      TypeError: It isn't an int.
      ValueError: It is negative.

    Example:
      >>> size(64, "num_envs")
      64
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; expected an int.")
    if int(value) < 0:
        raise ValueError(f"{name} is {value!r}; expected an int >= 0.")
    return int(value)


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
    if not isinstance(value, str) or value not in options:
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
      ValueError: A name is empty, or comes twice.

    Example:
      >>> axis_names(["data", "seed"])
      ('data', 'seed')
    """
    if axis_name is None:
        return None
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name is {axis_name!r}; expected the name(s) of axes.")
    if "" in names or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name is {axis_name!r}; expected names that are not empty, each once."
        )
    return axis_name if isinstance(axis_name, str) else names


def float64_array(
    value: Any,
    shape: tuple[int, ...],
    where: str,
    *,
    fill: bool = False,
    minimum: float = -math.inf,
    finite: bool = True,
) -> Any:
    """A statistic given from outside, in float64: NumPy, or JAX if it is traced.

    Args:
      value: Array, number or list of numbers.
      shape: The shape that it must have.
      where: What it is called in messages.
      fill: Whether a scalar fills the shape.
      minimum: Lower bound of the values.
      finite: Whether to refuse NaN and infinity.

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
    if array.dtype.kind in "OUSMm" and array.size:
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
    if (finite and not np.all(np.isfinite(array))) or np.any(array < minimum):
        raise ValueError(
            f"{where} holds {array.tolist()!s:.80}; expected finite numbers"
            + (f" >= {minimum:g}." if minimum > -math.inf else ".")
        )
    with np.errstate(over="ignore"):
        lost = np.isinf(array.astype(np.float32)) & np.isfinite(array)
    if np.any(lost):
        raise ValueError(f"{where} holds {array[lost][0]:g}, more than float32 holds.")
    return array


def float64_leaves(
    spec: Spec,
    shapes: Sequence[tuple[int, ...]],
    tree: Any,
    name: str,
    *,
    minimum: float = -math.inf,
) -> list[Any]:
    """The leaves of a tree of statistics given from outside, in float64.

    Args:
      spec: What the normalizer was made for.
      shapes: The shape of each leaf.
      tree: Tree of arrays or lists of numbers, or one scalar for all.
      name: What it is called in messages.
      minimum: Lower bound of the values.

    Returns:
      One float64 array per shape, as `float64_array` gives it.

    Raises:
      TypeError: A leaf doesn't hold real numbers.
      ValueError: The structure or a shape differs, or a value is out of range.
    """
    scalar = jax.tree_util.all_leaves([tree]) and np.ndim(tree) == 0
    if scalar:
        leaves = [tree] * len(shapes)
    else:
        leaves = spec.flatten(_with_arrays(spec, tree), name)
    where = [f"{name}{keystr(spec.paths[i])}" for i in spec.kept]
    return [
        float64_array(leaf, shape, at, fill=scalar, minimum=minimum)
        for leaf, shape, at in zip(leaves, shapes, where, strict=True)
    ]


def _with_arrays(spec: Spec, tree: Any) -> Any:
    """`tree` with arrays for lists of numbers where the spec has leaves."""
    names = {path_name(keys_of(path)) for path in spec.paths}

    def walk(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, (list, tuple)) and path_name(path) in names:
            return np.asarray(node)
        if isinstance(node, dict):
            return {key: walk(child, (*path, key)) for key, child in node.items()}
        if type(node) in (list, tuple):
            return type(node)(walk(v, (*path, i)) for i, v in enumerate(node))
        return node

    return walk(canonicalize(tree), ())


def refuse_torn(spec: Spec, mean: Sequence[Any], M2: Sequence[Any], count: Any) -> None:
    """Raise where a mean stands for no sample, or M2 is more than float32 holds.

    Args:
      spec: What the normalizer was made for.
      mean: float64 arrays, one per leaf; traced ones are not looked at.
      M2: The same.
      count: Their number of samples.

    Raises:
      ValueError: There is such a leaf.
    """
    for i, m, s in zip(spec.kept, mean, M2, strict=True):
        where = keystr(spec.paths[i])
        if not isinstance(count, Tracer) and not isinstance(m, Tracer):
            if np.any((align_leading(count, m) == 0) & (m != 0)):
                raise ValueError(
                    f"count is 0 where mean{where} is not: without samples there is "
                    "no mean. Give the count that mean and variance stand for."
                )
        if not isinstance(s, Tracer):
            float64_array(s, s.shape, f"M2{where}", finite=False)
