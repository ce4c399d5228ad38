# SPDX-License-Identifier: Apache-2.0
"""The input of some steps ago: a ring buffer for each environment."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_norm.stateful import (
    FORGOTTEN,
    StatefulModule,
    StatefulModuleOutput,
    no_loss,
    refuse_forgotten,
)
from nnx_norm.tree import canonicalize, is_mapping


class Delay(StatefulModule):
    """The input of `k_steps` ago: `y[t] = x[t - k]`.

    The first `k_steps` outputs of an episode are filled with `initial_value`. For a
    normalizer behind the delay they are rows like others: put the normalizer ahead of
    the delay, or choose an `initial_value` that is usual for the data.

    The state is `{"buffer": tree of [B, k, *feat], "idx": int32 [B]}`: a ring for each
    environment with its own write pointer, so that they reset one by one. Mappings of
    every kind come out as dicts.

    Args:
      sample_input: An unbatched example of the input: a pytree of arrays or
        `jax.ShapeDtypeStruct`s `[*feat]`. Only shapes and dtypes are kept.
      k_steps: Number of steps, at least 1.
      initial_value: A number that every leaf's dtype can hold.

    Raises:
      TypeError: `k_steps` is no integer, `initial_value` no number, or a leaf of
        `sample_input` no array.
      ValueError: `k_steps` is less than 1, or a leaf can't hold `initial_value`; in a
        call, a leaf doesn't fit its buffer in shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm.modules import Delay
      >>> delay = Delay(jnp.zeros(()), k_steps=2)
      >>> state, seen = delay.initialize_state(1), []
      >>> for x in [1.0, 2.0, 3.0, 4.0]:
      ...     out = delay(state, jnp.array([x]))
      ...     state = out.next_state
      ...     seen += out.output.tolist()
      >>> seen
      [0.0, 0.0, 1.0, 2.0]
    """

    def __init__(
        self, sample_input: Any, k_steps: int, initial_value: float = 0.0
    ) -> None:
        self.k_steps = _whole(k_steps, "k_steps", least=1)
        # NaN differs from itself, but not inside a tuple: equal delays stay equal.
        self._initial_value = (_as_number(initial_value),)
        # Leaves and structure apart: hashable, so that equal delays share a trace.
        paths, self._treedef = jax.tree.flatten_with_path(canonicalize(sample_input))
        self._specs = tuple(_as_spec(leaf, _at("sample_input", p)) for p, leaf in paths)
        for (path, _), spec in zip(paths, self._specs, strict=True):
            if not _holds(spec.dtype, self.initial_value):
                raise ValueError(
                    f"{_at('sample_input', path)} has dtype {spec.dtype}, which can't "
                    f"hold initial_value={self.initial_value}; choose one it can."
                )

    @property
    def initial_value(self) -> Any:
        """What the first `k_steps` outputs of an episode are filled with."""
        return self._initial_value[0]

    def initialize_state(self, batch_size: int) -> dict[str, Any]:
        """Buffers full of `initial_value`.

        Args:
          batch_size: Number of environments, B.

        Returns:
          `{"buffer": tree of [B, k, *feat], "idx": int32 [B]}`.

        Raises:
          TypeError: `batch_size` is no integer.
          ValueError: It is negative.
        """
        batch_size = _whole(batch_size, "batch_size", least=0)
        lead = (batch_size, self.k_steps)
        buffers = [self._filler((*lead, *s.shape), s.dtype) for s in self._specs]
        buffer = jax.tree.unflatten(self._treedef, buffers)
        return {"buffer": buffer, "idx": jnp.zeros(batch_size, jnp.int32)}

    def reset_state(self, prev_state: dict[str, Any]) -> dict[str, Any]:
        """Buffers full of `initial_value` again, of the shapes in `prev_state`."""
        idx, buffers = self._opened(prev_state)
        fresh = [self._filler(b.shape, b.dtype) for b in buffers]
        buffer = jax.tree.unflatten(self._treedef, fresh)
        return {"buffer": buffer, "idx": jnp.zeros_like(idx)}

    def __call__(
        self, state: Any, x: Any = FORGOTTEN, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Reads the oldest entry, and writes `x` in its place; see `StatefulModule`."""
        refuse_forgotten(self, x)
        idx, buffers = self._opened(state)
        if idx.ndim != 1:
            raise ValueError(
                f"Delay: state['idx'] has shape {idx.shape}; expected (B,), as "
                "initialize_state(batch_size) makes it. One environment alone goes "
                "through jax.vmap, or has B = 1."
            )
        inputs = self._inputs(x, buffers)
        oldest = [jax.vmap(lambda b, i: b[i])(b, idx) for b in buffers]
        put = jax.vmap(lambda b, i, new: b.at[i].set(new))
        newest = [put(b, idx, new) for b, new in zip(buffers, inputs, strict=True)]
        next_state = {
            "buffer": jax.tree.unflatten(self._treedef, newest),
            "idx": (idx + 1) % self.k_steps,
        }
        output = jax.tree.unflatten(self._treedef, oldest)
        return StatefulModuleOutput(next_state, output, no_loss(), {}, rollout_extras)

    def _filler(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.full(shape, np.asarray(self.initial_value).astype(dtype))

    def _opened(self, state: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Pointers and buffers of a state, of all environments or of one."""
        if not is_mapping(state) or {*state.keys()} != {"buffer", "idx"}:
            came = f"a {type(state).__name__}"
            came += f" of {list(state.keys())}" if is_mapping(state) else ""
            raise TypeError(
                f"Delay: state is {came}; expected a dict of 'buffer' and 'idx', as "
                "initialize_state(batch_size) makes it. The state comes ahead of x."
            )
        idx, named = (
            state["idx"],
            self._named_leaves(state["buffer"], "state['buffer']"),
        )
        lead = jnp.shape(idx)
        if len(lead) > 1 or not jnp.issubdtype(jnp.asarray(idx).dtype, jnp.integer):
            raise ValueError(
                f"Delay: state['idx'] is {jnp.asarray(idx).dtype} of shape {lead}; "
                "expected integers of shape (B,), as initialize_state makes them."
            )
        for (where, buffer), spec in zip(named, self._specs, strict=True):
            if buffer.shape != (*lead, self.k_steps, *spec.shape):
                raise ValueError(
                    f"Delay: {where} has shape {buffer.shape}; expected "
                    f"{(*lead, self.k_steps, *spec.shape)}: state['idx'] has {lead}, "
                    "and each environment's part is made by initialize_state."
                )
        return jnp.asarray(idx), [buffer for _, buffer in named]

    def _inputs(self, x: Any, buffers: list[jax.Array]) -> list[jax.Array]:
        """The leaves of `x`, if each fits a slot of its buffer: `[B, *feat]`."""
        named = self._named_leaves(canonicalize(x), "x")
        for (where, leaf), buffer in zip(named, buffers, strict=True):
            slot = (buffer.shape[0], *buffer.shape[2:])
            if (leaf.shape, leaf.dtype) != (slot, buffer.dtype):
                raise ValueError(
                    f"Delay: {where} is {leaf.dtype} of shape {leaf.shape}; the buffer "
                    f"takes {buffer.dtype} of shape {slot}, from sample_input and "
                    "batch_size. Cast or reshape it, or build the Delay from such an x."
                )
        return [leaf for _, leaf in named]

    def _named_leaves(self, tree: Any, root: str) -> list[tuple[str, jax.Array]]:
        leaves, treedef = jax.tree.flatten_with_path(tree)
        if treedef != self._treedef:
            raise ValueError(
                f"Delay: {root} has the structure {treedef}; expected {self._treedef}, "
                "that of sample_input."
            )
        return [(_at(root, path), jnp.asarray(leaf)) for path, leaf in leaves]


def _whole(value: Any, name: str, *, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; expected an integer.")
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least}.")
    return operator.index(value)


def _as_spec(leaf: Any, where: str) -> jax.ShapeDtypeStruct:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"{where} is {leaf!r}; expected an array or a jax.ShapeDtypeStruct, "
            "such as jnp.zeros(3) for three features."
        )
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _as_number(value: Any) -> Any:
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "biuf":
        raise TypeError(f"initial_value is {value!r}; expected one real number.")
    return math.nan if number != number else number.item()  # one NaN for all


def _holds(dtype: Any, value: Any) -> bool:
    with np.errstate(all="ignore"):
        cast = np.asarray(value).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return bool(np.isfinite(cast) == np.isfinite(value))
    return bool(cast == value)


def _at(root: str, path: Any) -> str:
    return root + jax.tree_util.keystr(path)
