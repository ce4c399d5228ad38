# SPDX-License-Identifier: Apache-2.0
"""Statistics between two libraries: read off another one's, and off our modules.

What goes over is the mean, the variance, the count and what the source divides by.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from nnx_norm import concrete, state_dicts
from nnx_norm.conventions import ADDED_TO_VARIANCE, Convention
from nnx_norm.normalizer import Normalizer
from nnx_norm.rewards import RewardNormalizer
from nnx_norm.running_mean_std import RunningMeanStd
from nnx_norm.scaling import variance_of
from nnx_norm.statistics import RunningStatistics
from nnx_norm.tree import canonicalize, is_mapping

PyTree = Any


class Moved(NamedTuple):
    """Statistics between two libraries: float64 NumPy arrays.

    Attributes:
      mean: Tree of arrays `[*feat]`.
      variance: The same tree: the variance of the samples.
      std: The same tree: what `x - mean` is divided by.
      count: Number of samples that they stand for.
    """

    mean: PyTree
    variance: PyTree
    std: PyTree
    count: Any


def field(source: Any, name: str) -> Any:
    """An attribute of an object, or an entry of a mapping.

    Args:
      source: What another library made, or a saved state of it.
      name: The name that the library has for it.

    Returns:
      The value; of an `nnx.Variable` what it holds.

    Raises:
      ValueError: There is none.

    Example:
      >>> field({"mean": 1.0}, "mean"), field(2j, "imag")
      (1.0, 2.0)
    """
    value = optional(source, name)
    if value is None:
        raise ValueError(
            f"The {type(source).__name__} has no {name!r}: it holds no statistics yet, "
            "or it is of another library or a version that names them otherwise."
        )
    return value


def optional(source: Any, name: str, default: Any = None) -> Any:
    """`field`, with a default."""
    value: Any
    if is_mapping(source):
        value = source[name] if name in source.keys() else None
    else:
        value = getattr(source, name, None)
    if hasattr(value, "get_value"):
        value = value.get_value()
    return default if value is None else value


def float64(tree: PyTree) -> PyTree:
    """A tree of arrays or tensors as plain dicts and such of float64 NumPy arrays.

    Example:
      >>> float64({"goal": [1, 2]})["goal"][0].dtype
      dtype('float64')
    """

    def array(leaf: Any) -> np.ndarray:
        leaf = leaf.get_value() if hasattr(leaf, "get_value") else leaf
        return state_dicts.as_numpy(leaf).astype(np.float64)

    if state_dicts.is_numbers(tree):
        return np.asarray(tree, np.float64)
    return jax.tree.map(array, canonicalize(tree))


def number(value: Any) -> float:
    """A count as a Python float, from a scalar or an array of one element.

    Example:
      >>> number(np.ones((1,)))
      1.0
    """
    return float(state_dicts.as_numpy(value).astype(np.float64).reshape(()))


def moved(
    mean: PyTree,
    variance: PyTree,
    count: Any,
    convention: Convention,
    epsilon: float,
) -> Moved:
    """Statistics of a library that divides by a convention.

    Args:
      mean: Tree of arrays or tensors `[*feat]`.
      variance: The same tree. Rounding may have left it a little below zero.
      count: Number of samples.
      convention: How the library gets its divisor.
      epsilon: Its epsilon.

    Returns:
      What to hand to `normalizer`.
    """
    mean = float64(mean)
    variance = not_negative(float64(variance), mean)
    std = jax.tree.map(lambda v: convention.divisor(v, epsilon), variance)
    return Moved(mean, variance, std, count)


def not_negative(variance: PyTree, mean: PyTree) -> PyTree:
    """Variances without what rounding has left of them below zero.

    Args:
      variance: Tree of arrays `[*feat]`.
      mean: The same tree. A difference of squares in float32 is off by their rounding.

    Returns:
      The variances, 0 where they were negative.

    Raises:
      ValueError: One is further below zero, or the trees differ.

    Example:
      >>> not_negative(np.float64([-1e-9, 4.0]), np.zeros(2)).tolist()
      [0.0, 4.0]
    """
    rounding = 4 * np.finfo(np.float32).eps

    def cut(path: Any, v: np.ndarray, m: np.ndarray) -> np.ndarray:
        size = np.square(m) + np.max(np.abs(v), initial=0.0)
        if np.any(v < -rounding * size):
            where = keystr(path) or "the input"
            raise ValueError(
                f"A variance of {where} is {np.min(v):g}; expected none below 0. The "
                "state is damaged, or its entries mean something else."
            )
        return np.maximum(v, 0.0)

    shapes = [jax.tree.map(np.shape, tree) for tree in (mean, variance)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The mean has the shapes {shapes[0]} and the variance {shapes[1]}; "
            "expected the same for both."
        )
    return jax.tree_util.tree_map_with_path(cut, variance, mean)


def exported(module: Any, what: str = "An export") -> Moved:
    """Statistics of a module of ours, on their way to another library.

    Args:
      module: A `Normalizer`, a `RewardNormalizer` or one of the ports.
      what: Who needs them, for messages.

    Returns:
      float64 NumPy arrays in the trees of the module, None where excluded.

    Raises:
      TypeError: It is something else.
      ValueError: Its shape is unknown yet, or it is traced by jit.

    Example:
      >>> exported(Normalizer(2)).std.tolist()
      [10.0, 10.0]
    """
    if isinstance(module, RunningStatistics | RunningMeanStd):
        concrete.refuse_traced(module.mean.get_value(), what)
    if isinstance(module, (Normalizer, RewardNormalizer)):
        s, tree = module._statistics64(), module.spec.unflatten
        return Moved(
            tree(s.mean),
            tree([variance_of(M2, s.counter) for M2 in s.M2]),
            tree([module._divisor(M2, s.counter) for M2 in s.M2]),
            s.counter,
        )
    if not isinstance(module, RunningMeanStd):
        raise TypeError(f"Got a {type(module).__name__}; expected a normalizer.")
    mean, var, count = module.to_numpy()
    if module.is_lazy:
        raise ValueError("The RunningMeanStd has no shape yet: record a batch first.")
    epsilon = module.epsilon
    std = jax.tree.map(lambda v: ADDED_TO_VARIANCE.divisor(v, epsilon), var)
    return Moved(mean, var, std, np.float64(count))


def variance_for(source: Moved, convention: Convention, epsilon: float) -> PyTree:
    """The variances that make another library divide by what our module divides by.

    Args:
      source: What `exported` gave.
      convention: How the library gets its divisor.
      epsilon: Its epsilon.

    Returns:
      Tree of float64 arrays `[*feat]`.

    Raises:
      ValueError: There are none: its epsilon is too large.
    """

    def fitted(path: Any, variance: Any, std: Any) -> Any:
        where = keystr(path) or "the input"
        return convention.fitted(variance, std, epsilon, where)

    return jax.tree_util.tree_map_with_path(fitted, source.variance, source.std)


def one_array(tree: PyTree) -> np.ndarray:
    """A tree of statistics that has to be one array.

    Args:
      tree: Of what `exported` gave.

    Returns:
      The array.

    Raises:
      ValueError: It is a tree.

    Example:
      >>> one_array(np.zeros(2)).tolist()
      [0.0, 0.0]
    """
    if not isinstance(tree, (np.ndarray, np.generic)):
        raise ValueError(
            f"The module's statistics are a {type(tree).__name__}; expected one array. "
            "Take its entries out one by one, from to_dict()."
        )
    return np.asarray(tree)
