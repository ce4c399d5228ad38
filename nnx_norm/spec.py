# SPDX-License-Identifier: Apache-2.0
"""Trees of observations: what a normalizer was made for, and does this fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from nnx_norm import mismatch
from nnx_norm.tree import Path, canonicalize, is_none, keys_of, path_name

Exclude = str | Iterable[str | Path] | Callable[[Path], bool]


@dataclasses.dataclass(frozen=True)
class Spec:
    """Structure, leaf shapes and exclusions of the trees that a normalizer takes.

    Hashable, so that it can be a static attribute.

    Attributes:
      treedef: Structure of the whole tree; None is a leaf in it.
      paths: JAX key path of every leaf, None included.
      shapes: Feature shape of every leaf; None where the spec holds None.
      excluded: For every leaf, whether it passes through untouched.
    """

    treedef: Any
    paths: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    excluded: tuple[bool, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the leaves that have statistics."""
        leaves = enumerate(zip(self.shapes, self.excluded, strict=True))
        return tuple(i for i, (s, out) in leaves if s is not None and not out)

    @property
    def features(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the leaves that have statistics."""
        return tuple(self.shapes[i] or () for i in self.kept)

    @property
    def excluded_names(self) -> tuple[str, ...]:
        """Path names of the excluded leaves, as `exclude` takes them."""
        return tuple(
            path_name(keys_of(p))
            for p, out in zip(self.paths, self.excluded, strict=True)
            if out
        )

    def unflatten(self, kept: Sequence[Any]) -> Any:
        """Tree with `kept` at the leaves that have statistics, None elsewhere."""
        leaves: list[Any] = [None] * len(self.shapes)
        for i, leaf in zip(self.kept, kept, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(self.treedef, leaves)

    def flatten(self, tree: Any, name: str) -> list[Any]:
        """Leaves of a tree of statistics, in the order of `kept`.

        Args:
          tree: Tree shaped like `unflatten`'s; excluded leaves may be missing.
          name: What the tree is called in messages.

        Returns:
          One leaf per entry of `kept`.

        Raises:
          ValueError: The tree has another structure.
        """
        match = self.match(tree, name, partial=True)
        return [match.leaves[i] for i in match.kept]

    def match(self, tree: Any, name: str, *, partial: bool = False) -> Match:
        """Pair the leaves of `tree` with those of the spec.

        Args:
          tree: Tree of anything, with mappings of any kind.
          name: What the tree is called in messages, such as `history`.
          partial: Whether excluded leaves may be missing.

        Returns:
          A `Match`: the leaves of `tree` and where the kept ones stand.

        Raises:
          ValueError: A key is missing or too many, or the nodes are of other types.
        """
        given, treedef = tree_flatten_with_path(canonicalize(tree), is_leaf=is_none)
        index = {path_name(keys_of(path)): i for i, (path, _) in enumerate(given)}
        names = [path_name(keys_of(path)) for path in self.paths]
        mismatch.refuse_other_root(self, tree, given, name)
        mismatch.refuse_extra(self, tree, given, name)
        mismatch.refuse_missing(self, index, given, name, partial)
        if treedef != self.treedef and not (partial and any(self.excluded)):
            raise ValueError(
                f"{name} has the structure {treedef}; expected {self.treedef}. Use "
                "the containers that the normalizer was made with (mappings of every "
                "kind count as one)."
            )
        leaves = [leaf for _, leaf in given]
        return Match(treedef, leaves, [index[names[i]] for i in self.kept])

    def __repr__(self) -> str:
        """What `print(normalizer)` shows of it."""
        out = ", ".join(name or "one array" for name in self.excluded_names)
        return f"Spec({self.describe()}{f', exclude {out}' if out else ''})"

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        """What a notebook shows of it: the same, rather than the fields."""
        return subtree_renderer(repr(self), path=path)

    def describe(self) -> str:
        """The leaves and their shapes, for messages."""
        leaves = [
            f"{path_name(keys_of(p)) or 'one array'}: {shape}"
            for p, shape in zip(self.paths, self.shapes, strict=True)
            if shape is not None
        ]
        return "{" + ", ".join(leaves) + "}"


@dataclasses.dataclass(frozen=True)
class Match:
    """Leaves of a tree that fits a `Spec`.

    Attributes:
      treedef: Structure of that tree, None being a leaf.
      leaves: All its leaves.
      kept: Positions in `leaves` of the leaves that have statistics, in order.
    """

    treedef: Any
    leaves: list[Any]
    kept: list[int]

    def replace(self, kept: Sequence[Any], *, others: bool) -> Any:
        """The tree with new kept leaves; the others as they are, or None."""
        leaves = list(self.leaves) if others else [None] * len(self.leaves)
        for i, leaf in zip(self.kept, kept, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(self.treedef, leaves)


def parse(shape: Any, exclude: Exclude = ()) -> Spec:
    """Read a normalizer's `shape` and `exclude` arguments.

    Args:
      shape: An int, a tuple or list of ints (one array), a nested mapping of those,
        or any pytree of arrays or `jax.ShapeDtypeStruct`s: an unbatched example. A
        NumPy integer is an int; an array without axes is a scalar observation.
      exclude: Paths (`"goal/id"`, `("goal", "id")` inside a list, or the path of a
        subtree) or a predicate on a path's tuple of keys.

    Returns:
      The `Spec`.

    Raises:
      TypeError: A leaf is neither a shape nor an array, or not of real numbers.
      ValueError: A negative dimension, or a path that isn't in the tree.

    Example:
      >>> spec = parse({"pos": 3, "image": (64, 64, 3)}, exclude=("image",))
      >>> spec.features, spec.excluded_names
      (((3,),), ('image',))
    """
    leaves, treedef = tree_flatten_with_path(
        _shapes(canonicalize(shape), "shape"),
        is_leaf=lambda n: n is None or isinstance(n, Leaf),
    )
    paths = tuple(path for path, _ in leaves)
    names = [path_name(keys_of(path)) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"shape has keys that read alike as strings: {sorted(names)}.")
    shapes = tuple(None if leaf is None else leaf.shape for _, leaf in leaves)
    spec = Spec(treedef, paths, shapes, _excluded(paths, shapes, exclude))
    for i in spec.kept:
        if (dtype := leaves[i][1].dtype) is not None:
            refuse_dtype(dtype, f"shape{keystr(paths[i])}")
    return spec


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A feature shape, as a leaf of a tree, and the dtype of an example."""

    shape: tuple[int, ...]
    dtype: Any = None


def _is_shape(node: Any) -> bool:
    """An int, or a plain tuple or list of ints: the shape of one array."""
    if isinstance(node, Integral):
        return True
    return type(node) in (tuple, list) and all(isinstance(n, Integral) for n in node)


def _shapes(node: Any, where: str) -> Any:
    """Replace every shape, array or ShapeDtypeStruct by a `Leaf`."""
    if _is_shape(node):
        return Leaf(_dimensions(node, where))
    if isinstance(node, dict):
        return {k: _shapes(v, f"{where}[{k!r}]") for k, v in node.items()}
    if type(node) in (tuple, list):
        return type(node)(_shapes(v, f"{where}[{i}]") for i, v in enumerate(node))
    if not jax.tree_util.all_leaves([node]):  # a registered node: one level down
        return jax.tree.map(
            lambda child: _shapes(child, where), node, is_leaf=lambda n: n is not node
        )
    if not hasattr(node, "shape") or not hasattr(node, "dtype"):
        raise TypeError(
            f"{where} is {node!r} of type {type(node).__name__}; expected an int, a "
            "tuple of ints, a mapping of those, or an array or jax.ShapeDtypeStruct."
        )
    return Leaf(_dimensions(node.shape, where), node.dtype)


def _dimensions(shape: Any, where: str) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, Integral) else tuple(shape)
    for n in sizes:
        if isinstance(n, (bool, np.bool_)):
            raise TypeError(f"{where} has the dimension {n!r}; expected an int.")
        if n < 0:
            raise ValueError(f"{where} has the negative dimension {n}.")
    return tuple(int(n) for n in sizes)


