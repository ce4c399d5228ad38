# SPDX-License-Identifier: Apache-2.0
"""Refuse what does not fit, at trace time, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from nnx_norm.fold import Emitted
from nnx_norm.spec import Match, Spec, refuse_dtype


def as_array(leaf: Any, where: str) -> jax.Array:
    """`leaf` as a JAX array of real numbers.

    Integers of 64 bits that JAX would wrap around to 32 become float32.

    Args:
      leaf: Array, NumPy array or Python number.
      where: What it is called in messages.

    Returns:
      The array.

    Raises:
      TypeError: It is no array of bool, integers or real floating point numbers.

    Example:
      >>> as_array(1.5, "x").shape
      ()
    """
    if isinstance(leaf, (bool, int, float)):
        leaf = np.asarray(leaf)[()] if isinstance(leaf, int) else jnp.asarray(leaf)
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(
            f"{where} is {leaf!r:.80} of type {type(leaf).__name__}; expected an array."
        )
    refuse_dtype(leaf.dtype, where)
    if isinstance(leaf, (np.ndarray, np.integer)) and leaf.dtype.kind in "iu":
        narrow = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        leaf = narrow if np.array_equal(narrow, leaf) else leaf.astype(np.float32)
    return jnp.asarray(leaf)


def samples(spec: Spec, match: Match, name: str) -> list[jax.Array]:
    """The leaves that have statistics, as arrays `[..., *feat]`.

    Args:
      spec: What the normalizer was made for.
      match: A tree that fits it.
      name: What the tree is called in messages.

    Returns:
      One array per leaf that has statistics.

    Raises:
      TypeError: A leaf is no array of real numbers.
      ValueError: A leaf doesn't end in its feature shape.
    """
    arrays = []
    for i, k in enumerate(match.kept):
        where = f"{name}{keystr(spec.paths[spec.kept[i]])}"
        x, feat = as_array(match.leaves[k], where), spec.features[i]
        if x.shape[max(x.ndim - len(feat), 0) :] != feat or x.ndim < len(feat):
            raise ValueError(
                f"{where} has shape {x.shape}; expected (*lead, {_inside(feat)}), "
                f"usually (B, {_inside(feat)}) in a forward pass and "
                f"(T, B, {_inside(feat)}) in a history. Features are never broadcast."
            )
        arrays.append(x)
    return arrays


def matched(
    spec: Spec, tree: Any, name: str, *, partial: bool = False
) -> tuple[Match, list[jax.Array]]:
    """A tree of inputs and its leaves that have statistics, `[*lead, *feat]`.

    Args:
      spec: What the normalizer was made for.
      tree: The inputs.
      name: What they are called in messages.
      partial: Whether excluded leaves may be missing.

    Returns:
      The `Match`, and one array per leaf that has statistics.

    Raises:
      TypeError: A leaf is no array of real numbers, or these are emitted moments.
      ValueError: The structure or a shape differs, or the leading axes of two leaves.
    """
    if isinstance(tree, Emitted):
        raise TypeError(
            f"{name} holds moments, which a normalizer emits that was made with "
            'emit="moments"; this one, made with emit="inputs", folds raw inputs.'
        )
    match = spec.match(tree, name, partial=partial)
    arrays = samples(spec, match, name)
    common_leading(spec, arrays, name)
    return match, arrays


def leading(spec: Spec, arrays: Sequence[jax.Array], name: str) -> tuple[int, ...]:
    """The leading axes that all leaves of a history have in common.

    Args:
      spec: What the normalizer was made for.
      arrays: Its leaves `[*lead, *feat]`.
      name: What the history is called in messages.

    Returns:
      The sizes of the leading axes, at least one.

    Raises:
      ValueError: A leaf has no leading axis, or others than the first leaf.
    """
    lead = common_leading(spec, arrays, name)
    if lead == () and arrays:
        where = f"{name}{keystr(spec.paths[spec.kept[0]])}"
        raise ValueError(
            f"{where} has shape {arrays[0].shape} and so no leading axis; expected "
            f"(*lead, {_inside(spec.features[0])}), usually (T, B, "
            f"{_inside(spec.features[0])}). For one sample write x[None]."
        )
    return lead


def common_leading(
    spec: Spec, arrays: Sequence[jax.Array], name: str
) -> tuple[int, ...]:
    """The leading axes that all leaves have in common, or none.

    Args:
      spec: What the normalizer was made for.
      arrays: Its leaves `[*lead, *feat]`.
      name: What the tree is called in messages.

    Returns:
      The sizes of the leading axes.

    Raises:
      ValueError: A leaf has others than the first leaf.
    """
    first: tuple[int, ...] | None = None
    for i, (x, feat) in enumerate(zip(arrays, spec.features, strict=True)):
        where = f"{name}{keystr(spec.paths[spec.kept[i]])}"
        lead = x.shape[: x.ndim - len(feat)]
        if first is not None and lead != first:
            raise ValueError(
                f"{where} has the leading axes {lead}; the leaves before it have "
                f"{first}. All leaves share theirs: usually (B,) in a forward pass, "
                "(T, B) in a history."
            )
        first = lead
    return first or ()


def emitted(spec: Spec, history: Any) -> Emitted:
    """A history of emitted moments, with lists of leaves for its trees.

    Args:
      spec: What the normalizer was made for.
      history: `Emitted` with leaves `[*lead, *feat]`.

    Returns:
      The same, flattened.

    Raises:
      TypeError: It is something else, such as raw inputs.
      ValueError: Its shapes don't fit.
    """
    if not isinstance(history, Emitted):
        raise TypeError(
            f'history is a {type(history).__name__}; with emit="moments" expected the '
            "extras that the forward pass emitted, stacked over time. Raw inputs are "
            'for emit="inputs".'
        )
    flat = history.over(lambda tree: spec.flatten(tree, "history"))
    lead = jnp.shape(flat.count)
    if not lead or jnp.shape(flat.skipped) != lead:
        raise ValueError(
            f"history.count has shape {lead}; expected the leading axes, usually (T,). "
            "For one step write jax.tree.map(lambda v: v[None], extras)."
        )
    for i, feat in enumerate(spec.features):
        for name, tree in zip(Emitted._fields[:3], flat[:3], strict=True):
            if jnp.shape(tree[i]) != lead + feat:
                where = f"history.{name}{keystr(spec.paths[spec.kept[i]])}"
                raise ValueError(
                    f"{where} has shape {jnp.shape(tree[i])}; expected {lead + feat}."
                )
    return flat


def _inside(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) or "*()"
