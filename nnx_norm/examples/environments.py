# SPDX-License-Identifier: Apache-2.0
"""Environments for the PPO example, as two pure functions each.

`Environment.reset` and `Environment.step` know nothing of time limits and
never reset themselves: `step_all` adds both for a batch of environments, so
that the observation an episode really ended with, and whether it ended by its
own rule (terminated) or by its time limit (truncated), are never lost.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Discrete(NamedTuple):
    """Actions `0 .. count - 1`."""

    count: int


class Continuous(NamedTuple):
    """Actions of `size` numbers between `low` and `high`."""

    size: int
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Environment:
    """What the example needs to know of one environment.

    Attributes:
      name: The name in tables and pictures.
      features: One name for each number of an observation.
      actions: The kind of its actions.
      time_limit: Steps after which an episode is cut off (truncated).
      reset: `key -> (state, observation)`.
      step: `(key, state, action) -> (state, observation, reward, terminated)`;
        `terminated` is the environment's own end, never its time limit.
    """

    name: str
    features: tuple[str, ...]
    actions: Discrete | Continuous
    time_limit: int
    reset: Callable[[Array], tuple[Any, Array]]
    step: Callable[[Array, Any, Array], tuple[Any, Array, Array, Array]]


class Episodes(NamedTuple):
    """A batch of environments on their way; every leaf is `[B, ...]`."""

    state: Any
    observation: Array
    time: Array
    """Steps taken in this episode."""
    so_far: Array
    """Undiscounted return of this episode up to now."""
    last: Array
    """Return of the episode completed last; NaN before the first one is."""


class Step(NamedTuple):
    """What one step of a batch of environments brought; leaves `[B, ...]`."""

    reward: Array
    terminated: Array
    truncated: Array
    next_observation: Array
    """The observation this step led to, also where the episode ended with it."""


def start_all(environment: Environment, keys: Array) -> Episodes:
    """One new episode for each key."""
    state, observation = jax.vmap(environment.reset)(keys)
    zeros = jnp.zeros(len(keys), jnp.float32)
    return Episodes(
        state=state,
        observation=observation,
        time=jnp.zeros(len(keys), jnp.int32),
        so_far=zeros,
        last=jnp.full_like(zeros, jnp.nan),
    )


def step_all(
    environment: Environment, episodes: Episodes, actions: Array, key: Array
) -> tuple[Episodes, Step]:
    """Steps every environment and starts a new episode where one has ended."""
    step_keys, reset_keys = jax.random.split(key, (2, len(actions)))
    state, observation, reward, terminated = jax.vmap(environment.step)(
        step_keys, episodes.state, actions
    )
    time = episodes.time + 1
    so_far = episodes.so_far + reward
    # An episode that reaches its goal with its last step has no future to
    # bootstrap: terminated wins over truncated.
    truncated = (time >= environment.time_limit) & ~terminated
    ended = terminated | truncated
    going_on = Episodes(state, observation, time, so_far, episodes.last)
    fresh = start_all(environment, reset_keys)._replace(last=so_far)
    return (
        where(ended, fresh, going_on),
        Step(reward, terminated, truncated, observation),
    )


def where(condition: Array, a: Any, b: Any) -> Any:
    """`jnp.where` for each leaf, with a condition along the leading axis."""

    def choose(x: Array, y: Array) -> Array:
        lined_up = condition.reshape(condition.shape + (1,) * (jnp.ndim(y) - 1))
        return jnp.where(lined_up, x, y)

    return jax.tree.map(choose, a, b)
