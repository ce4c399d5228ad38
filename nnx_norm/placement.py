# SPDX-License-Identifier: Apache-2.0
"""Where statistics lie on a mesh: `place` puts them there once, updates keep them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from nnx_norm.distributed import refuse_unequal
from nnx_norm.returns import RunningReturn
from nnx_norm.statistics import NormalizerStatistics
from nnx_norm.transfer import digest, moved

Model = TypeVar("Model", bound=nnx.Module)
Axes = str | tuple[str, ...] | None
Shape = tuple[int, ...]
Found = tuple[tuple[Any, ...], nnx.Variable, int]


def place(
    model: Model,
    mesh: Mesh,
    *,
    environments: Axes = None,
    features: str | PartitionSpec | None = None,
) -> Model:
    """Put the statistics in a model on a mesh, as updates will leave them.

    Fresh statistics lie on one device. The first update with a history sharded over a
    mesh leaves them on all, and the second then compiles anew; placed statistics come
    back from every update as they went in. The names are those of the history's
    sharding: one `P(None, "data", "model")` asks for `environments="data"` and
    `features="model"`. Call it outside jit, again after statistics came from elsewhere
    (a port's state dict, a restore onto other devices). On a mesh over several
    processes every process calls it, and all refuse where one has other values or
    settings, or places them elsewhere; only what is split over processes already isn't
    compared.
    Parameters and what else is in the model stay where they are.

    Args:
      model: Any module with normalizers (ports, rewards) in it, or the abstract one of
        `nnx.eval_shape`, which becomes a template to restore into.
      mesh: The mesh that histories are sharded over, Auto or Explicit.
      environments: Mesh axis, or axes, that environments are split over: running
        returns are then, too. None replicates them, which an update on an Auto mesh
        undoes where the rewards are split.
      features: Mesh axis that the first feature axis is split over, or the
        `PartitionSpec` of all feature axes, for very wide observations: what has
        features is split like them. A leaf with fewer axes, or that it doesn't divide,
        stays replicated, as everything does with None.

    Returns:
      `model`, changed in place.

    Raises:
      TypeError: `mesh` is none, or this is inside a jit.
      ValueError: The mesh has no such axis, or it doesn't divide the environments, or
        processes differ. Nothing has changed then.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm import Normalizer, RewardNormalizer
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> norm = place(Normalizer({"goal": 3}), mesh)
      >>> len(norm.mean.get_value()["goal"].sharding.device_set) == jax.device_count()
      True
      >>> rewards = RewardNormalizer(0.99, num_envs=8 * jax.device_count())
      >>> rewards = place(rewards, mesh, environments="devices")
      >>> rewards.running_return.get_value().sharding.spec[0]
      'devices'
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is {type(mesh).__name__}; expected a Mesh, such as "
            'jax.make_mesh((jax.device_count(),), ("devices",)).'
        )
    found = list(_variables(model))
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        _refuse_others(
            found,
            model,
            mesh=_told(mesh),
            environments=repr(environments),
            features=repr(features),
        )
    spec = PartitionSpec(features) if isinstance(features, str) else features
    axes = () if spec is None else tuple(spec)
    _refuse_unknown(mesh, environments=environments, features=axes)
    # Other kinds, such as a ledger's numbers, have neither features nor environments.
    chosen = {
        NormalizerStatistics: partial(_split_features, mesh, axes),
        RunningReturn: partial(_split_environments, mesh, environments),
    }
    moved = [
        (variable, _on(mesh, variable, path, members, chosen.get(type(variable))))
        for path, variable, members in found
    ]
    for variable, value in moved:
        variable.set_value(value)
    return model


def _variables(model: nnx.Module) -> Iterator[Found]:
    """Statistics and running returns, with paths and the number of member axes."""
    nodes = list(nnx.iter_graph(model))
    owners = {path: node for path, node in nodes if isinstance(node, nnx.Module)}
    for path, node in nodes:
        if isinstance(node, (NormalizerStatistics, RunningReturn)):
            beside = vars(owners.get(path[:-1], node))
            # A scalar but for a population's; so named in normalizers and in ports.
            counter = beside.get("counter", beside.get("count"))
            known = isinstance(counter, nnx.Variable)
            yield path, node, np.ndim(counter.get_value()) if known else 0


