# SPDX-License-Identifier: Apache-2.0
"""The policy graph: modules with a carried state, and containers that route.

A module gets its state, an input and, when a loss is replayed, what it emitted in
the rollout. Every module of the graph can be imported from here; the containers are
defined here: one module after the other, side by side, or one for each entry of a dict.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from nnx_norm.delay import Delay
from nnx_norm.lift import Lift
from nnx_norm.routing import Container, as_module, origin
from nnx_norm.stateful import StatefulModule, StatefulModuleOutput, name_of
from nnx_norm.tree import is_mapping

__all__ = [
    "Concat",
    "Delay",
    "Lift",
    "Parallel",
    "Sequential",
    "StatefulModule",
    "StatefulModuleOutput",
]


class Sequential(Container):
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
                f"Sequential got {name_of(layers)}; expected a list of modules."
            )
        children = [as_module(m, f"layers[{i}]") for i, m in enumerate(layers)]
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
            raise TypeError(self._misfit(what, name_of(parts)))
        if len(parts) != len(self.layers):
            raise ValueError(self._misfit(what, f"a list of {len(parts)}"))
        return dict(enumerate(parts))

    def _misfit(self, what: str, came: str) -> str:
        return (
            f"Sequential: {what} is {came}; expected a list of {len(self.layers)}, "
            "one part for each layer" + origin(what)
        )


class _Named(Container):
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
            raise TypeError(f"{name} got {name_of(given)}; expected a dict of modules.")
        if not given:
            raise ValueError(f"{name} got no components; expected at least one.")
        if odd := [key for key in given if not isinstance(key, str)]:
            raise TypeError(f"{name} got the keys {odd}; expected strings.")
        # nnx sorts the keys of a Dict whenever it goes through a transform.
        self._order = tuple(given)
        self.components = nnx.Dict(
            {key: as_module(m, self._at(key)) for key, m in given.items()}
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
