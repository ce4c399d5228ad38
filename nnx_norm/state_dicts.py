# SPDX-License-Identifier: Apache-2.0
"""Saved states of every form as nested dicts, and a way through them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from nnx_norm.tree import is_mapping


def nested(state_dict: Any) -> dict[str, Any]:
    """A saved state as nested dicts with str keys, without Variables.

    Args:
      state_dict: `nnx.State`, nested mapping, flat mapping with dotted keys
        (`"layers.0.mean"`) or with tuples as keys.

    Returns:
      Nested dict; arrays as they came.

    Raises:
      TypeError: It is no mapping.
      ValueError: One key is both a value and the parent of others.

    Example:
      >>> nested({"layers.0.mean": 1.0, "layers.1": {"mean": 2.0}})
      {'layers': {'0': {'mean': 1.0}, '1': {'mean': 2.0}}}
    """
    if not is_mapping(state_dict):
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__}; expected nnx.State or a "
            "mapping of names to arrays or to further mappings."
        )
    root: dict[str, Any] = {}
    for key in state_dict.keys():
        *parents, last = names(key if isinstance(key, tuple) else (key,))
        node = root
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ValueError(f"state_dict[{key!r}] lies below another value.")
        value = _plain(state_dict[key])
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            node[last] |= value
        else:
            node[last] = value
    return root


def _plain(node: Any) -> Any:
    if isinstance(node, nnx.Variable):
        node = node.get_value()
    if is_mapping(node):
        return {str(key): _plain(node[key]) for key in node.keys()}
    if is_numbers(node):
        return np.asarray(node)
    if type(node) in (tuple, list):
        return type(node)(_plain(v) for v in node)
    return node


def is_numbers(node: Any) -> bool:
    """Whether a node is a list (of lists) of Python numbers, as JSON has arrays.

    Example:
      >>> is_numbers([[1, 2.5]]), is_numbers([np.zeros(2)])
      (True, False)
    """
    if not isinstance(node, list) or not node:
        return False
    return all(isinstance(v, (int, float)) or is_numbers(v) for v in node)


def names(path: Iterable[Any]) -> list[str]:
    """The keys of a path as dotted names have them: `("layers", 0)` to two strings.

    Example:
      >>> names(("encoder.obs_norm", 0))
      ['encoder', 'obs_norm', '0']
    """
    return [part for key in path for part in str(key).split(".")]


def find(node: Any, path: Iterable[Any]) -> Any:
    """What a nested state holds at a path; None if nothing.

    Args:
      node: A state as `nested` gives it.
      path: Keys, attribute names and indices.

    Returns:
      A sub-state or a value.

    Example:
      >>> find({"layers": [{"mean": 1.0}]}, ("layers", 0, "mean"))
      1.0
    """
    for name in names(path):
        if isinstance(node, (tuple, list)):
            node = dict(zip(map(str, range(len(node))), node, strict=True))
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def variable(state: Any, name: str) -> Any:
    """The value of one Variable in the state of a module; None if it isn't there.

    Orbax restores without a target put it below a key `value`; that level is left out.

    Args:
      state: State of a module of statistics, as `nested` gives it.
      name: Name of the Variable.

    Returns:
      An array or a tree of arrays.

    Example:
      >>> variable({"mean": {"value": 1.0}, "count": {"value": 2.0}}, "mean")
      1.0
    """
    node = find(state, (name,))
    # `value` may be a feature's own name; count, a scalar, tells the two apart.
    count = find(state, ("count",))
    probe = node if count is None else count
    levelled = isinstance(probe, Mapping) and set(probe) == {"value"}
    return find(node, ("value",)) if levelled else node


def as_numpy(array: Any) -> np.ndarray:
    """An array of JAX, NumPy or of a library like PyTorch, as NumPy's.

    Args:
      array: Anything with `__array__`, or with `detach`, `cpu` and `numpy`; a number
        or list of numbers.

    Returns:
      The array on the host, in its own dtype; of PyTorch's bfloat16 and smaller ones,
      which NumPy lacks, in float32.

    Example:
      >>> as_numpy([1, 2]).tolist()
      [1, 2]
    """
    for step in ("detach", "cpu"):
        if hasattr(array, step):
            array = getattr(array, step)()
    if hasattr(array, "numpy"):
        try:
            array = array.numpy()
        except TypeError:  # PyTorch's bfloat16, which NumPy doesn't know
            array = array.float().numpy()
    return np.asarray(array)
