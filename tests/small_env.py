# SPDX-License-Identifier: Apache-2.0
"""A small environment for nnx-ppo, without MuJoCo Playground: walk to the origin."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of an environment as nnx-ppo's protocol has it."""

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]

    def replace(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A point in the plane. Its coordinates are seen in units far from each other."""

    observation_size = 2
    action_size = 2

    def reset(self, rng: Any) -> State:
        return self._at(jax.random.uniform(rng, (2,), jnp.float32, -1.5, 1.5))

    def step(self, state: State, action: Any) -> State:
        return self._at(state.data + 0.2 * jnp.clip(action, -1, 1))

    def _at(self, position: jax.Array) -> State:
        far = jnp.sum(position**2)
        seen = position * jnp.float32([1000.0, 0.01]) + jnp.float32([5000.0, 0.0])
        done = (far > 9.0).astype(jnp.float32)
        return State(position, seen, jnp.exp(-2 * far), done, {}, {})
