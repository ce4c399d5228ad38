# SPDX-License-Identifier: Apache-2.0
r"""Proximal policy optimization around a policy graph with statistics in it.

One `train_step` is a pure function of a `Learner`: a rollout by `lax.scan`
whose read-only forward emits extras, advantages, epochs of minibatches that
replay the extras, and, last of all, the one `update_statistics`.

References:
  Schulman et al., *Proximal Policy Optimization Algorithms*, 2017.
  Schulman et al., *High-Dimensional Continuous Control Using Generalized
  Advantage Estimation*, 2016.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from nnx_norm import RewardNormalizer, StatefulModule
from nnx_norm.examples.agent import (
    build_network,
    observation_normalizer,
    to_environment,
)
from nnx_norm.examples.environments import (
    Environment,
    Episodes,
    start_all,
    step_all,
    where,
)


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


def train_step(
    learner: Learner, environment: Environment, hyper: Hyperparameters
) -> tuple[Learner, dict[str, Array]]:
    """One rollout, the learning from it, and the statistics' update.

    Args:
      learner: Where training stands.
      environment: The environment to step.
      hyper: The settings.

    Returns:
      The learner after it, and numbers to report.
    """
    learner, rollout = roll_out(learner, environment, hyper)
    reward = rollout.reward
    if learner.rewards is not None:
        learner.rewards.update(reward, rollout.terminated, rollout.truncated)
        reward = learner.rewards.normalize(reward)
    batch = make_batch(learner.network, rollout, reward, hyper)

    learn_key, key = jax.random.split(learner.key)
    network, optimizer, losses = learn(
        learner.network, learner.optimizer, batch, learn_key, hyper
    )
    learner = learner._replace(network=network, optimizer=optimizer, key=key)

    metrics = {"return": jnp.mean(learner.episodes.last), **losses._asdict()}
    metrics |= update_statistics(learner.network, rollout.extras, hyper)
    if learner.rewards is not None:
        metrics["reward_std"] = learner.rewards.std
    return learner, metrics


def update_statistics(
    network: StatefulModule, extras: Any, hyper: Hyperparameters
) -> dict[str, Array]:
    """Folds a rollout into the network's statistics, and watches it happen."""
    normalizer = observation_normalizer(network)
    if normalizer is None:
        network.update_statistics(extras)
        return {}
    normalized = normalizer.normalize(extras[0])
    clip_share = jnp.mean(jnp.abs(normalized) >= hyper.observation_clip)
    before = normalizer.mean.get_value()
    network.update_statistics(extras)
    mean, std = normalizer.mean.get_value(), normalizer.std
    return {
        "count": normalizer.counter.get_value(),
        "clip_share": clip_share,
        "drift": jnp.max(jnp.abs(mean - before) / std),
        "mean": mean,
        "std": std,
    }


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
    r"""Generalized advantage estimates along the leading axis.

    With $\delta_t = r_t + \gamma (1 - \text{terminated}_t) V(s'_t) - V(s_t)$,

    $$A_t = \delta_t + \gamma \lambda (1 - \text{ended}_t) A_{t+1}.$$

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


class Losses(NamedTuple):
    """The parts of the loss, and how far the policy moved."""

    policy_loss: Array
    value_loss: Array
    entropy: Array
    ratio_clipped: Array
    """Share of ratios beyond the clip."""


def learn(
    network: StatefulModule,
    optimizer: nnx.Optimizer,
    batch: Batch,
    key: Array,
    hyper: Hyperparameters,
) -> tuple[StatefulModule, nnx.Optimizer, Losses]:
    """Epochs of gradient steps over shuffled minibatches."""

    def step(
        carry: tuple[StatefulModule, nnx.Optimizer], rows: Array
    ) -> tuple[tuple[StatefulModule, nnx.Optimizer], Losses]:
        network, optimizer = carry
        minibatch = jax.tree.map(lambda x: x[rows], batch)
        grads, losses = nnx.grad(ppo_loss, has_aux=True)(network, minibatch, hyper)
        optimizer.update(network, grads)
        return (network, optimizer), losses

    # Sorting random numbers shuffles; `permutation` would sort twice.
    shuffled = jnp.argsort(jax.random.bits(key, (hyper.epochs, len(batch.advantage))))
    rows = shuffled.reshape(hyper.epochs * hyper.minibatches, -1)
    (network, optimizer), losses = jax.lax.scan(step, (network, optimizer), rows)
    return network, optimizer, jax.tree.map(jnp.mean, losses)


def ppo_loss(
    network: StatefulModule, batch: Batch, hyper: Hyperparameters
) -> tuple[Array, Losses]:
    """The clipped surrogate, the value's squared error and the entropy."""
    # Extras that are not None: the network replays, it emits nothing new.
    out = network(batch.network_state, batch.observation, batch.extras)
    policy, value = out.output["policy"], out.output["value"]
    ratio = jnp.exp(policy.log_prob(batch.action) - batch.log_prob)
    clipped = jnp.clip(ratio, 1 - hyper.ratio_clip, 1 + hyper.ratio_clip)
    advantage = batch.advantage - jnp.mean(batch.advantage)
    advantage /= jnp.std(batch.advantage) + 1e-8
    losses = Losses(
        policy_loss=-jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage)),
        value_loss=0.5 * jnp.mean((value - batch.target) ** 2),
        entropy=jnp.mean(policy.entropy()),
        ratio_clipped=jnp.mean(ratio != clipped),
    )
    total = (
        losses.policy_loss
        + hyper.value_weight * losses.value_loss
        - hyper.entropy_weight * losses.entropy
        + jnp.mean(out.regularization_loss)
    )
    return total, losses


def flatten(tree: Any) -> Any:
    """Leaves `[T, B, ...]` to `[T * B, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
