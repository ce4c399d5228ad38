# SPDX-License-Identifier: Apache-2.0
"""Moments over devices: the one file that communicates."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from nnx_norm import moments
from nnx_norm.extended import double
from nnx_norm.moments import Moments

AxisName = str | Sequence[str]


def all_reduce(batch: Moments, axis_name: AxisName | None) -> Moments:
    """Moments of the samples of all devices along mapped axes.

    Every device writes its moments into its own row of a table of zeros; one psum
    makes the table whole, and every device merges the same rows in the same order.
    So there is one collective however many leaves, no cancellation however far the
    devices' means lie apart, and bit-identical results everywhere.

    Args:
      batch: This device's moments, leaves `[*feat]`. Never the running ones: their
        samples would be counted once per device.
      axis_name: Name or names of mapped axes (`jax.shard_map`, `jax.pmap`,
        `jax.vmap`); None returns `batch`.

    Returns:
      Moments of the union, the same on every device.

    Raises:
      ValueError: An axis is not bound here.

    Example:
      >>> def fold(x):
      ...     return all_reduce(moments.from_batch(x, axes=0), "devices")
      >>> x = jnp.array([[0.0, 0.0], [2.0, 2.0]])
      >>> m = jax.vmap(fold, axis_name="devices", out_axes=None)(x)
      >>> [float(v) for v in m]
      [1.0, 4.0, 4.0]

    References:
      Chan, Golub & LeVeque, *Algorithms for computing the sample variance*,
      The American Statistician 37(3), 1983 (the merge of the rows).
    """
    if axis_name is None:
        return batch
    return moments.reduce(gather(batch, axis_name))


def all_reduce_processes(batch: Moments) -> Moments:
    """Moments of the samples of all `jax.distributed` processes, outside jit.

    For rollouts that each process keeps to itself; every process calls it at the same
    point. Fold the result with `update_from_moments`, or `merge` it.

    Args:
      batch: This process's moments; made inside `extended.double()` they keep their
        digits on the way. Never the running ones: their samples would be counted
        once per process.

    Returns:
      Moments of the union in float64 NumPy arrays, the same bits on every process.

    Raises:
      ValueError: Leaves differ in number or shape between processes; every process
        raises it.

    Example:
      >>> m = all_reduce_processes(moments.from_batch(jnp.array([0.0, 2.0])))
      >>> [float(v) for v in m]
      [1.0, 2.0, 2.0]
    """
    leaves, treedef = jax.tree.flatten(batch)
    shapes = [np.shape(leaf) for leaf in leaves]
    digest = zlib.crc32(repr((str(treedef), shapes)).encode())
    if len(set(_from_processes(np.array([digest], np.uint32)).ravel().tolist())) > 1:
        raise ValueError(
            f"The moments have the shapes {shapes} on process {jax.process_index()} "
            "and others elsewhere; expected the same tree of shapes everywhere."
        )
    with double():
        flat = np.concatenate([np.asarray(v, np.float64).ravel() for v in leaves])
        # As pairs of 32-bit words: float64 arrays don't travel with x64 off.
        table = _from_processes(flat.view(np.uint32)).view(np.float64)
        ends = np.cumsum([0, *(np.size(leaf) for leaf in leaves)])
        rows = [
            table[:, a:b].reshape(-1, *shape)
            for a, b, shape in zip(ends, ends[1:], shapes, strict=False)
        ]
        united = moments.reduce(jax.tree.unflatten(treedef, rows))
        return jax.tree.map(np.asarray, united)


def _from_processes(words: np.ndarray) -> np.ndarray:
    """Rows of all processes `[processes, N]`, contiguous."""
    rows = multihost_utils.process_allgather(words)
    return np.ascontiguousarray(rows).reshape(jax.process_count(), -1)


def gather(tree: Any, axis_name: AxisName) -> Any:
    """Stack a small tree of numbers over mapped axes, with one psum.

    Unlike `lax.all_gather` the result is known to be replicated, so that it passes
    `shard_map`'s check with `out_specs=P()`.

    Args:
      tree: Tree of arrays `[*shape]`, the same shapes on every device.
      axis_name: Name or names of mapped axes.

    Returns:
      The tree with leaves `[devices, *shape]`, the same on every device.

    Raises:
      ValueError: An axis is not bound here.

    Example:
      >>> gather_all = jax.vmap(lambda x: gather(x, "i"), axis_name="i")
      >>> gather_all(jnp.array([1.0, 2.0])).tolist()
      [[1.0, 2.0], [1.0, 2.0]]
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    index, size = _position(names)
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    with double():  # one dtype for all, wide enough for every one of them
        flat = jnp.concatenate([v.reshape(-1).astype(jnp.float64) for v in leaves])
        row = (jnp.arange(size, dtype=jnp.int32) == index)[:, None]
        table = lax.psum(jnp.where(row, flat, 0.0), names)
        ends = [0]
        for v in leaves:
            ends.append(ends[-1] + v.size)
        rows = [
            table[:, a:b].reshape((size, *v.shape)).astype(v.dtype)
            for a, b, v in zip(ends, ends[1:], leaves, strict=False)
        ]
    return jax.tree.unflatten(treedef, rows)


def _position(names: tuple[str, ...]) -> tuple[jax.Array, int]:
    """Index of this device along the axes taken together, and their size."""
    index, size = jnp.zeros((), jnp.int32), 1
    for name in names:
        try:
            length = lax.axis_size(name)
        except NameError as error:
            raise ValueError(
                f"axis_name {name!r} is not bound here: call this inside "
                f"jax.shard_map, jax.pmap or jax.vmap with axis_name={name!r}, or make "
                "the normalizer with axis_name=None."
            ) from error
        index, size = index * length + lax.axis_index(name), size * length
    return index, size
