# SPDX-License-Identifier: Apache-2.0
"""Trees: plain dicts for mappings of every kind, and names for the paths in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

Path = tuple[Any, ...]
"""Keys from the root to a leaf: dict keys, sequence indices, field names."""


def is_none(x: Any) -> bool:
    """Whether `x` is None: the `is_leaf` that keeps Nones visible in a tree."""
    return x is None


def is_mapping(x: Any) -> bool:
    """Whether `x` is a mapping of any kind, registered with JAX or not."""
    return isinstance(x, Mapping) or (
        callable(getattr(type(x), "keys", None)) and hasattr(type(x), "__getitem__")
    )


def canonicalize(tree: Any) -> Any:
    """Turn every mapping in a tree (OrderedDict, FrozenDict, ...) into a plain dict.

    JAX takes a dict and an OrderedDict for different nodes and orders their leaves
    differently; afterwards they are one.

    Args:
      tree: Any pytree.

    Returns:
      The same tree with plain dicts.

    Raises:
      ValueError: A mapping has keys that can't be sorted, as JAX does with them.

    Example:
      >>> from collections import OrderedDict
      >>> canonicalize((OrderedDict(b=1, a=OrderedDict()), None))
      ({'b': 1, 'a': {}}, None)
    """

    def plain(node: Any) -> Any:
        if is_mapping(node):
            _refuse_unsortable(node.keys())
            return {key: canonicalize(node[key]) for key in node.keys()}
        return node

    return jax.tree.map(plain, tree, is_leaf=is_mapping)


def _refuse_unsortable(keys: Any) -> None:
    keys = list(keys)
    if len({type(key) for key in keys}) > 1:
        try:
            sorted(keys)
        except TypeError as error:
            raise ValueError(
                f"A mapping has the keys {keys}, which JAX can't sort; expected keys "
                "of one type, such as str."
            ) from error


def keys_of(path: tuple[Any, ...]) -> Path:
    """Plain keys of a JAX key path: `(DictKey('a'), SequenceKey(0))` to `('a', 0)`."""

    def key(entry: Any) -> Any:
        for attribute in ("key", "idx", "name"):
            if hasattr(entry, attribute):
                return getattr(entry, attribute)
        return str(entry)

    return tuple(key(entry) for entry in path)


def path_name(path: Path) -> str:
    """Write a path as one string, `goal/id`.

    `~` and `/` inside a key are written `~0` and `~1`, as in JSON pointers
    (RFC 6901), so that different paths never share a name.

    Args:
      path: Keys from the root.

    Returns:
      The keys joined by `/`; the empty string for the root.

    Example:
      >>> path_name(("goal", 0, "a/b"))
      'goal/0/a~1b'
    """
    return "/".join(str(k).replace("~", "~0").replace("/", "~1") for k in path)