def _on(
    mesh: Mesh,
    variable: nnx.Variable,
    path: tuple[Any, ...],
    members: int,
    split: Callable[[Shape, str], tuple[Any, ...]] | None,
) -> Any:
    """The value of one Variable with every leaf on the mesh, whole without `split`."""

    def move(keys: Any, leaf: Any) -> Any:
        name = _named(path, keystr(keys))
        if isinstance(leaf, Tracer):
            raise TypeError(f"place got a traced {name}; call it outside jit.")
        entries = (None,) * members
        entries += split(tuple(leaf.shape[members:]), name) if split else ()
        spec = _as_jax_writes(mesh, entries, len(leaf.shape))
        return moved(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(move, variable.get_value())


def _named(path: tuple[Any, ...], inside: str) -> str:
    """What something inside a module or Variable is called in messages."""
    return (".".join(map(str, path)) + inside).removeprefix(".")


def _refuse_others(found: list[Found], model: nnx.Module, **arguments: str) -> None:
    """Raise on every process where one has another model, or places it elsewhere.

    It would stay apart from the others, or wait for them in another program.
    """
    told = dict(arguments)
    owners = {path[:-1] for path, _, _ in found}
    for path, node in nnx.iter_graph(model):
        if path in owners:
            told |= {_named(path, f".{k}"): v for k, v in _settings(node).items()}
    for path, variable, _ in found:
        leaves = jax.tree_util.tree_leaves_with_path(variable.get_value())
        for keys, leaf in leaves:
            bits = digest(leaf)
            rest = "" if bits is None else f" of digest {bits}"
            told[_named(path, keystr(keys))] = f"{leaf.dtype} {tuple(leaf.shape)}{rest}"
    refuse_unequal(
        told,
        hint="Start or restore every process alike, or send one's statistics to the "
        "others (to_dict, load_dict).",
    )


def _settings(module: Any) -> dict[str, str]:
    """What a module with statistics was made with, its spec, and whether it folds."""
    plain = (bool, int, float, str, tuple, type(None))
    told = {k: repr(v) for k, v in vars(module).items() if isinstance(v, plain)}
    spec = getattr(module, "spec", None)
    if spec is not None:
        told["spec"] = f"{spec.describe()} without {spec.excluded_names}"
    return told


def _told(mesh: Mesh) -> str:
    """A mesh in a message: shape, kinds and devices."""
    kinds = "/".join(sorted({kind.name for kind in mesh.axis_types}))
    devices = np.array([device.id for device in mesh.devices.flat])
    return f"{dict(mesh.shape)} ({kinds}) with devices of digest {digest(devices)}"


def _as_jax_writes(mesh: Mesh, entries: tuple[Any, ...], ndim: int) -> PartitionSpec:
    """The spec as a compiled function gives it to its results.

    `P()` and `P(None)` say the same and are two to the cache of compiled functions.
    """
    if AxisType.Explicit in mesh.axis_types:
        return PartitionSpec(*entries, *[None] * (ndim - len(entries)))
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def _split_features(
    mesh: Mesh, axes: tuple[Any, ...], shape: Shape, name: str
) -> tuple[Any, ...]:
    """How the feature axes of one leaf are split."""
    del name
    sizes = [_devices(mesh, axis) for axis in axes]
    fits = len(shape) >= len(sizes) and not any(
        size % parts for size, parts in zip(shape, sizes, strict=False)
    )
    return axes if fits else ()


def _split_environments(
    mesh: Mesh, axis: Axes, shape: Shape, name: str
) -> tuple[Any, ...]:
    """How running returns `[B, *shape]` are split."""
    if shape[0] % _devices(mesh, axis):
        raise ValueError(
            f"{name} has {shape[0]} environments; expected a multiple of the "
            f"{_devices(mesh, axis)} devices along {axis!r}."
        )
    return (axis,)


def _refuse_unknown(mesh: Mesh, **given: Any) -> None:
    """Raise for names that are no axes of the mesh."""
    for name, axes in given.items():
        unknown = [axis for axis in _names(axes) if axis not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"{name} names the axes {unknown}; the mesh has {mesh.axis_names}."
            )


def _names(axes: Any) -> list[Any]:
    """The axis names in an entry of a PartitionSpec, or in several."""
    if axes is None:
        return []
    if isinstance(axes, (tuple, list)):
        return [name for entry in axes for name in _names(entry)]
    return [axes]


def _devices(mesh: Mesh, axes: Any) -> int:
    """Number of parts that an entry of a PartitionSpec makes."""
    return math.prod(mesh.shape[name] for name in _names(axes))
