# SPDX-License-Identifier: Apache-2.0
"""The module of the policy graph: Variables of its own, and a state carried for it.

Nothing here is written in a forward pass; `update_statistics` is the one place where
Variables change, and `snapshot` and `restore` hold modules to it. All of it is
structural: any object with the four methods of `StatefulModule` is one, whichever
library it comes from.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_norm.signature import OfConstructor


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

    Pass the module to the outermost jit as an argument: a compiled function that
    closes over it goes on with the Variables of the time of compilation.

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

    __signature__ = OfConstructor()

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


class _Forgotten:
    """What stands for an argument that didn't come."""

    def __repr__(self) -> str:
        return "required"


FORGOTTEN: Any = _Forgotten()
"""Default of `x` in our modules: with it missing the state was, as a rule."""


def refuse_forgotten(module: Any, x: Any) -> None:
    """Raise if a module of the graph was called without `x`, as `module(x)` does.

    Args:
      module: The module.
      x: Its second argument, by default `FORGOTTEN`.

    Raises:
      TypeError: It is that.
    """
    if x is FORGOTTEN:
        name = type(module).__name__
        also = "; normalize(x) needs none" if hasattr(module, "normalize") else ""
        raise TypeError(
            f"{name} was called with one argument; expected the state, then x: "
            f"module(state, x). At first the state is module.initialize_state(B){also}."
        )


def is_stateful(child: Any) -> bool:
    """Whether an object means to be a `StatefulModule`, by what tells it from a layer.

    Args:
      child: Any object. Whether it has the other methods too isn't asked.

    Returns:
      True with `initialize_state` or `update_statistics` among its methods.
    """
    telling = ("initialize_state", "update_statistics")
    return any(callable(getattr(child, method, None)) for method in telling)


def no_loss() -> jax.Array:
    """The `regularization_loss` of a module that has none."""
    return jnp.zeros((), jnp.float32)  # typed: a weak zero would retrace a scan carry


def name_of(value: Any) -> str:
    """What to call a value in a message: its own name, or else its class's."""
    return getattr(value, "__name__", None) or type(value).__name__


def snapshot(module: Any) -> list[tuple[str, nnx.Variable[Any], Any]]:
    """Path, Variable and value of all that a module owns, for `restore`.

    Args:
      module: A module or any object; a Variable that is there twice comes once.

    Returns:
      The values as they are now, tracers under a transform, without a copy.
    """
    nodes = nnx.iter_graph(module, graph=True)  # a child may be there twice
    variables = ((p, v) for p, v in nodes if isinstance(v, nnx.Variable))
    return [("/".join(map(str, p)), v, v.get_raw_value()) for p, v in variables]


def restore(before: list[Any], after: list[Any], spare: Any = ()) -> list[str]:
    """Undoes what was written to a module's Variables between two snapshots.

    Args:
      before: The `snapshot` whose values come back.
      after: The `snapshot` of now. A Variable made in between keeps its value.
      spare: Classes of Variables that may be written, and stay as they are.

    Returns:
      The paths of the Variables that were written.
    """
    old = {id(variable): value for _, variable, value in before}
    written = []
    for path, variable, value in after:
        if not isinstance(variable, spare) and old.get(id(variable)) is not value:
            written.append(path)
            variable.set_value(old.get(id(variable), value))
    return written
