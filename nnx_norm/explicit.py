# SPDX-License-Identifier: Apache-2.0
"""Explicit meshes, computed on as on automatic ones.

With `AxisType.Explicit`, `jax.make_mesh`'s default, an array's sharding is part of its
type, and operands of different ones don't go together: statistics that are whole and a
history whose features are split, a mask that is whole and a history split over
environments. Which of them users have is theirs to choose. So what is folded becomes
automatic at the door, where XLA brings operands together and adds up with all-reduces,
and the results get their type back: statistics stay where they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

PyTree = Any


def automatic(function: Callable[..., Any], *args: PyTree, like: PyTree) -> PyTree:
    """`function(*args)`, with the Explicit axes of a mesh as Auto ones inside.

    Call it inside jit. Without such a mesh, and inside `shard_map`, it does nothing.

    Args:
      function: Of arrays alone, to a tree of arrays.
      *args: Trees of arrays, None where there is none.
      like: A prefix of the tree of results, of arrays: results get their shardings. An
        array that lies on no mesh stands for a whole one.

    Returns:
      What `function` returns.

    Example:
      >>> import jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("features",))
      >>> split = NamedSharding(mesh, PartitionSpec("features"))
      >>> x = jax.device_put(jnp.ones(8 * jax.device_count()), split)
      >>> whole = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None)))
      >>> y = jax.jit(lambda *v: automatic(jnp.add, *v, like=whole))(x, whole)
      >>> jax.typeof(y).sharding.spec == PartitionSpec(None)
      True
    """
    mesh = _explicit_mesh(args)
    if mesh is None:
        return function(*args)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    shardings = jax.tree.map(lambda leaf: _on(mesh, leaf), like)
    inside = jax.sharding.auto_axes(function, axes=names, out_sharding=shardings)
    return inside(*args)


def features_of(x: jax.Array, lead: int) -> jax.ShapeDtypeStruct:
    """Stands for what is added up over the `lead` leading axes of an array.

    Args:
      x: Array `[*lead, *feat]`.
      lead: Number of leading axes.

    Returns:
      Shape, dtype and sharding `[*feat]`, for `automatic`'s `like`.

    Example:
      >>> import jax.numpy as jnp
      >>> features_of(jnp.ones((5, 2, 3)), 2).shape
      (3,)
    """
    kind = jax.typeof(x)
    mesh, spec = kind.sharding.mesh, kind.sharding.spec
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec(*spec[lead:]))
    return jax.ShapeDtypeStruct(kind.shape[lead:], kind.dtype, sharding=sharding)


def lies_on_explicit(x: Any) -> bool:
    """Whether the type of an array says how it lies on a mesh.

    Example:
      >>> import numpy as np
      >>> lies_on_explicit(np.ones(3))
      False
    """
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _explicit_mesh(tree: PyTree) -> AbstractMesh | None:
    """The mesh that arrays lie on, if it has axes to be made automatic."""
    for leaf in filter(lies_on_explicit, jax.tree.leaves(tree)):
        mesh = jax.typeof(leaf).sharding.mesh
        # What shard_map has cut stays cut.
        return None if AxisType.Manual in mesh.axis_types else mesh
    return None


def _on(mesh: AbstractMesh, leaf: Any) -> NamedSharding:
    """The sharding of a leaf that lies on this mesh, or a whole one."""
    kind = jax.typeof(leaf)
    whole = PartitionSpec(*[None] * kind.ndim)
    spec = kind.sharding.spec if lies_on_explicit(leaf) else whole
    return NamedSharding(mesh, spec)
