# SPDX-License-Identifier: Apache-2.0
"""What to ask of a model whose state came from outside: a checkpoint, another run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_norm.inspection import normalizers
from nnx_norm.returns import RunningReturn
from nnx_norm.rewards import RewardNormalizer
from nnx_norm.samples import align_leading
from nnx_norm.statistics import NormalizerStatistics, RunningStatistics
from nnx_norm.tree import keys_of, path_name

Shapes = dict[str, tuple[int, ...]]

VARIANCE_ROUNDING = 1e-6
"""How far below zero a variance may lie that was computed elsewhere, as E[x^2] - m^2:
less than the ports' epsilon, so that nothing comes of it."""

RETURNS = {"running_return", "discounted_reward", "discounted_residual"}


def check_statistics(model: nnx.Module) -> None:
    """Raise unless every normalizer in a model holds statistics that can be true.

    Call it on the host after a restore and `nnx.update`. Checkpoint libraries cast
    what has another dtype, leave placeholders where a partial restore found nothing,
    and know nothing of what belongs together; the first update would replace a mean
    whose count was lost, or go on with a counter that stalls at 256. A residual that
    can't be its value's is none of that: it counts as zero wherever it is read.

    Args:
      model: Any module; the normalizers in it are found, the ports and the running
        returns too. Values are fetched from their devices; of what is split over
        processes each looks at its part.

    Raises:
      TypeError: `model` is no module but a state, say.
      ValueError: All that is wrong, a line each with its path: a Variable that holds
        no array, another dtype than float32 or another shape than its normalizer's;
        NaN or infinity (but for `nonfinite="propagate"` and in the ports, which let
        both in; a count is finite in all of them); a negative count or variance; a
        count of 0 beside a mean or variance that isn't.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm import Normalizer, Sequential
      >>> model = Sequential([Normalizer(2)])
      >>> check_statistics(model)  # nothing seen, nothing wrong
      >>> model.layers[0].mean.set_value(jnp.float32([1, 1]))  # without its counter
      >>> check_statistics(model)
      Traceback (most recent call last):
      ValueError: The statistics can't be used:
        layers/0: counter is 0 where mean is not: without samples there is none.
    """
    found: list[str] = []
    for path, module in normalizers(model).items():
        where = path or type(module).__name__
        found += [f"  {where}: {told}" for told in _problems(module)]
    if found:
        raise ValueError("\n".join(["The statistics can't be used:", *found]))


def _problems(module: Any) -> list[str]:
    """What is wrong with one module's Variables, the coarsest first."""
    kinds = NormalizerStatistics | RunningReturn
    variables = {k: v for k, v in vars(module).items() if isinstance(v, kinds)}
    trees = {name: variable.get_value() for name, variable in variables.items()}
    for find in (_no_statistics, _misshapen, _impossible):
        if told := list(find(module, trees)):
            return told
    return []


def _no_statistics(module: Any, trees: dict[str, Any]) -> Iterator[str]:
    """Leaves that are no float32 arrays."""
    if isinstance(module, RewardNormalizer):  # which knows another word for none yet
        raw = nnx.Variable.get_value(module.running_return)
        if raw is None:
            yield "running_return holds None; expected an array."
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        where = path_name(keys_of(path))
        if not isinstance(leaf, jax.Array | np.ndarray):
            yield f"{where} holds {type(leaf).__name__}; expected an array."
        elif leaf.dtype != np.float32:
            yield f"{where} is {leaf.dtype}; expected float32: it was cast."


def _misshapen(module: Any, trees: dict[str, Any]) -> Iterator[str]:
    """Variables of other trees or shapes than the module's, or than each other."""
    shapes = {name: _shapes(tree) for name, tree in trees.items()}
    count, second = _names(module)
    (members,) = shapes[count].values()
    wanted = shapes["mean"]  # whatever it is: the ports have no spec
    if isinstance(module, RunningStatistics):
        empty = [np.empty((*members, *shape)) for shape in module.spec.features]
        wanted = _shapes(module.spec.unflatten(empty))
        yield from _unlike("skipped", shapes["skipped"], {"": members})
    yield from _unlike("mean", shapes["mean"], wanted)
    yield from _unlike(second, shapes[second], wanted)
    statistics = {k: trees[k] for k in ("mean", second, count, "skipped") if k in trees}
    for name in {"residual", "tail"} & set(trees):
        yield from _unlike(name, shapes[name], _shapes(statistics))
    for name in RETURNS & set(trees):
        axis = len(members)  # behind it: one return per environment
        rest = {k: (*v[:axis], *v[axis + 1 :]) for k, v in shapes[name].items()}
        sizes = {v[axis : axis + 1] for v in shapes[name].values()}
        if trees[name] is not None and (rest != wanted or len(sizes) > 1):
            yield (
                f"{name} has the shapes {shapes[name]}; expected those of mean, "
                f"{wanted}, with one axis of environments before the features."
            )


def _impossible(module: Any, trees: dict[str, Any]) -> Iterator[str]:
    """Values that no samples have."""
    count, second = _names(module)
    for name in ("M2", count, "skipped"):
        leaves = _named(trees.get(name))
        yield from (f"{_at(name, k)} is negative." for k, v in leaves if np.any(v < 0))
    for path, var in _named(trees.get("var")):  # where rounding elsewhere may show
        if np.any(var < -VARIANCE_ROUNDING):
            yield f"{_at('var', path)} is negative."
    counts = {k: v for k, v in trees.items() if k in (count, "skipped")}
    for path, leaf in _named(counts):
        if not np.all(np.isfinite(leaf)):
            yield f"{path} is not finite."
    if getattr(module, "nonfinite", None) == "skip":
        trees = {k: v for k, v in trees.items() if k not in counts}
        for path, leaf in _named(trees):
            if not np.all(np.isfinite(leaf)):
                yield f"{path} is not finite."
    number = np.asarray(counts[count])
    for name in ("mean", second) if isinstance(module, RunningStatistics) else ():
        for path, leaf in _named(trees[name]):
            if np.any((align_leading(number, leaf) == 0) & (leaf != 0)):
                yield (
                    f"{count} is 0 where {_at(name, path)} is not: without samples "
                    "there is none."
                )


def _names(module: Any) -> tuple[str, str]:
    """The names of the count and of the second moment."""
    own = isinstance(module, RunningStatistics)
    return ("counter", "M2") if own else ("count", "var")


def _unlike(name: str, found: Shapes, wanted: Shapes) -> Iterator[str]:
    if found != wanted:
        yield f"{name} has the shapes {found}; expected {wanted}."


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Leaves by the names of their paths, as NumPy arrays; several of a split one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (path_name(keys_of(path)), np.asarray(part))
        for path, leaf in leaves
        for part in _parts(leaf)
    ]


def _parts(leaf: Any) -> list[Any]:
    """A leaf, or what this process has of one that is split over several."""
    split = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if split and not leaf.is_fully_replicated:
        return [shard.data for shard in leaf.addressable_shards]
    return [leaf]


def _shapes(tree: Any) -> Shapes:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(keys_of(path)): np.shape(leaf) for path, leaf in leaves}


def _at(*names: str) -> str:
    return "/".join(name for name in names if name)
