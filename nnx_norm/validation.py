# SPDX-License-Identifier: Apache-2.0
"""Refuse what does not fit, at trace time, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr

from nnx_norm.fold import Emitted
from nnx_norm.samples import align_leading
from nnx_norm.spec import Match, Spec, refuse_dtype


def as_array(leaf: Any, where: str) -> jax.Array:
    """`leaf` as a JAX array of real numbers.

    Args:
      leaf: Array, NumPy array or Python number.
      where: What it is called in messages.

    Returns:
      The array.

    Raises:
      TypeError: It is no array of bool, integers or real floating point numbers.

    Example:
      >>> as_array(1.5, "x").dtype
      dtype('float32')
    """
    if isinstance(leaf, (bool, int, float)):
        return jnp.asarray(leaf)
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(
            f"{where} is {leaf!r:.80} of type {type(leaf).__name__}; expected an array."
        )
    refuse_dtype(leaf.dtype, where)
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
                f"{first}. All leaves of a history share theirs, usually (T, B)."
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
            "extras that the forward pass emitted, stacked over time."
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


def mask_array(
    mask: Any, lead: tuple[int, ...], *, prefix: bool = True
) -> jax.Array | None:
    """A bool mask over the leading axes or a leading prefix of them.

    Args:
      mask: None or an array of bool.
      lead: The leading axes of the history.
      prefix: Whether a leading prefix of them is enough.

    Returns:
      The mask as an array.

    Raises:
      TypeError: It isn't bool.
      ValueError: Its shape is no prefix of `lead`.
    """
    if mask is None:
        return None
    array = as_array(mask, "mask")
    if array.dtype != jnp.bool_:
        also = ", or pass real numbers as weights=." if prefix else "."
        raise TypeError(
            f"mask has dtype {array.dtype}; expected bool. Write mask.astype(bool)"
            + also
        )
    _refuse_shape(array, lead, "mask", prefix)
    return array


def flags(value: Any, lead: tuple[int, ...], name: str) -> jax.Array:
    """Bool flags `[T, B]`, such as the ends of episodes.

    Args:
      value: Array of bool, or of zeros and ones as environments give them.
      lead: The shape that it must have.
      name: What it is called in messages.

    Returns:
      A bool array.

    Raises:
      TypeError: It isn't an array of real numbers.
      ValueError: Its shape differs.

    Example:
      >>> flags(jnp.array([[0.0, 1.0]]), (1, 2), "terminated").tolist()
      [[False, True]]
    """
    array = as_array(value, name)
    if array.shape != lead:
        raise ValueError(f"{name} has shape {array.shape}; expected (T, B) = {lead}.")
    return array.astype(jnp.bool_)


def weight_array(
    weights: Any, lead: tuple[int, ...], mask: jax.Array | None = None
) -> jax.Array | None:
    """Non-negative weights over the leading axes or a leading prefix of them.

    Args:
      weights: None or an array of real numbers.
      lead: The leading axes of the history.
      mask: None or a mask over a prefix: weights are not looked at elsewhere.

    Returns:
      The weights as a float array.

    Raises:
      TypeError: They are bool.
      ValueError: Their shape is no prefix of `lead`, or, outside jit, one of them is
        negative or not finite.
    """
    if weights is None:
        return None
    array = as_array(weights, "weights")
    if array.dtype == jnp.bool_:
        raise TypeError("weights has dtype bool; expected numbers. Pass it as mask=.")
    _refuse_shape(array, lead, "weights")
    if _readable(array) and (mask is None or _readable(mask)):
        refused = ~(np.isfinite(array) & (np.asarray(array) >= 0))
        if mask is not None:  # either may have axes that the other lacks
            counts = np.asarray(mask)
            refused = align_leading(refused, mask) & align_leading(counts, array)
        if np.any(refused):
            raise ValueError(
                "weights holds negative or non-finite values; expected weights >= 0."
            )
    return array.astype(jnp.float32)


def _readable(array: jax.Array) -> bool:
    return not isinstance(array, Tracer) and array.is_fully_addressable


def _refuse_shape(
    array: jax.Array, lead: tuple[int, ...], name: str, prefix: bool = True
) -> None:
    if array.shape != (lead[: array.ndim] if prefix and array.ndim else lead):
        also = " or a leading prefix of them" if prefix else ""
        raise ValueError(
            f"{name} has shape {array.shape}; expected the leading axes {lead} of the "
            f"history{also}, usually (T, B)."
        )


def _inside(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) or "*()"
