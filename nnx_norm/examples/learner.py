# SPDX-License-Identifier: Apache-2.0
"""What is trained, and with which settings."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax import Array

from nnx_norm import RewardNormalizer, StatefulModule
from nnx_norm.examples.agent import build_network
from nnx_norm.examples.environments import Environment, Episodes, start_all


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """What PPO is run with; the same for every environment and variant."""

    normalize: str = "obs+reward"
    environments: int = 32
    horizon: int = 128
    epochs: int = 4
    minibatches: int = 8
    learning_rate: float = 3e-4
    gamma: float = 0.99
    lambda_: float = 0.95
    ratio_clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    gradient_norm: float = 0.5
    observation_clip: float = 10.0

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps that one `train_step` takes."""
        return self.environments * self.horizon


class Learner(NamedTuple):
    """All that training changes. A pytree: it is jitted, mapped and saved whole."""

    network: StatefulModule
    optimizer: nnx.Optimizer
    rewards: RewardNormalizer | None
    episodes: Episodes
    network_state: Any
    key: Array


def new_learner(
    key: Array, environment: Environment, hyper: Hyperparameters
) -> Learner:
    """A learner before its first step; the key decides all of its randomness."""
    network_key, reset_key, key = jax.random.split(key, 3)
    network = build_network(
        environment,
        nnx.Rngs(network_key),
        normalize="obs" in hyper.normalize,
        clip=hyper.observation_clip,
    )
    transform = optax.chain(
        optax.clip_by_global_norm(hyper.gradient_norm),
        optax.adam(hyper.learning_rate, eps=1e-5),
    )
    rewards = None
    if "reward" in hyper.normalize:
        rewards = RewardNormalizer(hyper.gamma, num_envs=hyper.environments)
    return Learner(
        network=network,
        optimizer=nnx.Optimizer(network, transform, wrt=nnx.Param),
        rewards=rewards,
        episodes=start_all(
            environment, jax.random.split(reset_key, hyper.environments)
        ),
        network_state=network.initialize_state(hyper.environments),
        key=key,
    )