def _excluded(
    paths: tuple[Any, ...], shapes: tuple[Any, ...], exclude: Exclude
) -> tuple[bool, ...]:
    keys = [keys_of(path) for path in paths]
    if callable(exclude):
        return tuple(
            shape is not None and bool(exclude(key))
            for key, shape in zip(keys, shapes, strict=True)
        )
    if not isinstance(exclude, Iterable):
        raise TypeError(
            f'exclude is {exclude!r}; expected paths, such as ("goal/id",), or one '
            "predicate on the path. () excludes nothing."
        )
    wanted = [exclude] if isinstance(exclude, str) else list(exclude)
    names = [path_name(key) for key in keys]
    out = [False] * len(keys)
    for entry in wanted:
        prefix = entry if isinstance(entry, str) else path_name(_as_path(entry))
        hits = [n == prefix or n.startswith(prefix + "/") for n in names]
        if not any(hits):
            raise ValueError(
                f"exclude names {entry!r}, which is no path of the spec: {names}."
            )
        out = [
            a or (b and s is not None)
            for a, b, s in zip(out, hits, shapes, strict=True)
        ]
    return tuple(out)


def _as_path(entry: Any) -> Path:
    if isinstance(entry, (tuple, list)):
        return tuple(entry)
    if isinstance(entry, Integral):
        return (int(entry),)
    raise TypeError(
        f"exclude holds {entry!r} of type {type(entry).__name__}; expected paths such "
        'as "goal/id" or ("goal", "id"), or one predicate on the path.'
    )


def refuse_dtype(dtype: Any, where: str) -> None:
    """Raise TypeError unless `dtype` is bool, integer or real floating point."""
    real = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    if not real or jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{where} has dtype {dtype}; expected real numbers (floating point, "
            "integer or bool). Exclude it, or convert it first."
        )
