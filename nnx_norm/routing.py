# SPDX-License-Identifier: Apache-2.0
"""How a container of modules routes: what goes to which child, and who went wrong.

A container cuts state and extras into one part per child, and hands the parts down. An
update goes to all children or to none, and a mask that some child would drop is refused
before anything changes.
"""

import abc
import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from nnx_norm.lift import Lift
from nnx_norm.stateful import (
    FORGOTTEN,
    StatefulModule,
    StatefulModuleOutput,
    is_stateful,
    name_of,
    no_loss,
    refuse_forgotten,
    restore,
    snapshot,
)
from nnx_norm.tree import is_mapping

_METHODS = ("__call__", "initialize_state", "reset_state", "update_statistics")


class Container(StatefulModule):
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
            raise TypeError(self._misfit(what, name_of(parts)))
        if set(parts.keys()) != set(self._children()):
            raise ValueError(self._misfit(what, f"a dict of {_keys(parts.keys())}"))
        return {key: parts[key] for key in parts.keys()}

    def _misfit(self, what: str, came: str) -> str:
        return (
            f"{type(self).__name__}: {what} is {came}; expected a dict of "
            f"{_keys(self._children())}, one part for each child" + origin(what)
        )

    def _at(self, key: Any) -> str:
        return f"{self._attribute}[{key!r}]"

    def __call__(
        self, state: Any, x: Any = FORGOTTEN, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """One step of every child; see `StatefulModule`.

        A child whose part of the extras is None (it emitted none) can't tell a replay
        from a rollout; what it emits in a replay is dropped here.
        """
        refuse_forgotten(self, x)
        replay = rollout_extras is not None
        states = self._cut(state, "state")
        extras = self._cut(rollout_extras, "rollout_extras") if replay else {}
        done: dict[Any, Any] = {}
        for key, child in self._children().items():
            with located(self._at(key)):
                part = self._input(key, x, done)
                done[key] = child(states[key], part, extras.get(key))
        emitted = self._join({key: out.rollout_extras for key, out in done.items()})
        losses = [jnp.asarray(out.regularization_loss) for out in done.values()]
        return StatefulModuleOutput(
            next_state=self._join({key: out.next_state for key, out in done.items()}),
            output=self._output(done),
            regularization_loss=sum((a.astype(jnp.float32) for a in losses), no_loss()),
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

    def update_statistics(
        self, rollout_extras: Any, *, mask: Any = None, weights: Any = None
    ) -> None:
        """Hands every child its part, and mask and weights if there are any.

        All or nothing: if a child refuses, those before it get their old values back.

        Args:
          rollout_extras: What the steps emitted, stacked.
          mask: Passed on when given. A child whose method takes none is called
            without it if it owns nothing but parameters and random keys.
          weights: The same.

        Raises:
          TypeError: Mask or weights would get lost: a child takes none and owns other
            Variables. The message has its path.
          ValueError: The extras don't have one part for each child.
        """
        parts = self._cut(rollout_extras, "rollout_extras")
        given = {"mask": mask, "weights": weights}
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            _refuse_losing(name, self, "")
        before = snapshot(self)
        try:
            for key, child in self._children().items():
                taken = {k: v for k, v in given.items() if _takes(child, k)}
                with located(self._at(key)):
                    child.update_statistics(parts[key], **taken)
        except BaseException:
            restore(before, snapshot(self))
            raise


def origin(what: str) -> str:
    """Where state or extras come from: the end of a message."""
    sources = {
        "state": ", as initialize_state(batch_size) gives it; it comes ahead of x.",
        "rollout_extras": ", as the forward pass emits it and a scan stacks it.",
    }
    return sources.get(what, ".")


def as_module(child: Any, where: str) -> Any:
    """The child itself if it has the methods of `StatefulModule`, else lifted.

    Args:
      child: A stateful module of any library, an `nnx` layer or a callable.
      where: Its place in the container, for messages.

    Returns:
      What the container holds.

    Raises:
      TypeError: The child can't be called, or has only some of the methods.
    """
    if not is_stateful(child) or isinstance(child, type):
        with located(where):
            return Lift(child)
    if missing := [m for m in _METHODS if not callable(getattr(child, m, None))]:
        raise TypeError(
            f"{where} is {name_of(child)}, a stateful module without {missing}; "
            f"expected all of {list(_METHODS)}."
        )
    return child


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Notes on an error which child it came from; nested, that is the whole path.

    Args:
      where: The child's place in the container.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"in {where}")
        raise


def _keys(parts: Iterable[Any]) -> str:
    return ", ".join(map(repr, parts)) or "nothing"


def _takes(child: Any, name: str) -> bool:
    """Whether `update_statistics` of a child has such a keyword."""
    parameters = inspect.signature(child.update_statistics).parameters
    keywords = inspect.Parameter.VAR_KEYWORD
    return name in parameters or any(p.kind is keywords for p in parameters.values())


def _refuse_losing(name: str, module: Any, where: str) -> None:
    """Raises if somewhere below a mask or weights would not reach statistics."""
    owned = {type(v) for _, v, _ in snapshot(module)}
    others = [t.__name__ for t in owned if not issubclass(t, nnx.Param | nnx.RngState)]
    if others and not _takes(module, name):
        raise TypeError(
            f"{where} is {name_of(module)}, whose update_statistics takes no {name}, "
            f"and which owns {sorted(others)}: the {name} would get lost. Give the "
            f"method a keyword `{name}`, or update without."
        )
    if isinstance(module, Container):
        for key, child in module._children().items():
            _refuse_losing(name, child, f"{where}.{module._at(key)}".removeprefix("."))
