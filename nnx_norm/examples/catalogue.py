# SPDX-License-Identifier: Apache-2.0
"""The environments known by name: those of gymnax and of brax, in any units."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nnx_norm.examples.environments import Continuous, Discrete, Environment


class Unavailable(ValueError):
    """The environment asked for can't be had; the text says why and what helps."""


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
        dtypes = jax.tree.map(lambda x: x.dtype, state)  # it may write into the state
        after = jax.tree.map(jnp.asarray, environment.step(state, action), dtypes)
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
    known = {full.lower(): full for full in MAKERS}
    known |= {full.lower().split("-v")[0]: full for full in MAKERS}
    try:
        return known[name.lower()]
    except KeyError:
        raise Unavailable(
            f"unknown environment {name!r}; known: {', '.join(GYMNAX_FEATURES)}, and "
            f"with nnx-norm[brax] installed {', '.join(BRAX_NAMES)}"
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
