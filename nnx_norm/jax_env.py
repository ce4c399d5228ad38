# SPDX-License-Identifier: Apache-2.0
"""Where the episodes of environments in JAX end: brax, MuJoCo Playground, gymnax.

Each of them says it in another way, and most reset themselves in the step that ends an
episode. `brax_ends` and `gymnax_ends` read what a step returned, so that

    rewards.update(history.reward, *brax_ends(history))

ends every return where its episode ends. They are pure and import none of these
libraries; they read one step inside a scan, or all of its stacked steps after it.
Rollouts that `jax.vmap` maps over environments come out as `[B, T]`; `update` wants
`[T, B]`: say `jax.vmap(rollout, out_axes=1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx_norm import masks, validation


class Ends(NamedTuple):
    """Where episodes ended: two bool arrays of one shape, never both True.

    They belong to the reward of the same step. An episode that ends by its own rule
    with the last step that it has is terminated: there is no future to bootstrap.

    Example:
      >>> from nnx_norm import RewardNormalizer
      >>> ends = Ends(jnp.array([[False], [True]]), jnp.array([[True], [False]]))
      >>> rewards = RewardNormalizer(gamma=0.9)
      >>> rewards.update(jnp.array([[1.0], [3.0]]), *ends)  # two episodes of one step
      >>> float(rewards.mean), ends.done.tolist()
      (2.0, [[True], [True]])
    """

    terminated: jax.Array
    """Ended by the rules of the task."""
    truncated: jax.Array
    """Cut off by a limit on the number of steps."""

    @property
    def done(self) -> jax.Array:
        """Ended either way."""
        return self.terminated | self.truncated


def brax_ends(state: Any, *, limit: Any = None) -> Ends:
    """The ends of episodes in states of brax, MuJoCo Playground or nnx-ppo.

    Their `done` is 1.0 for both kinds of end. `info["truncation"]`, which brax's
    `EpisodeWrapper` writes, is 1.0 for time-outs; without that wrapper nothing is ever
    cut off. That of nnx-ppo, and gymnax's `GymnaxToBraxWrapper`, write
    `info["truncated"]`.

    Args:
      state: What `env.step` returned: an object with `done` of any shape, such as
        `[B]`, or `[T, B]` of stacked states, and with a dict `info`.
      limit: None, or the `episode_length` of `EpisodeWrapper`, to compare
        `info["steps"]` with it instead. Playground's `full_reset=True` needs that: it
        wipes the truncation out. An episode that ends by its own rule with its last
        step then counts as truncated (with nnx-ppo's wrapper always).

    Returns:
      The ends, of the shape of `done`.

    Raises:
      TypeError: `state` has no `done` or `info`, or a flag is no number.
      ValueError: Shapes differ, there are no steps to compare `limit` with, or,
        outside jit, a flag is neither 0 nor 1.

    Example:
      >>> from types import SimpleNamespace
      >>> info = {"truncation": jnp.array([0.0, 0.0, 1.0])}
      >>> ends = brax_ends(SimpleNamespace(done=jnp.array([0.0, 1.0, 1.0]), info=info))
      >>> ends.terminated.tolist(), ends.truncated.tolist()
      ([False, True, False], [False, False, True])

    References:
      `EpisodeWrapper` in brax/envs/wrappers/training.py; `BraxAutoResetWrapper` in
      mujoco_playground/_src/wrapper.py.
    """
    if not hasattr(state, "done") or not hasattr(state, "info"):
        raise TypeError(
            f"state is a {type(state).__name__} without done or info; expected the "
            "State that env.step returned. What gymnax returns is for gymnax_ends."
        )
    done, info = _flag(state.done, "done"), state.info
    if limit is not None:
        if "steps" not in info:
            raise ValueError(
                f"limit is given, but info has no 'steps', only {sorted(info)}; "
                "expected a state of EpisodeWrapper. Without it leave limit out."
            )
        cut = _reached(info["steps"], limit, "info['steps']", done.shape)
        return _split(done, cut)
    told = ("truncation", "truncated", "terminated")
    flags = {
        name: _flag(info[name], f"info[{name!r}]", done.shape)
        for name in told
        if name in info
    }
    nothing = jnp.zeros_like(done)
    cut = flags.get("truncation", nothing) | flags.get("truncated", nothing)
    return _split(done, cut & ~flags.get("terminated", nothing))


def gymnax_ends(step: Sequence[Any], *, time: Any = None, limit: Any = None) -> Ends:
    """The ends of episodes in what `env.step` of gymnax returned.

    gymnax 1 returns `(obs, state, reward, terminated, truncated, info)`, and both flags
    may be True. Before that, and in libraries made after it (Craftax), it was `(obs,
    state, reward, done, info)`: `done` is True for both kinds of end, and to tell them
    apart takes the time that the step began at, and the limit.

    Args:
      step: The whole tuple, with leading axes of any kind.
      time: `state.time` of the state that was passed to `env.step`, not of the one
        that it returned, which has been reset. Of the shape of `done`. Only looked at
        where the step itself doesn't tell.
      limit: `params.max_steps_in_episode`, a number or an array of that shape. An
        episode that ends by its own rule with its last step then counts as truncated.

    Returns:
      The ends, of the shape of the flags.

    Raises:
      TypeError: `step` is no tuple, or a flag is no number.
      ValueError: It has another length, shapes differ, `time` and `limit` are needed
        and not given, or, outside jit, a flag is neither 0 nor 1.

    Example:
      >>> done, time = jnp.array([False, True, True]), jnp.array([7, 5, 9])
      >>> old = ("obs", "state", "reward", done, {})
      >>> ends = gymnax_ends(old, time=time, limit=10)
      >>> ends.terminated.tolist(), ends.truncated.tolist()
      ([False, True, False], [False, False, True])

    References:
      `Environment.step` in gymnax/environments/environment.py of 0.0.9 and of 1.0.1.
    """
    if not isinstance(step, (tuple, list)):
        raise TypeError(
            f"step is a {type(step).__name__}; expected the tuple that env.step "
            "returned. States of brax are for brax_ends."
        )
    if len(step) not in (5, 6):
        raise ValueError(
            f"step has {len(step)} entries; expected (obs, state, reward, terminated, "
            "truncated, info), or (obs, state, reward, done, info)."
        )
    info: Any = step[-1]
    if len(step) == 6:
        terminated, truncated = step[3:5]
    elif "terminated" in info and "truncated" in info:  # LegacyStepAPIWrapper
        terminated, truncated = info["terminated"], info["truncated"]
    elif time is None or limit is None:
        raise ValueError(
            "step has 5 entries, one flag done for both kinds of end; expected time= "
            "and limit= with it: state.time of the state before the step, and "
            "params.max_steps_in_episode. If there is no limit, done is terminated."
        )
    else:
        done = _flag(step[3], "done")
        return _split(done, _reached(time, limit, "time", done.shape, after=1))
    terminated = _flag(terminated, "terminated")
    truncated = _flag(truncated, "truncated", terminated.shape)
    return Ends(terminated, truncated & ~terminated)


def _split(done: jax.Array, cut: jax.Array) -> Ends:
    return Ends(done & ~cut, done & cut)


def _flag(value: Any, name: str, shape: tuple[int, ...] | None = None) -> jax.Array:
    array = validation.as_array(value, name)
    if shape is not None:
        _refuse_shape(array, name, shape)
    return masks.as_bool(array, name)


def _reached(
    time: Any, limit: Any, name: str, shape: tuple[int, ...], after: int = 0
) -> jax.Array:
    """Whether `time + after` steps are as many as the limit allows."""
    time, limit = validation.as_array(time, name), validation.as_array(limit, "limit")
    _refuse_shape(time, name, shape)
    if limit.ndim:
        _refuse_shape(limit, "limit", shape)
    with jax.numpy_dtype_promotion("standard"):  # brax counts in float32
        return time + after >= limit


def _refuse_shape(array: jax.Array, name: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}; expected {shape}, that of the flags of "
            "the same steps."
        )
