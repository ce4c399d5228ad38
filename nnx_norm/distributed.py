# SPDX-License-Identifier: Apache-2.0
"""Moments over devices: the one file that communicates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.tree_util import keystr

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
    point. Fold the result with `Normalizer.merge_from`, which takes `Moments` as they
    are, or with `RunningMeanStd.update_from_moments(m.mean, m.M2 / m.count, m.count)`.

    Args:
      batch: This process's moments; made inside `extended.double()` they keep their
        digits on the way. Never the running ones: their samples would be counted
        once per process.

    Returns:
      Moments of the union in float64 NumPy arrays, the same bits on every process.

    Raises:
      TypeError: `batch` is something else, such as a normalizer.
      ValueError: Leaves differ in number or shape between processes; every process
        raises it, naming them.

    Example:
      >>> from nnx_norm import Normalizer
      >>> m = all_reduce_processes(moments.from_batch(jnp.array([[0.0], [2.0]])))
      >>> norm = Normalizer(1)
      >>> norm.merge_from(m)
      >>> norm.count, norm.mean.get_value().tolist(), norm.M2.get_value().tolist()
      (2, [1.0], [2.0])
    """
    given, treedef = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [leaf for _, leaf in given]
    shapes = [np.shape(leaf) for leaf in leaves]
    found = {f"moments{keystr(p)}": f"{np.shape(leaf)}" for p, leaf in given}
    refuse_unequal({"type": type(batch).__name__} | found)
    if not isinstance(batch, Moments):
        raise TypeError(
            f"all_reduce_processes got {type(batch).__name__}; expected Moments, those "
            "of this process's samples, as moments.from_batch gives them."
        )
    with double():
        flat = np.concatenate([np.asarray(v, np.float64).ravel() for v in leaves])
        # As pairs of 32-bit words: float64 arrays don't travel with x64 off.
        table = gather_processes(flat.view(np.uint32)).view(np.float64)
        ends = np.cumsum([0, *(np.size(leaf) for leaf in leaves)])
        rows = [
            table[:, a:b].reshape(-1, *shape)
            for a, b, shape in zip(ends, ends[1:], shapes, strict=False)
        ]
        united = _reduce(jax.tree.unflatten(treedef, rows))
        return jax.tree.map(np.asarray, united)


_reduce = jax.jit(moments.reduce)  # one program: here the caller isn't compiled


def gather_processes(words: np.ndarray) -> np.ndarray:
    """Rows of all `jax.distributed` processes, outside jit.

    Args:
      words: This process's array `[N]` of numbers of 32 bits or less, as long on every
        process.

    Returns:
      NumPy array `[processes, N]`.

    Example:
      >>> gather_processes(np.array([1, 2], np.uint32)).tolist()
      [[1, 2]]
    """
    rows = multihost_utils.process_allgather(words)
    return np.ascontiguousarray(rows).reshape(jax.process_count(), -1)


ROLLOUTS = (
    "Give every process the same tree and as many environments; mask what is too many."
)


def refuse_unequal(found: dict[str, str], *, hint: str = ROLLOUTS) -> None:
    """Raise on every process where processes are not about to do the same.

    Without it they would go on with arrays of different shapes: with other numbers on
    each, or waiting for one another for ever.

    Args:
      found: What this process has, by name: for a leaf its shape.
      hint: What to do, the last line of the message.

    Raises:
      ValueError: Another process has something else; names it, and who has what.

    Example:
      >>> refuse_unequal({"history['goal']": "float32 (128, 64, 3)"})
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(list(found.items())).encode()
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint32)
    head = np.array([jax.process_index(), len(text)], np.uint32)
    heads = gather_processes(np.concatenate([head, digest]))
    if np.all(heads[:, 1:] == heads[0, 1:]):
        return
    words = -(-int(heads[:, 1].max()) // 4)  # as many for all
    texts = gather_processes(np.frombuffer(text.ljust(4 * words), np.uint32))
    told = {
        int(head[0]): dict(json.loads(row.tobytes()))
        for head, row in zip(heads, texts, strict=True)
    }
    raise ValueError(f"{_disagreement(told)}\n{hint}")


def _disagreement(told: dict[int, dict[str, str]]) -> str:
    """Which names stand for what on which processes."""
    lines = ["The processes differ; expected the same on every one:"]
    for name in dict.fromkeys(name for found in told.values() for name in found):
        ranks: dict[str, list[int]] = {}
        for rank, found in sorted(told.items()):
            ranks.setdefault(found.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            each = [f"{what} on {_processes(who)}" for what, who in ranks.items()]
            lines.append(f"  {name}: {', '.join(each)}")
    if len(lines) == 1:
        lines.append("  The leaves come in another order.")
    return "\n".join(lines)


def _processes(ranks: list[int]) -> str:
    """Their name in a message."""
    return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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
