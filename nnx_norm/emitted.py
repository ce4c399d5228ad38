# SPDX-License-Identifier: Apache-2.0
"""Which normalizer of a model emitted what of its rollout extras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from nnx_norm.normalizer import Normalizer
from nnx_norm.routing import Container
from nnx_norm.tree import is_mapping, path_name

PyTree = Any


def by_normalizer(module: Any, extras: PyTree) -> dict[int, PyTree]:
    """The part of the extras that each `Normalizer` emitted.

    Args:
      module: Any module. Containers cut the extras as they do in an update. Any other
        knows itself what it does with them: it needs to hold one normalizer or
        container, whose extras these are, or the extras are a dict by path.
      extras: Rollout extras, or None.

    Returns:
      Parts by the id of the normalizer; those without any are left out.

    Raises:
      TypeError: Extras don't fit a container.
      ValueError: They don't, or nobody can tell whose they are.
    """
    whole = isinstance(module, Normalizer | Container)
    if extras is not None and not whole and not _takers(module):
        raise ValueError(
            f"extras are given, but the {type(module).__name__} holds no Normalizer, "
            "which could have emitted them."
        )
    return dict(_walk(module, extras))


def _walk(module: Any, extras: PyTree) -> Iterator[tuple[int, PyTree]]:
    if extras is None:
        return
    if isinstance(module, Normalizer):
        yield id(module), extras
        return
    takers = _takers(module)
    if not takers:
        return  # other modules in a policy graph emit what they like
    if given := _by_path(module, takers, extras):
        for path, part in given.items():
            yield from _walk(takers[path], part)
    elif isinstance(module, Container):
        parts = module._cut(extras, "extras")
        for key, child in module._children().items():
            yield from _walk(child, parts[key])
    else:
        yield from _walk(_only(module, takers), extras)


def _takers(module: Any) -> dict[str, Any]:
    """Normalizers and containers of some below a module, by their path in it."""
    found = list(nnx.iter_modules(module))
    own = [path for path, m in found if isinstance(m, Normalizer)]
    return {
        path_name(path): m
        for path, m in found
        if path
        and isinstance(m, Normalizer | Container)
        and any(tuple(p[: len(path)]) == tuple(path) for p in own)
    }


def _by_path(module: Any, takers: dict[str, Any], extras: Any) -> dict[str, Any]:
    """Extras that are a dict by path, as a dict; empty if they are no such thing."""
    if not is_mapping(extras) or not set(extras.keys()) & set(takers):
        return {}
    keys = set(extras.keys())
    if isinstance(module, Container) and keys == set(module._children()):
        return {}
    if strange := sorted(map(str, keys - set(takers))):
        raise ValueError(
            f"extras has {strange}; expected paths of normalizers and containers only: "
            f"{sorted(takers)}."
        )
    return {path: extras[path] for path in keys}


def _only(module: Any, takers: dict[str, Any]) -> Any:
    """The one normalizer or container in a module that is not below another."""
    outer = [p for p in takers if not any(p.startswith(f"{q}/") for q in takers)]
    if len(outer) != 1:
        raise ValueError(
            f"extras can't be told apart: a {type(module).__name__} holds the "
            f"normalizers and containers {sorted(outer)}; give a dict of their extras "
            "by path."
        )
    return takers[outer[0]]
