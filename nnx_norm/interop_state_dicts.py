# SPDX-License-Identifier: Apache-2.0
"""State dicts of the PyTorch `RunningMeanStd` that the port follows, in and out."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from flax import nnx

from nnx_norm import arguments, sources, state_dicts
from nnx_norm.buffers import Buffers
from nnx_norm.lazy import LazyStatistics, saved_shapes, statistics_in
from nnx_norm.spec import Spec, parse
from nnx_norm.tree import keys_of

Model = TypeVar("Model", bound=nnx.Module)


def running_mean_std_from_state_dict(
    module: Model, state_dict: Any, prefix: str = ""
) -> Model:
    """Load the state dict of a PyTorch `RunningMeanStd`, or of a model with several.

    Takes over `mean`, `var` and `count` to the last digit of their float64 and int64,
    in place. Other entries are ignored; lazy modules take their shape from it. The
    source saves no running return, so that of a `RewardRunningMeanStd` stays.

    Args:
      module: A `RunningMeanStd`, or any module tree with some in it.
      state_dict: Mapping of names, `"obs_norm.mean"`, to arrays or tensors on any
        device; nested mappings do too.
      prefix: Where `module` stands in it: names are `prefix`, then the path in
        `module`, then `mean`, joined by dots.

    Returns:
      `module`.

    Raises:
      TypeError: The state dict is no mapping.
      ValueError: Statistics of `module` are missing, of another shape, or hold what
        they can't (a negative variance, a number beyond float32's range). Nothing has
        changed then.

    Example:
      >>> from nnx_norm import RunningMeanStd
      >>> saved = {"norm.mean": [0.1], "norm.var": [4.0], "norm.count": 2**40 + 1}
      >>> stats = running_mean_std_from_state_dict(RunningMeanStd(), saved, "norm")
      >>> stats.to_numpy().mean.tolist(), stats.to_numpy().count
      ([0.1], 1099511627777)
    """
    whole = state_dicts.nested(state_dict)
    root = state_dicts.find(whole, _keys(prefix))
    found = [
        (
            stats,
            *_loaded(stats, state_dicts.find(root, path), _name(prefix, path), whole),
        )
        for path, stats in statistics_in(module)
    ]
    if not found:
        raise ValueError(f"There is no RunningMeanStd in this {type(module).__name__}.")
    for stats, spec, buffers in found:
        stats._store(spec, buffers)
    return module


def running_mean_std_to_state_dict(
    module: nnx.Module, prefix: str = ""
) -> dict[str, np.ndarray]:
    """The statistics of a module as a PyTorch `RunningMeanStd` saves them.

    `torch.from_numpy` makes tensors of the arrays for `load_state_dict`. Modules whose
    shape is unknown are left out, as in the source.

    Args:
      module: A `RunningMeanStd`, or any module tree with some in it.
      prefix: What the names start with.

    Returns:
      Flat dict, `mean` and `var` of float64, `count` of int64 (of float64 if it is no
      whole number).

    Example:
      >>> from nnx_norm import RunningMeanStd
      >>> sorted(running_mean_std_to_state_dict(RunningMeanStd(2), "obs_norm"))
      ['obs_norm.count', 'obs_norm.mean', 'obs_norm.var']
    """
    out: dict[str, np.ndarray] = {}
    for path, stats in statistics_in(module):
        if stats.is_lazy:
            continue
        spec, full, name = stats._spec(), stats.to_numpy(), _name(prefix, path)
        for field, tree in (("mean", full.mean), ("var", full.var)):
            leaves = spec.flatten(tree, field)
            for keys, leaf in zip(_leaf_paths(spec), leaves, strict=True):
                out[".".join([*name, field, *keys])] = leaf
        out[".".join([*name, "count"])] = np.asarray(full.count)
    return out


def _loaded(
    stats: LazyStatistics, state: Any, name: list[str], whole: Any
) -> tuple[Spec, Buffers]:
    """The spec of statistics and what a state dict has for them, float64 NumPy."""
    where = ".".join([*name, "mean"])
    shapes = saved_shapes(state, "mean")
    if shapes is None:
        found = sources.holders(whole, {"mean", "var"})
        there = [".".join(path) for path in found] or "no prefix"
        raise ValueError(
            f"{where!r} is missing from the state dict. Give the prefix under which "
            "the module was saved, or load its parts one by one; there are such "
            f"statistics at {there}."
        )
    spec = parse(shapes) if stats.is_lazy else stats._spec()

    def leaves(field: str, minimum: float) -> list[np.ndarray]:
        tree = state_dicts.variable(state, field)
        out = []
        for keys, shape in zip(_leaf_paths(spec), spec.features, strict=True):
            at = ".".join([*name, field, *keys])
            out.append(_float64(state_dicts.find(tree, keys), shape, at, minimum))
        return out

    count = state_dicts.variable(state, "count")
    return spec, Buffers(
        leaves("mean", -np.inf),
        leaves("var", 0.0),
        _float64(count, (), ".".join([*name, "count"]), 0.0),
    )


def _float64(
    value: Any, shape: tuple[int, ...], where: str, minimum: float
) -> np.ndarray:
    if value is None:
        raise ValueError(f"{where!r} is missing from the state dict.")
    array = state_dicts.as_numpy(value)
    return arguments.float64_array(array, shape, where, minimum=minimum)


def _leaf_paths(spec: Spec) -> list[list[str]]:
    return [state_dicts.names(keys_of(spec.paths[i])) for i in spec.kept]


def _keys(prefix: str) -> list[str]:
    return [name for name in prefix.split(".") if name]


def _name(prefix: str, path: tuple[Any, ...]) -> list[str]:
    return [*_keys(prefix), *state_dicts.names(path)]
