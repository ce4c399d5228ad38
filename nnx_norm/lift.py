# SPDX-License-Identifier: Apache-2.0
"""What has no state, a function or a layer, as a module of the policy graph."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

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
        if is_stateful(fn):
            raise TypeError(
                f"Lift got {name_of(fn)}, which has a state: use it as it is."
            )
        if not callable(fn):
            raise TypeError(f"Lift got {name_of(fn)}; expected a callable.")
        try:
            hash(fn)  # now, by its name, rather than at the first jit
        except TypeError as error:
            raise TypeError(
                f"Lift got {name_of(fn)}, which is not hashable; wrap it in a "
                "function, or make it an nnx.Module."
            ) from error
        opaque = jax.tree_util.all_leaves([fn])
        self.fn = fn if opaque else nnx.data(fn)  # a Partial may carry arrays

    def __call__(
        self, state: Any, x: Any = FORGOTTEN, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """`fn(x)`; see `StatefulModule`."""
        refuse_forgotten(self, x)
        before = snapshot(self)
        output = self.fn(x)
        if written := restore(before, snapshot(self), spare=nnx.Param):
            raise ValueError(
                f"Lift: {name_of(self.fn)} wrote {', '.join(written)} in a forward "
                "pass, which only reads. Call its eval() first (BatchNorm, Dropout), "
                "or make it a StatefulModule that writes in update_statistics."
            )
        return StatefulModuleOutput(state, output, no_loss(), {}, rollout_extras)
