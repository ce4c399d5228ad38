# SPDX-License-Identifier: Apache-2.0
"""Statistics as plain dicts of NumPy arrays: nested, or flat for `np.savez`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from nnx_norm.arguments import float64_array
from nnx_norm.fold import Statistics
from nnx_norm.samples import align_leading
from nnx_norm.spec import Spec
from nnx_norm.tree import is_mapping, keys_of, path_name


def exact(number: Any) -> Any:
    """A count as an int where it is whole, else a float; an array of a population's.

    Args:
      number: float64 array, usually a scalar.

    Returns:
      A Python number, or an array of them.

    Example:
      >>> exact(np.float64(3.0)), exact(np.float64(1.5))
      (3, 1.5)
    """
    whole = np.all(np.isfinite(number)) and np.all(number == np.floor(number))
    if np.ndim(number) == 0:
        return int(number) if whole else float(number)
    held = whole and np.all(np.abs(number) < 2.0**63)
    return np.asarray(number).astype(np.int64 if held else np.float64)


def to_dict(
    spec: Spec,
    trees: Mapping[str, Sequence[Any]],
    others: Mapping[str, Any],
    *,
    flat: bool,
) -> dict[str, Any]:
    """Statistics and settings as one dict.

    Args:
      spec: What the normalizer was made for.
      trees: Leaves `[*feat]` that have statistics, by the name of their tree.
      others: Numbers and settings.
      flat: Whether to give one level of keys.

    Returns:
      Nested: `trees` as nested dicts, None where excluded, and `others`. Flat: keys
      `name/path`, and those of `others` that are set.
    """
    if not flat:
        nested = {k: _nest(spec, v) for k, v in trees.items()}
        return nested | {k: _plain(v) for k, v in others.items()}
    out: dict[str, Any] = {}
    for name, leaves in trees.items():
        out |= {_key(name, spec, i): v for i, v in zip(spec.kept, leaves, strict=True)}
    return out | {k: _plain(v) for k, v in others.items() if _is_set(v)}


def load_dict(
    spec: Spec, d: Any, like: Statistics, *, finite: bool = True
) -> Statistics:
    """The statistics in a dict that `to_dict` gave.

    Args:
      spec: What the normalizer was made for.
      d: Nested or flat dict, arrays or lists.
      like: Statistics whose shapes it must have.
      finite: Whether to refuse NaN and infinity.

    Returns:
      Statistics of float64 NumPy arrays, lists of leaves for trees.

    Raises:
      TypeError: It is no mapping.
      ValueError: Something is missing, too many, or of another shape, or M2 and
        variance contradict each other.
    """
    if not is_mapping(d):
        raise TypeError(f"load_dict got {type(d).__name__}; expected to_dict's result.")
    d = {str(k): d[k] for k in d.keys()}
    if "count" not in d:
        raise ValueError(
            "count is missing: without it the next update would replace the statistics."
        )
    count = float64_array(d["count"], like.counter.shape, "count", minimum=0.0)
    skipped = float64_array(
        d.get("skipped", np.zeros(like.skipped.shape)),
        like.skipped.shape,
        "skipped",
        minimum=0.0,
    )
    leaves = partial(_leaves, spec, d, finite=finite)
    mean = leaves("mean", like.mean)
    from_variance: list[Any] = []
    if _is_in(d, "variance") or not _is_in(d, "M2"):
        variances = leaves("variance", like.M2, minimum=0.0)
        from_variance = [v * align_leading(count, v) for v in variances]
    if not _is_in(d, "M2"):  # other libraries store the variance
        return Statistics(mean, from_variance, count, skipped)
    M2 = leaves("M2", like.M2, minimum=0.0)
    if from_variance and np.all(count > 0):
        _refuse_unlike(spec, M2, from_variance)
    return Statistics(mean, M2, count, skipped)


def _is_in(d: dict[str, Any], name: str) -> bool:
    return any(key.split("/")[0] == name for key in d)


def _refuse_unlike(spec: Spec, M2: Sequence[Any], from_variance: Sequence[Any]) -> None:
    """Raise where M2 and the variance, times the count, say different things."""
    for i, a, b in zip(spec.kept, M2, from_variance, strict=True):
        if not np.allclose(a, b, rtol=1e-6, atol=0.0, equal_nan=True):
            key = _key("variance", spec, i)
            raise ValueError(
                f"{key!r} contradicts {_key('M2', spec, i)!r}, which is the variance "
                "times the count. Leave one of them out."
            )


def _leaves(
    spec: Spec,
    d: dict[str, Any],
    name: str,
    like: Sequence[Any],
    *,
    minimum: float = -np.inf,
    finite: bool,
) -> list[np.ndarray]:
    """The leaves of one tree, from the nested or the flat form."""
    found = flatten({name: d[name]}) if name in d else {}
    found |= {k: v for k, v in d.items() if k.startswith(name + "/")}
    wanted = {_key(name, spec, i): i for i in spec.kept}
    for key in wanted:
        if found.get(key) is None:
            raise ValueError(
                f"{key!r} is missing; expected {sorted(wanted)}, got "
                f"{sorted(found or d)}. The dict is of a normalizer with another "
                "`shape`, or of another library (see nnx_norm.interop)."
            )
    for key, value in found.items():
        if key not in wanted and value is not None:
            raise ValueError(
                f"{key!r} is not in the spec: {spec.describe()}. The dict is of a "
                "normalizer with another `shape` or `exclude`."
            )
    return [
        float64_array(found[key], v.shape, key, minimum=minimum, finite=finite)
        for key, v in zip(wanted, like, strict=True)
    ]


def _key(name: str, spec: Spec, i: int) -> str:
    path = path_name(keys_of(spec.paths[i]))
    return f"{name}/{path}" if path else name


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """One level of keys `a/b` out of nested dicts."""
    out: dict[str, Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if is_mapping(node):
            for key in node.keys():
                walk(node[key], (*path, str(key)))
        else:
            out[path_name(path)] = node

    walk(tree, ())
    return out


def _nest(spec: Spec, leaves: Sequence[Any]) -> Any:
    """Nested dicts with str keys, None where a leaf is excluded."""
    values = dict(zip(spec.kept, leaves, strict=True))
    root: dict[str, Any] = {}
    for i, (path, shape) in enumerate(zip(spec.paths, spec.shapes, strict=True)):
        if shape is None:
            continue
        *parents, last = ["", *(str(k) for k in keys_of(path))]
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = values.get(i)
    return root.get("", {})


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, tuple) and not value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
