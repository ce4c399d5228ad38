# SPDX-License-Identifier: Apache-2.0
"""Processes of `jax.distributed`: local rollouts to global arrays, and back.

Every process runs the same program over the same mesh; each has environments of its
own. `global_arrays` makes one array `[T, B, ...]` of the rollouts `[T, B_local, ...]`
of all, after which an update is the one of a single process. What is only to be united
outside jit, moments, is `distributed.all_reduce_processes`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from nnx_norm.distributed import refuse_unequal
from nnx_norm.transfer import digest, spans_processes

PyTree = Any


def global_arrays(
    local: PyTree, placement: Mesh | NamedSharding, *, axis: int = 1
) -> PyTree:
    """One global array per leaf out of what every process has of it.

    Every process calls it at the same point. Structure, shapes and dtypes are compared
    first, so that all refuse at once: JAX alone would go on with a wrong number of
    samples, or wait for ever. In one process it is a `jax.device_put`.

    Args:
      local: Tree of arrays, usually a rollout `[T, B_local, ...]` (and its masks).
      placement: A mesh over the devices of all processes, over all of whose axes
        `axis` is split; or a sharding for every leaf, which must give every process
        a part of its own.
      axis: The axis that grows, `B`; used with a mesh.

    Returns:
      The tree with leaves `[T, B, ...]`, where `B` is the sum of all `B_local`: the
      samples of process 0 first if the mesh has its devices first.

    Raises:
      TypeError: A leaf holds no numbers, or `placement` is something else.
      ValueError: Processes differ, or the sharding doesn't fit. It is raised on every
        process, and names leaf and shapes.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
      >>> history = global_arrays({"goal": np.ones((5, 16, 3))}, mesh)
      >>> history["goal"].shape, history["goal"].sharding.spec[1]
      ((5, 16, 3), 'devices')
    """
    sharding: Any = (
        _split(placement, axis) if isinstance(placement, Mesh) else placement
    )
    given, treedef = tree_flatten_with_path(local)
    found = {f"local{keystr(path)}": _told(leaf) for path, leaf in given}
    fits = isinstance(sharding, NamedSharding)
    where = f"{sharding.spec} over {dict(sharding.mesh.shape)}" if fits else sharding
    refuse_unequal(found | {"placement": str(where)})
    if not fits:
        raise TypeError(
            f"placement is {placement!r}; expected a Mesh over the devices of all "
            "processes, or a NamedSharding(mesh, spec)."
        )
    leaves = [leaf for _, leaf in given]
    for name, leaf in zip(found, leaves, strict=True):
        _refuse(leaf, name, len(sharding.spec))
    arrays = [
        _placed(leaf, sharding, name) for name, leaf in zip(found, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


def local_arrays(tree: PyTree) -> PyTree:
    """This process's part of global arrays: the way back from `global_arrays`.

    For a state, to go on without the other processes: what is replicated, such as
    statistics after an update, comes whole, and what is split over environments, such
    as running returns, for this process's. All of it lies on this process's devices of
    the mesh. Write it back with `nnx.update(model, local_arrays(nnx.state(model)))`.

    Args:
      tree: Tree of arrays, global or not.

    Returns:
      The tree; leaves that this process holds alone are returned as they are.

    Raises:
      ValueError: A leaf lies on several processes in another way than by a
        `NamedSharding`.

    Example:
      >>> local_arrays(jnp.ones(2)).tolist()
      [1.0, 1.0]
    """

    def own(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        sharding = leaf.sharding
        mesh = getattr(sharding, "mesh", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(mesh, Mesh):
            raise ValueError(
                f"local_arrays got a leaf{keystr(path)} with {sharding}; expected a "
                "NamedSharding, as global_arrays gives it."
            )
        return multihost_utils.global_array_to_host_local_array(
            leaf, mesh, sharding.spec
        )

    return jax.tree_util.tree_map_with_path(own, tree)


def refuse_local(samples: PyTree, statistics: PyTree, name: str) -> None:
    """Raise where a process would fold its own samples into the statistics of all.

    JAX takes them for the same on every process, and goes on with other numbers on
    each. Inside jit nobody can tell.

    Args:
      samples: Arrays to fold.
      statistics: What they are folded into.
      name: What the samples are called in the message.

    Raises:
      ValueError: The statistics lie on several processes, and samples don't.
    """
    if not spans_processes(statistics):
        return
    for leaf in jax.tree.leaves(samples):
        if not isinstance(leaf, Tracer) and not spans_processes(leaf):
            raise ValueError(
                f"{name} of shape {np.shape(leaf)} is this process's alone, and the "
                "statistics lie on several processes, which would drift apart. Make "
                f"it {name} of all with global_arrays; or go on alone, with "
                "nnx.update(model, local_arrays(nnx.state(model)))."
            )


def refuse_apart(new: PyTree, statistics: PyTree) -> None:
    """Raise on every process if they are about to store or to merge other values.

    Args:
      new: Concrete values to store or to merge, of this process.
      statistics: What they go into.

    Raises:
      ValueError: The statistics lie on several processes, and `new` isn't the same on
        all of these.
    """
    if spans_processes(statistics):
        found = {"statistics to take": f"some of digest {digest(new)}"}
        refuse_unequal(
            found,
            hint="Statistics that lie on several processes take the same on each, at "
            "the same point. Unite what each has with all_reduce_processes, or send "
            "it to the others.",
        )


def _split(mesh: Mesh, axis: int) -> NamedSharding:
    """`axis` over all axes of a mesh."""
    names = mesh.axis_names
    split = names[0] if len(names) == 1 else names
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, split))


def _told(leaf: Any) -> str:
    """Dtype and shape of a leaf, or its type: never raises, others wait for it."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return f"an array that is global already, {leaf.dtype} {leaf.shape}"
    if isinstance(leaf, (bool, int, float)):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return f"{dtype} {tuple(leaf.shape)}"


def _refuse(leaf: Any, name: str, ndim: int) -> None:
    """Raise for what can't be split over processes."""
    dtype = getattr(leaf, "dtype", None)
    numbers = dtype is not None and (
        jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    )
    if not numbers or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        raise TypeError(f"{name} is {_told(leaf)}; expected a local array of numbers.")
    if np.ndim(leaf) < ndim:
        raise ValueError(
            f"{name} has shape {np.shape(leaf)}; expected {ndim} axes or more, usually "
            "(T, B_local, ...): there is no axis to split over the processes."
        )


def _placed(leaf: Any, sharding: NamedSharding, name: str) -> jax.Array:
    """The global array of one leaf."""
    # A copy of NumPy arrays: JAX may go on using their memory, where the next rollout
    # is written.
    own = np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
    if jax.process_count() > 1:
        own = np.asarray(own)
    try:
        placed = jax.make_array_from_process_local_data(sharding, own)
    except ValueError as error:
        raise ValueError(
            f"{name} has shape {np.shape(leaf)}, which {sharding.spec} over "
            f"{dict(sharding.mesh.shape)} can't split: {error}"
        ) from error
    sizes = zip(placed.shape, np.shape(leaf), strict=True)
    parts = math.prod(whole // part for whole, part in sizes if part)
    if parts != jax.process_count() and placed.size:
        raise ValueError(
            f"{name} of shape {np.shape(leaf)} becomes one of shape {placed.shape} by "
            f"{sharding.spec} over {dict(sharding.mesh.shape)}; expected an array "
            f"{jax.process_count()} times as large, with a part for every process. "
            "Use a mesh over the devices of all processes, and shard an axis over it."
        )
    return placed
