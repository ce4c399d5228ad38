# SPDX-License-Identifier: Apache-2.0
"""Say in what a tree differs from the one that a normalizer was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import keystr

from nnx_norm.tree import is_mapping, keys_of, path_name

if TYPE_CHECKING:
    from nnx_norm.spec import Spec

Given = Sequence[tuple[tuple[Any, ...], Any]]
"""Paths and leaves of a tree, None being a leaf."""


def refuse_other_root(spec: Spec, tree: Any, given: Given, name: str) -> None:
    """Raise where one array came for a tree, or a tree for one array.

    Args:
      spec: What the normalizer was made for.
      tree: The tree.
      given: Its paths and leaves.
      name: What it is called in messages.

    Raises:
      ValueError: That is so.
    """
    one, bare = spec.paths == ((),), [path for path, _ in given] == [()]
    if bare and not one:
        raise ValueError(
            f"{name} is {_kind(tree)}; expected a tree of arrays, "
            f"{spec.describe()}. Pass {_like(spec)}."
        )
    if one and not bare and spec.shapes != (None,):
        leaves = ", ".join(f"{name}{keystr(path)}" for path, _ in given[:8])
        raise ValueError(
            f"{name} is a {type(tree).__name__} with {leaves or 'nothing in it'}; "
            f"expected one array, {spec.describe()}. " + _hint(tree, name)
        )


def refuse_extra(spec: Spec, tree: Any, given: Given, name: str) -> None:
    """Raise where a tree holds a leaf that the spec hasn't.

    Args:
      spec: What the normalizer was made for.
      tree: The tree.
      given: Its paths and leaves.
      name: What it is called in messages.

    Raises:
      ValueError: There is such a leaf; the first is named.
    """
    names = {path_name(keys_of(path)) for path in spec.paths}
    for path, _ in given:
        if path_name(keys_of(path)) not in names:
            hint = (
                "Leave it out, or add it to `shape` (and to `exclude` if it shall "
                "pass through)."
            )
            raise ValueError(
                f"{name}{keystr(path)} is not in the normalizer's spec, which has "
                f"{spec.describe()}. "
                + (hint if is_mapping(tree) else _hint(tree, name))
            )


def refuse_missing(
    spec: Spec, index: dict[str, int], given: Given, name: str, partial: bool
) -> None:
    """Raise where a tree lacks a leaf, or holds one where the spec holds None.

    Args:
      spec: What the normalizer was made for.
      index: Positions in `given` by the name of the path.
      given: Paths and leaves of the tree.
      name: What it is called in messages.
      partial: Whether excluded leaves may be missing.

    Raises:
      ValueError: That is so; the first is named.
    """
    for path, shape, out in zip(spec.paths, spec.shapes, spec.excluded, strict=True):
        key = path_name(keys_of(path))
        leaf = given[index[key]][1] if key in index else None
        if shape is None and leaf is not None:
            raise ValueError(
                f"{name}{keystr(path)} must be None, as in the normalizer's spec; "
                f"got {type(leaf).__name__}."
            )
        absent = key not in index if (out or shape is None) else leaf is None
        if absent and not (partial and (out or shape is None)):
            none = " (it is None)" if key in index and not out else ""
            hint = (
                "It is excluded, but passes through a forward pass"
                if out
                else "Pass it, or `exclude` it when the normalizer is made"
            )
            raise ValueError(
                f"{name}{keystr(path)} is missing{none}; expected {spec.describe()}. "
                f"{hint}."
            )


def _kind(leaf: Any) -> str:
    """What a leaf is."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"one array of shape {np.shape(leaf)}"
    return "None" if leaf is None else f"one {type(leaf).__name__}"


def _like(spec: Spec) -> str:
    """What to pass for a spec that is a tree."""
    root = jax.tree.unflatten(spec.treedef, [0] * spec.treedef.num_leaves)
    if is_mapping(root):
        return f"a mapping with the keys {sorted(root, key=str)}"
    return f"a {type(root).__name__} as the normalizer was made with"


def _hint(tree: Any, name: str) -> str:
    """What may have been meant by a tree of another kind."""
    if hasattr(tree, "rollout_extras"):
        return "Pass its rollout_extras, stacked over time."
    if name == "x" and isinstance(tree, tuple) and not tree:
        return "The state comes first: normalizer(state, x)."
    if isinstance(tree, list):
        return (
            "Stack a list of steps first: "
            "jax.tree.map(lambda *steps: jnp.stack(steps), *history)."
        )
    return "Pass that leaf itself, or make the normalizer with the tree as `shape`."
