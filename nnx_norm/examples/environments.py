# SPDX-License-Identifier: Apache-2.0
"""Environments for the PPO example, as two pure functions each.

`Environment.reset` and `Environment.step` know nothing of time limits and
never reset themselves: `step_all` adds both for a batch of environments, so
that the observation an episode really ended with, and whether it ended by its
own rule (terminated) or by its time limit (truncated), are never lost.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Unavailable(ValueError):
    """The environment asked for can't be had; the text says why and what helps."""


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


def scaled(environment: Environment, factors: Sequence[float]) -> Environment:
    """The environment with its observations in other units."""
    size = len(environment.features)
    if len(factors) != size:
        raise Unavailable(
            f"{environment.name} has {size} features "
            f"({', '.join(environment.features)}), --scale has {len(factors)} factors"
        )
    units = jnp.asarray(factors, jnp.float32)

    def reset(key: Array) -> tuple[Any, Array]:
        state, observation = environment.reset(key)
        return state, observation * units

    def step(key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array]:
        state, observation, reward, terminated = environment.step(key, state, action)
        return state, observation * units, reward, terminated

    return dataclasses.replace(environment, reset=reset, step=step)


GYMNAX_FEATURES = {
    "MountainCarContinuous-v0": ("position", "velocity"),
    "MountainCar-v0": ("position", "velocity"),
    "Pendulum-v1": ("cos angle", "sin angle", "velocity"),
    "Acrobot-v1": ("cos 1", "sin 1", "cos 2", "sin 2", "velocity 1", "velocity 2"),
    "CartPole-v1": ("position", "velocity", "angle", "angular velocity"),
}
BRAX_NAMES = (
    "fast",
    "inverted_pendulum",
    "inverted_double_pendulum",
    "reacher",
    "hopper",
    "walker2d",
    "halfcheetah",
    "ant",
)


def from_gymnax(name: str) -> Environment:
    """A classic control environment of gymnax."""
    gymnax = importlib.import_module("gymnax")
    environment, parameters = gymnax.make(name)
    space = environment.action_space(parameters)
    actions = (
        Discrete(int(space.n))
        if hasattr(space, "n")
        else Continuous(space.shape[0], float(space.low), float(space.high))
    )

    def reset(key: Array) -> tuple[Any, Array]:
        observation, state = environment.reset_env(key, parameters)
        # Some fields start as Python numbers: a weak type would not fit a scan.
        return jax.tree.map(strong, state), observation

    # `step_env` rather than `step`: it does not reset, and leaves the time limit
    # to us.
    def step(key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array]:
        observation, state, reward, terminated, _ = environment.step_env(
            key, state, action, parameters
        )
        reward = jnp.asarray(reward, jnp.float32)
        return jax.tree.map(strong, state), observation, reward, terminated

    limit = int(parameters.max_steps_in_episode)
    return Environment(name, GYMNAX_FEATURES[name], actions, limit, reset, step)


def from_brax(name: str) -> Environment:
    """An environment of brax, on its `spring` backend."""
    envs = importlib.import_module("brax.envs")
    options = {} if name == "fast" else {"backend": "spring"}
    environment = envs.get_environment(name, **options)
    features = tuple(f"x{i}" for i in range(environment.observation_size))

    def reset(key: Array) -> tuple[Any, Array]:
        state = jax.tree.map(strong, environment.reset(key))
        return state, state.obs

    def step(key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array]:
        del key  # brax's dynamics are deterministic
        after = jax.tree.map(
            lambda old, new: jnp.asarray(new, old.dtype),
            state,
            environment.step(state, action),
        )
        return after, after.obs, after.reward.astype(jnp.float32), after.done > 0

    actions = Continuous(environment.action_size, -1.0, 1.0)
    return Environment(name, features, actions, 1000, reset, step)


def strong(x: Any) -> Array:
    """`x` as an array whose type no Python number will bend."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype)


MAKERS: dict[str, Callable[[str], Environment]] = {
    **dict.fromkeys(GYMNAX_FEATURES, from_gymnax),
    **dict.fromkeys(BRAX_NAMES, from_brax),
}
EXTRAS: dict[Callable[[str], Environment], str] = {
    from_gymnax: "examples",
    from_brax: "brax",
}


def find(name: str) -> str:
    """The full name of an environment given without its version, in any case."""
    known = {full.lower().split("-v")[0]: full for full in MAKERS}
    try:
        return known[name.lower().split("-v")[0]]
    except KeyError:
        raise Unavailable(
            f"unknown environment {name!r}; known: {', '.join(MAKERS)}"
        ) from None


def make(name: str, scale: Sequence[float] = ()) -> Environment:
    """The environment of that name, in the given units.

    Raises:
      Unavailable: There is none of that name, its package is not installed, or
        `scale` does not have one factor for each feature.
    """
    name = find(name)
    try:
        environment = MAKERS[name](name)
    except ModuleNotFoundError as error:
        extra = EXTRAS[MAKERS[name]]
        raise Unavailable(
            f"{name} needs {error.name}, which is not installed: "
            f"pip install 'nnx-norm[{extra}]'"
        ) from None
    return scaled(environment, scale) if scale else environment
