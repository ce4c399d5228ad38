# SPDX-License-Identifier: Apache-2.0
"""Experience: a rollout, the advantages in it, and the batch to learn from.

References:
  Schulman et al., *High-Dimensional Continuous Control Using Generalized
  Advantage Estimation*, 2016.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nnx_norm import StatefulModule
from nnx_norm.examples.agent import to_environment
from nnx_norm.examples.environments import Environment, Episodes, step_all, where
from nnx_norm.examples.learner import Hyperparameters, Learner


class Rollout(NamedTuple):
    """Every step of every environment; leaves `[T, B, ...]`."""

    observation: Array
    network_state: Any
    extras: Any
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_observation: Array
    next_network_state: Any


class Batch(NamedTuple):
    """What the loss looks at; leaves `[N, ...]`."""

    observation: Array
    network_state: Any
    extras: Any
    action: Array
    log_prob: Array
    advantage: Array
    target: Array


def roll_out(
    learner: Learner, environment: Environment, hyper: Hyperparameters
) -> tuple[Learner, Rollout]:
    """`horizon` steps of every environment with the network as it stands."""
    network = learner.network  # only read: the scan may close over it

    def step(
        carry: tuple[Episodes, Any], key: Array
    ) -> tuple[tuple[Episodes, Any], Rollout]:
        episodes, state = carry
        action_key, step_key = jax.random.split(key)
        out = network(state, episodes.observation)
        policy, value = out.output["policy"], out.output["value"]
        action = policy.sample(action_key)
        after, stepped = step_all(
            environment, episodes, to_environment(environment.actions, action), step_key
        )
        ended = stepped.terminated | stepped.truncated
        next_state = where(ended, network.reset_state(out.next_state), out.next_state)
        return (after, next_state), Rollout(
            observation=episodes.observation,
            network_state=state,
            extras=out.rollout_extras,
            action=action,
            log_prob=policy.log_prob(action),
            value=value,
            next_network_state=out.next_state,
            **stepped._asdict(),
        )

    key, rollout_key = jax.random.split(learner.key)
    (episodes, state), rollout = jax.lax.scan(
        step,
        (learner.episodes, learner.network_state),
        jax.random.split(rollout_key, hyper.horizon),
    )
    return learner._replace(episodes=episodes, network_state=state, key=key), rollout


def make_batch(
    network: StatefulModule, rollout: Rollout, reward: Array, hyper: Hyperparameters
) -> Batch:
    """Advantages and value targets, and all of the rollout in one row."""
    # Where an episode goes on, this is the value of the next row; where it was
    # cut off, that of its true last observation, which no row begins with.
    after = network(
        flatten(rollout.next_network_state), flatten(rollout.next_observation)
    )
    next_value = after.output["value"].reshape(rollout.value.shape)
    advantage = generalized_advantages(
        reward,
        rollout.value,
        next_value,
        rollout.terminated,
        rollout.truncated,
        hyper.gamma,
        hyper.lambda_,
    )
    batch = Batch(
        observation=rollout.observation,
        network_state=rollout.network_state,
        extras=rollout.extras,
        action=rollout.action,
        log_prob=rollout.log_prob,
        advantage=advantage,
        target=advantage + rollout.value,
    )
    return flatten(batch)


def generalized_advantages(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    gamma: float,
    lambda_: float,
) -> Array:
    """Generalized advantage estimates along the leading axis.

    With the error `δ` of the value,

        δ[t] = r[t] + γ (1 - terminated[t]) V(s'[t]) - V(s[t])
        A[t] = δ[t] + γ λ (1 - ended[t]) A[t + 1]

    A terminated episode has no future; a truncated one has the value of its
    last observation, but what follows in the row belongs to another episode.

    Args:
      reward: `[T, B]`, like all the others.
      value: Of the observation each step began with.
      next_value: Of the observation each step led to, its true last one where
        an episode ended.
      terminated: Ended by the environment's own rule.
      truncated: Ended by the time limit.
      gamma: The discount.
      lambda_: Weight of longer looks ahead.

    Returns:
      `[T, B]`.
    """
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    carry_on = jnp.where(terminated | truncated, 0.0, gamma * lambda_)

    def back(following: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, carry_on = step
        advantage = delta + carry_on * following
        return advantage, advantage

    start = jnp.zeros_like(value[0])
    return jax.lax.scan(back, start, (delta, carry_on), reverse=True)[1]


def flatten(tree: Any) -> Any:
    """Leaves `[T, B, ...]` to `[T * B, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
