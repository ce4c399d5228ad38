# SPDX-License-Identifier: Apache-2.0
"""The policy graph: modules with a carried state, and containers that route.

A module gets its state, an input and, when a loss is replayed, what it emitted in
the rollout. A container cuts state and extras into one part per child, and hands the
parts down. Nothing here is written in a forward pass; `update_statistics` is the one
place where Variables change. All of it is structural: any object with the four
methods of `StatefulModule` is a child, whichever library it comes from.
"""

import abc
import contextlib
import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_norm.tree import canonicalize, is_mapping

_METHODS = ("__call__", "initialize_state", "reset_state", "update_statistics")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StatefulModuleOutput:
    """What one step of a module gives back; a pytree.

    Attributes:
      next_state: The state to pass in next time, of the structure that came in.
      output: The step's result, leaves `[B, *feat]`.
      regularization_loss: float32, scalar or `[B]`; add it to the loss.
      metrics: `[B]` arrays by name; containers nest them by child.
      rollout_extras: What the module wants back when the loss is replayed, and in
        `update_statistics`. None from a module that wants nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from nnx_norm.modules import StatefulModuleOutput
      >>> out = StatefulModuleOutput((), jnp.ones(2), jnp.float32(0), {})
      >>> out.replace(output=3.0).output
      3.0
      >>> float(jax.tree.map(lambda leaf: 2 * leaf, out).output.sum())
      4.0
    """

    next_state: Any
    output: Any
    regularization_loss: Any
    metrics: Any
    rollout_extras: Any = None

    def replace(self, **changes: Any) -> "StatefulModuleOutput":
        """A copy with some fields changed.

        Args:
          **changes: New values by field name.

        Returns:
          A new output; this one stays as it is.
        """
        return dataclasses.replace(self, **changes)


