# SPDX-License-Identifier: Apache-2.0
"""Arrays between host, devices and processes: where a value lies, and who has it."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

PyTree = Any


class TracedError(jax.errors.TracerArrayConversionError):
    """What is read on the host is traced: JAX's error, which says what to do here."""

    def __init__(self) -> None:
        """Without the tracer, whose path JAX's own error would tell."""
        TypeError.__init__(
            self,
            "The statistics are traced here, and read on the host: count, to_dict "
            "and what copies or saves statistics belong outside of jit. Inside, "
            "read `counter`, `mean` and `M2`, or nnx_norm.metrics.",
        )


def on_host(tree: PyTree) -> PyTree:
    """A tree of NumPy arrays.

    Raises:
      TracedError: A leaf is traced.
      TypeError: A leaf is abstract.
      ValueError: A leaf is split over processes, so that none of them has all of it.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer):
            raise TracedError
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"The statistics are abstract, {leaf}: nnx.eval_shape gives shapes "
                "without values. Restore into it, and nnx.update the model with that."
            )
    if any(spans_processes(v) and not _has_all(v) for v in jax.tree.leaves(tree)):
        raise ValueError(
            "The statistics are split over processes, and none has all of them. "
            "Replicate them first: nnx_norm.place(model, mesh) on every process."
        )
    return jax.tree.map(np.asarray, jax.device_get(tree))


def placed_like(new: Any, old: Any) -> jax.Array:
    """`new` with the sharding of `old`, where both are concrete and that was chosen.

    Args:
      new: Array of JAX, or of NumPy that nobody else holds; the same on every process
        that `old` lies on.
      old: Array of JAX; or of NumPy, as a restored state may hold.

    Returns:
      An array of JAX.
    """
    if isinstance(new, Tracer) or isinstance(old, Tracer):
        return jnp.asarray(new)
    if spans_processes(old):
        return moved(new, old.sharding)
    # Unless somebody said where it belongs: committed to one device it would no longer
    # go with a history on a mesh. (`asarray` would compile a program for each shape.)
    chosen = getattr(old, "committed", False)
    return jax.device_put(new, old.sharding if chosen else None)


def copied_like(new: Any, old: Any) -> jax.Array:
    """A copy of `new`, in a buffer of its own, placed as `placed_like` does."""

    def lies(x: Any) -> Any:
        return getattr(x, "committed", False), getattr(x, "sharding", None)

    if isinstance(new, Tracer) or isinstance(old, Tracer) or lies(new) == lies(old):
        return jnp.copy(new)
    return placed_like(np.array(on_host(new)), old)


def moved(leaf: Any, sharding: Sharding) -> Any:
    """A leaf with another sharding; a leaf of another process's devices too.

    Args:
      leaf: Array of NumPy or JAX, or what `jax.eval_shape` gives for one.
      sharding: Where it shall lie.

    Returns:
      `leaf` itself if it lies there, else an array with a buffer of its own.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if getattr(leaf, "sharding", None) == sharding:
        return leaf
    if not _has_all(leaf):
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
    if spans_processes(leaf):
        leaf = leaf.addressable_data(0)
    # No device_put: it can't reach other processes' devices without asking them, and
    # shares the memory of what it is given. A copy: the memory may become a buffer.
    host = np.array(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i].copy())


def spans_processes(tree: PyTree) -> bool:
    """Whether a concrete array in a tree lies on devices of other processes, too."""
    return any(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(tree)
    )


def digest(tree: PyTree) -> str | None:
    """A short text for the bits of concrete arrays; None where a process lacks some.

    Example:
      >>> digest(np.zeros(2)) == digest(jnp.zeros(4, jnp.float32))
      True
    """
    leaves = jax.tree.leaves(tree)
    known = (np.ndarray, np.generic, jax.Array)
    if not all(isinstance(v, known) and _has_all(v) for v in leaves):
        return None
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    return hashlib.blake2b(bits, digest_size=6).hexdigest()


def _has_all(leaf: Any) -> bool:
    """Whether this process knows all values of a leaf."""
    if isinstance(leaf, Tracer):
        return False
    if not isinstance(leaf, jax.Array):
        return True
    return leaf.is_fully_addressable or leaf.is_fully_replicated
