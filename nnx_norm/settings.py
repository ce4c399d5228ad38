# SPDX-License-Identifier: Apache-2.0
"""The settings in a dict of `to_dict`, to make a normalizer again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nnx_norm.serialization import flatten
from nnx_norm.spec import Leaf, Spec
from nnx_norm.tree import is_mapping

NODES = (["()"], ["[]"], ["{}"])
"""Keys of the dicts that stand for other nodes in `shape_to_json`."""

TREES = ("mean", "M2", "variance", "std")
NUMBERS = ("count", "skipped")


def constructor_arguments(
    d: Any, required: Sequence[str], optional: Sequence[str]
) -> dict[str, Any]:
    """The settings in a dict that `to_dict` gave, as arguments of a constructor.

    Args:
      d: Nested or flat dict, or an open `.npz` file.
      required: Names of those that are always set.
      optional: Names of those that may be unset, which a flat dict leaves out.

    Returns:
      Python values by name.

    Raises:
      TypeError: It is no mapping.
      ValueError: `shape`, a number or a setting is missing (of the nested form one that
        may be unset, too: it is None there), or there is a key of something else.
    """
    if not is_mapping(d):
        raise TypeError(f"from_dict got {type(d).__name__}; expected to_dict's result.")
    names = (*required, *optional, "shape")
    found = {k: d[k] for k in names if k in d.keys()}
    found |= {k: v.tolist() for k, v in found.items() if hasattr(v, "tolist")}
    if found.get("shape") is None:
        raise ValueError(
            "shape is missing: this is no dict of Normalizer.to_dict, or one of a tree "
            "with dataclasses, named tuples or keys that are no str. Make a Normalizer "
            "for it and load_dict."
        )
    unset = [name for name in optional if name in found and found[name] is None]
    nested = unset or any(is_mapping(d[k]) for k in TREES if k in d.keys())
    missing = [name for name in required if found.get(name) is None]
    missing += [name for name in NUMBERS if name not in d.keys()]
    missing += [name for name in optional if nested and name not in found]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: no dict of this class's to_dict. Use "
            "from_dict of the class that gave it."
        )
    _refuse_unknown(d, (*names, *NUMBERS))
    return {k: v for k, v in found.items() if v is not None}


def _refuse_unknown(d: Any, known: Sequence[str]) -> None:
    """Raise for keys that neither form of the dict has."""
    tops = {str(key): str(key).split("/")[0] for key in d.keys()}
    odd = [k for k, top in tops.items() if k not in known and top not in TREES]
    if odd:
        raise ValueError(
            f"{', '.join(odd)}: no key of this class's to_dict. Use from_dict of the "
            "class that gave the dict, or load_dict, which reads the statistics only."
        )


def refuse_other_class(d: Any, of: str, name: str) -> None:
    """Raise for a dict of observations' statistics where returns' belong, or reversed.

    Args:
      d: Anything; a dict without settings is of any class.
      of: "samples" or "returns".
      name: The method that got it.

    Raises:
      ValueError: It is the other class's.
    """
    if is_mapping(d) and "epsilon" in d.keys():
        came = "returns" if "gamma" in d.keys() else "samples"
        if came != of:
            raise ValueError(
                f"{name} got the dict of a normalizer of {came}; expected one of {of}."
            )


def refuse_other_std(d: Any, own: Mapping[str, Any]) -> None:
    """Raise where a dict tells another std than the normalizer made of it has.

    Args:
      d: Nested or flat dict, or an open `.npz` file.
      own: That normalizer's flat dict.

    Raises:
      ValueError: A leaf of `std` contradicts statistics and settings.
    """
    given = {str(k): d[k] for k in d.keys() if str(k).split("/")[0] == "std"}
    flat = flatten(given) if is_mapping(given.get("std")) else given
    for key, value in flat.items():
        if value is not None and not np.allclose(
            np.asarray(value, np.float64), own[key], rtol=1e-6, atol=0, equal_nan=True
        ):
            raise ValueError(
                f"{key!r} contradicts the statistics and settings. Leave it out."
            )


def shape_to_json(spec: Spec) -> str | None:
    """A spec's tree of shapes as JSON text; None if it holds nodes of other classes.

    Tuples and lists are written `{"()": [...]}` and `{"[]": [...]}`, and a dict with
    such a key as `{"{}": {...}}`.
    """

    def write(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, Leaf):
            return list(node.shape)
        if type(node) is dict and all(isinstance(k, str) for k in node):
            written = {k: write(v) for k, v in node.items()}
            return {"{}": written} if list(node) in NODES else written
        if type(node) in (tuple, list):
            return {"()" if type(node) is tuple else "[]": [write(v) for v in node]}
        raise TypeError(f"a {type(node).__name__} can't be written as JSON")

    shapes = [None if shape is None else Leaf(shape) for shape in spec.shapes]
    try:
        return json.dumps(write(jax.tree.unflatten(spec.treedef, shapes)))
    except TypeError:
        return None


def shape_from_json(text: str) -> Any:
    """The `shape` argument that `shape_to_json` wrote down."""

    def read(node: Any) -> Any:
        if isinstance(node, dict) and list(node) in NODES:
            ((kind, children),) = node.items()
            if kind == "{}":
                return {k: read(v) for k, v in children.items()}
            return (tuple if kind == "()" else list)(read(v) for v in children)
        if isinstance(node, dict):
            return {k: read(v) for k, v in node.items()}
        return tuple(node) if isinstance(node, list) else node

    if not isinstance(text, str):
        raise ValueError(f"shape is {text!r}; expected the text that to_dict wrote.")
    return read(json.loads(text))