class StatefulModule(nnx.Module, abc.ABC):
    """A module with a state that the caller carries from step to step.

    There are two kinds of state. Variables (parameters, statistics) belong to the
    module and are only read in `__call__`. The carried state (a delay line, a hidden
    state) is passed in and out, every leaf with a leading axis of `batch_size`, and
    is reset with its environment.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm.modules import StatefulModule, StatefulModuleOutput
      >>> class Count(StatefulModule):
      ...     def initialize_state(self, batch_size):
      ...         return jnp.zeros(batch_size)
      ...     def reset_state(self, prev_state):
      ...         return jnp.zeros_like(prev_state)
      ...     def __call__(self, state, x, rollout_extras=None):
      ...         loss = jnp.zeros((), jnp.float32)
      ...         return StatefulModuleOutput(state + 1, x, loss, {}, rollout_extras)
      >>> count = Count()
      >>> out = count(count.initialize_state(2), jnp.ones((2, 3)))
      >>> out.next_state.tolist()
      [1.0, 1.0]
    """

    @abc.abstractmethod
    def __call__(
        self, state: Any, x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """One step. Writes nothing: it runs inside scan, grad, remat and cond.

        Args:
          state: The carried state, leaves `[B, ...]`.
          x: The input, leaves `[B, *feat]`.
          rollout_extras: None in a rollout or at inference: the module emits its
            extras. Anything else is what it emitted then, and the loss is being
            replayed: it goes back out untouched.

        Returns:
          The step's `StatefulModuleOutput`.
        """

    def initialize_state(self, batch_size: int) -> Any:
        """The state at the start of an episode.

        Args:
          batch_size: Number of environments: the leading axis of every leaf.

        Returns:
          `()` unless overridden.
        """
        del batch_size
        return ()

    def reset_state(self, prev_state: Any) -> Any:
        """The state at the start of the next episode.

        Args:
          prev_state: The state it replaces, or one environment's slice of it under
            `jax.vmap`: read shapes and dtypes here, not the batch size.

        Returns:
          A state of the same structure, shapes and dtypes: `prev_state` unless
          overridden.
        """
        return prev_state

    def update_statistics(self, rollout_extras: Any, *, mask: Any = None) -> None:
        """Folds a rollout into the statistics that the module owns; none by default.

        Args:
          rollout_extras: What the steps emitted, stacked: leaves `[T, B, *feat]`.
          mask: bool `[T, B]`, False where a step doesn't count. None: all count.
        """
        del rollout_extras, mask


class Lift(StatefulModule):
    """A stateless callable, or an `nnx` layer, as a module of the graph.

    State `()`, no extras, no loss. Containers lift plain callables by themselves.

    A layer's Variables are seen by `nnx` (training, checkpoints). A plain function is
    a static attribute, compared by identity: `jax.nn.tanh` is shared by all modules,
    a lambda made anew for each module compiles anew for each. Don't let it close over
    a module or over arrays: `nnx` can't see them there, and `jit` freezes them. A graph
    can be pickled if its functions can; jitted ones such as `jnp.tanh` need a `def`.

    Args:
      fn: Called as `fn(x)`: an `nnx` layer, a function or another hashable callable.

    Raises:
      TypeError: `fn` is not callable, is a class, is not hashable, or has a state.
      ValueError: In a call, if `fn` wrote Variables other than parameters, as
        `BatchNorm` and `Dropout` do until `fn.eval()`; the old values are back then.
        A method wrapped in `nnx.jit` or `nnx.remat` writes all it owns; wrap a
        function by `jax.checkpoint` instead.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from nnx_norm.modules import Lift
      >>> relu = Lift(jax.nn.relu)
      >>> relu((), jnp.array([-1.0, 2.0])).output.tolist()
      [0.0, 2.0]
    """

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        if isinstance(fn, type):
            raise TypeError(f"Lift got the class {fn.__name__}; pass an instance.")
        if _is_stateful(fn):
            raise TypeError(
                f"Lift got {_name(fn)}, which has a state: use it as it is."
            )
        if not callable(fn):
            raise TypeError(f"Lift got {_name(fn)}; expected a callable.")
        try:
            hash(fn)  # now, by its name, rather than at the first jit
        except TypeError as error:
            raise TypeError(
                f"Lift got {_name(fn)}, which is not hashable; wrap it in a function, "
                "or make it an nnx.Module."
            ) from error
        opaque = jax.tree_util.all_leaves([fn])
        self.fn = fn if opaque else nnx.data(fn)  # a Partial may carry arrays

    def __call__(
        self, state: Any, x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """`fn(x)`; see `StatefulModule`."""
        before = _snapshot(self)
        output = self.fn(x)
        if written := _restore(before, _snapshot(self), spare=nnx.Param):
            raise ValueError(
                f"Lift: {_name(self.fn)} wrote {', '.join(written)} in a forward pass, "
                "which only reads. Call its eval() first (BatchNorm, Dropout), or make "
                "it a StatefulModule that writes in update_statistics."
            )
        return StatefulModuleOutput(state, output, _no_loss(), {}, rollout_extras)


class _Container(StatefulModule):
    """Routes state, extras, metrics, losses and updates to children, by key."""

    _attribute: ClassVar[str]  # where the children are, for messages

    @abc.abstractmethod
    def _children(self) -> dict[Any, Any]:
        """The children by key, in order."""

    @abc.abstractmethod
    def _input(self, key: Any, x: Any, done: dict[Any, Any]) -> Any:
        """The input of a child, from that of the container and earlier outputs."""

    @abc.abstractmethod
    def _output(self, done: dict[Any, Any]) -> Any:
        """The output of the container, from the children's."""

    def _join(self, parts: dict[Any, Any]) -> Any:
        """One part per child, as state and extras hold them."""
        return parts

    def _cut(self, parts: Any, what: str) -> dict[Any, Any]:
        """The inverse of `_join`; `what` names the parts in an error."""
        if not is_mapping(parts):
            raise TypeError(self._misfit(what, _name(parts)))
        if set(parts.keys()) != set(self._children()):
            raise ValueError(self._misfit(what, f"a dict of {_keys(parts.keys())}"))
        return {key: parts[key] for key in parts.keys()}

    def _misfit(self, what: str, came: str) -> str:
        return (
            f"{type(self).__name__}: {what} is {came}; expected a dict of "
            f"{_keys(self._children())}, one part for each child."
        )

    def _at(self, key: Any) -> str:
        return f"{self._attribute}[{key!r}]"

    def __call__(
        self, state: Any, x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """One step of every child; see `StatefulModule`.

        A child whose part of the extras is None (it emitted none) can't tell a replay
        from a rollout; what it emits in a replay is dropped here.
        """
        replay = rollout_extras is not None
        states = self._cut(state, "state")
        extras = self._cut(rollout_extras, "rollout_extras") if replay else {}
        done: dict[Any, Any] = {}
        for key, child in self._children().items():
            with _located(self._at(key)):
                part = self._input(key, x, done)
                done[key] = child(states[key], part, extras.get(key))
        emitted = self._join({key: out.rollout_extras for key, out in done.items()})
        losses = [jnp.asarray(out.regularization_loss) for out in done.values()]
        return StatefulModuleOutput(
            next_state=self._join({key: out.next_state for key, out in done.items()}),
            output=self._output(done),
            regularization_loss=sum(
                (a.astype(jnp.float32) for a in losses), _no_loss()
            ),
            metrics={key: out.metrics for key, out in done.items()},
            rollout_extras=rollout_extras if replay else emitted,
        )

    def initialize_state(self, batch_size: int) -> Any:
        """The children's states, a list or dict like the children."""
        children = self._children().items()
        return self._join({k: c.initialize_state(batch_size) for k, c in children})

    def reset_state(self, prev_state: Any) -> Any:
        """The children's states, each reset by its child."""
        parts = self._cut(prev_state, "state")
        children = self._children().items()
        return self._join({k: c.reset_state(parts[k]) for k, c in children})

    def update_statistics(self, rollout_extras: Any, *, mask: Any = None) -> None:
        """Hands every child its part, and the mask if there is one.

        All or nothing: if a child refuses, those before it get their old values back.

        Args:
          rollout_extras: What the steps emitted, stacked.
          mask: Passed on when given. A child whose method takes none is called
            without it if it owns nothing but parameters and random keys.

        Raises:
          TypeError: The mask would get lost: a child takes none and owns other
            Variables. The message has its path.
          ValueError: The extras don't have one part for each child.
        """
        parts = self._cut(rollout_extras, "rollout_extras")
        if mask is not None:
            _refuse_losing_mask(self, "")
        before = _snapshot(self)
        try:
            for key, child in self._children().items():
                masked = mask is not None and _takes_mask(child)
                with _located(self._at(key)):
                    child.update_statistics(
                        parts[key], **({"mask": mask} if masked else {})
                    )
        except BaseException:
            _restore(before, _snapshot(self))
            raise


class Sequential(_Container):
    """Modules one after the other.

    State and extras are lists with a part for each layer; metrics are a dict by index.
    A normalizer behind a `Delay` also sees the delay's filler, as rows like others:
    put it ahead of the delay, or choose an `initial_value` that does no harm.

    Args:
      layers: Stateful modules and plain callables (see `Lift`), at least one.

    Raises:
      TypeError: A layer is neither, or `layers` is no sequence.
      ValueError: There are no layers; in a call, state or extras don't have one part
        for each of them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from nnx_norm.modules import Delay, Sequential
      >>> net = Sequential([Delay(jnp.zeros(2), k_steps=1), jnp.cos])
      >>> out = net(net.initialize_state(1), jnp.ones((1, 2)))
      >>> out.output.tolist()  # the delay line starts with zeros
      [[1.0, 1.0]]
      >>> len(net), type(net[0]).__name__, out.rollout_extras
      (2, 'Delay', [None, None])
    """

    _attribute: ClassVar[str] = "layers"

    def __init__(self, layers: Iterable[Any]) -> None:
        if is_mapping(layers) or not isinstance(layers, Iterable):
            raise TypeError(
                f"Sequential got {_name(layers)}; expected a list of modules."
            )
        children = [_as_module(m, f"layers[{i}]") for i, m in enumerate(layers)]
        if not children:
            raise ValueError("Sequential got no layers; expected at least one.")
        self.layers = nnx.List(children)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    def _children(self) -> dict[Any, Any]:
        return dict(enumerate(self.layers))

    def _input(self, key: Any, x: Any, done: dict[Any, Any]) -> Any:
        return done[key - 1].output if done else x

    def _output(self, done: dict[Any, Any]) -> Any:
        return done[len(done) - 1].output

    def _join(self, parts: dict[Any, Any]) -> Any:
        return list(parts.values())

    def _cut(self, parts: Any, what: str) -> dict[Any, Any]:
        if not isinstance(parts, list | tuple):
            raise TypeError(self._misfit(what, _name(parts)))
        if len(parts) != len(self.layers):
            raise ValueError(self._misfit(what, f"a list of {len(parts)}"))
        return dict(enumerate(parts))

    def _misfit(self, what: str, came: str) -> str:
        return (
            f"Sequential: {what} is {came}; expected a list of {len(self.layers)}, "
            "one part for each layer."
        )


class _Named(_Container):
    """Children by name, from a mapping or from keyword arguments."""

    _attribute: ClassVar[str] = "components"

    def __init__(
        self, components: Mapping[str, Any] | None = None, /, **children: Any
    ) -> None:
        name = type(self).__name__
        if components is not None and children:
            raise ValueError(f"{name} takes a dict or keyword arguments, not both.")
        given = children if components is None else components
        if not is_mapping(given):
            raise TypeError(f"{name} got {_name(given)}; expected a dict of modules.")
        if not given:
            raise ValueError(f"{name} got no components; expected at least one.")
        if odd := [key for key in given if not isinstance(key, str)]:
            raise TypeError(f"{name} got the keys {odd}; expected strings.")
        # nnx sorts the keys of a Dict whenever it goes through a transform.
        self._order = tuple(given)
        self.components = nnx.Dict(
            {key: _as_module(m, self._at(key)) for key, m in given.items()}
        )

    def _children(self) -> dict[Any, Any]:
        names = dict.fromkeys((*self._order, *self.components))
        return {name: self.components[name] for name in names}


class Parallel(_Named):
    """Modules side by side on the same input; a dict of their outputs.

    State, extras and metrics are dicts like the output. A normalizer in two of the
    branches (one object, twice) folds what each of them saw: every row counts double.
    To count it once put the normalizer ahead of both heads:
    `Sequential([normalizer, Parallel(actor=actor, critic=critic)])`.

    Args:
      components: Stateful modules and plain callables (see `Lift`) by name, if not
        given as keyword arguments.
      **children: The same.

    Raises:
      TypeError: A component is neither, or its name is no string.
      ValueError: There are none, or both ways are used; in a call, state or extras
        don't have one part for each of them.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm.modules import Parallel
      >>> heads = Parallel(actor=jnp.negative, critic=jnp.square)
      >>> out = heads(heads.initialize_state(1), jnp.array([[3.0]]))
      >>> {name: value.tolist() for name, value in out.output.items()}
      {'actor': [[-3.0]], 'critic': [[9.0]]}
    """

    def _input(self, key: Any, x: Any, done: dict[Any, Any]) -> Any:
        return x

    def _output(self, done: dict[Any, Any]) -> Any:
        return {key: out.output for key, out in done.items()}


class Concat(_Named):
    """A module for every entry of a dict; their outputs joined on the last axis.

    The outputs are joined in the order in which the components were given, also after
    transforms and checkpoints.

    Args:
      components: Stateful modules and plain callables (see `Lift`) by name, if not
        given as keyword arguments.
      **children: The same.

    Raises:
      TypeError: A component is neither, or its name is no string; in a call, the
        input is no dict.
      ValueError: There are none, or both ways are used; in a call, input, state or
        extras don't have one part for each of them, or the outputs can't be joined.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm.modules import Concat
      >>> join = Concat(pos=jnp.negative, goal=jnp.square)
      >>> x = {"goal": jnp.array([[3.0]]), "pos": jnp.array([[1.0, 2.0]])}
      >>> join(join.initialize_state(1), x).output.tolist()
      [[-1.0, -2.0, 9.0]]
    """

    def _input(self, key: Any, x: Any, done: dict[Any, Any]) -> Any:
        return self._cut(x, "the input")[key]

    def _output(self, done: dict[Any, Any]) -> Any:
        shapes = {key: getattr(out.output, "shape", None) for key, out in done.items()}
        leading = {shape[:-1] for shape in shapes.values() if shape}
        if len(leading) != 1 or not all(shapes.values()):
            raise ValueError(
                f"Concat: the outputs have the shapes {shapes}; expected an array from "
                "every component, all (*lead, F) with the same lead, usually (B, F)."
            )
        return jnp.concatenate([out.output for out in done.values()], axis=-1)


class Delay(StatefulModule):
    r"""The input of `k_steps` ago: $y_t = x_{t-k}$.

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
        if isinstance(k_steps, bool) or not hasattr(k_steps, "__index__"):
            raise TypeError(f"k_steps is {k_steps!r}; expected an integer.")
        if k_steps < 1:
            raise ValueError(f"k_steps is {k_steps}; expected at least 1.")
        self.k_steps = operator.index(k_steps)
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
        """
        lead = (batch_size, self.k_steps)
        buffers = [self._filler((*lead, *s.shape), s.dtype) for s in self._specs]
        buffer = jax.tree.unflatten(self._treedef, buffers)
        return {"buffer": buffer, "idx": jnp.zeros(batch_size, jnp.int32)}

    def reset_state(self, prev_state: dict[str, Any]) -> dict[str, Any]:
        """Buffers full of `initial_value` again, of the shapes in `prev_state`."""
        return {
            "buffer": jax.tree.map(
                lambda b: self._filler(b.shape, b.dtype), prev_state["buffer"]
            ),
            "idx": jnp.zeros_like(prev_state["idx"]),
        }

    def __call__(
        self, state: Any, x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Reads the oldest entry, and writes `x` in its place; see `StatefulModule`."""
        idx, buffers = state["idx"], self._buffers(state["buffer"])
        inputs = self._inputs(x, buffers)
        oldest = [jax.vmap(lambda b, i: b[i])(b, idx) for b in buffers]
        put = jax.vmap(lambda b, i, new: b.at[i].set(new))
        newest = [put(b, idx, new) for b, new in zip(buffers, inputs, strict=True)]
        next_state = {
            "buffer": jax.tree.unflatten(self._treedef, newest),
            "idx": (idx + 1) % self.k_steps,
        }
        output = jax.tree.unflatten(self._treedef, oldest)
        return StatefulModuleOutput(next_state, output, _no_loss(), {}, rollout_extras)

    def _filler(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.full(shape, np.asarray(self.initial_value).astype(dtype))

    def _buffers(self, tree: Any) -> list[jax.Array]:
        """The buffers of a state, if they are this delay's: `[B, k, *feat]`."""
        named = self._named_leaves(tree, "state['buffer']")
        for (where, buffer), spec in zip(named, self._specs, strict=True):
            if buffer.shape[1:] != (self.k_steps, *spec.shape):
                raise ValueError(
                    f"Delay: {where} has shape {buffer.shape}; expected (B, "
                    f"{self.k_steps}, *{spec.shape}), as initialize_state makes it."
                )
        return [buffer for _, buffer in named]

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


def _no_loss() -> jax.Array:
    return jnp.zeros((), jnp.float32)  # typed: a weak zero would retrace a scan carry


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or type(value).__name__


def _keys(parts: Iterable[Any]) -> str:
    return ", ".join(map(repr, parts)) or "nothing"


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Notes on an error which child it came from; nested, that is the whole path."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {where}")
        raise


def _is_stateful(child: Any) -> bool:
    telling = ("initialize_state", "update_statistics")
    return any(callable(getattr(child, method, None)) for method in telling)


def _as_module(child: Any, where: str) -> Any:
    """The child itself if it has the methods of `StatefulModule`, else lifted."""
    if not _is_stateful(child) or isinstance(child, type):
        with _located(where):
            return Lift(child)
    if missing := [m for m in _METHODS if not callable(getattr(child, m, None))]:
        raise TypeError(
            f"{where} is {_name(child)}, a stateful module without {missing}; expected "
            f"all of {list(_METHODS)}."
        )
    return child


def _takes_mask(child: Any) -> bool:
    parameters = inspect.signature(child.update_statistics).parameters
    keywords = inspect.Parameter.VAR_KEYWORD
    return "mask" in parameters or any(p.kind is keywords for p in parameters.values())


def _refuse_losing_mask(module: Any, where: str) -> None:
    """Raises if somewhere below a mask would not reach statistics."""
    owned = {type(v) for _, v, _ in _snapshot(module)}
    others = [t.__name__ for t in owned if not issubclass(t, nnx.Param | nnx.RngState)]
    if others and not _takes_mask(module):
        raise TypeError(
            f"{where} is {_name(module)}, whose update_statistics takes no mask, and "
            f"which owns {sorted(others)}: the mask would get lost. Give the method a "
            "keyword `mask`, or update without one."
        )
    if isinstance(module, _Container):
        for key, child in module._children().items():
            _refuse_losing_mask(child, f"{where}.{module._at(key)}".removeprefix("."))


def _snapshot(module: Any) -> list[tuple[str, nnx.Variable[Any], Any]]:
    """Path, Variable and value of all that a module owns."""
    nodes = nnx.iter_graph(module, graph=True)  # a child may be there twice
    variables = ((p, v) for p, v in nodes if isinstance(v, nnx.Variable))
    return [("/".join(map(str, p)), v, v.get_raw_value()) for p, v in variables]


def _restore(before: list[Any], after: list[Any], spare: Any = ()) -> list[str]:
    """Puts the values of `before` back; the paths of the Variables it took."""
    old = {id(variable): value for _, variable, value in before}
    written = []
    for path, variable, value in after:
        if not isinstance(variable, spare) and old.get(id(variable)) is not value:
            written.append(path)
            variable.set_value(old.get(id(variable), value))
    return written
