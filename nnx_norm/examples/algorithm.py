# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization around a policy graph with statistics in it.

One `train_step` is a pure function of a `Learner`: a rollout by `lax.scan`
whose read-only forward emits extras, advantages, epochs of minibatches that
replay the extras, and, last of all, the one `update_statistics`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nnx_norm import StatefulModule, metrics
from nnx_norm.examples.agent import observation_normalizer
from nnx_norm.examples.environments import Environment
from nnx_norm.examples.learner import Hyperparameters, Learner
from nnx_norm.examples.loss import learn
from nnx_norm.examples.rollout import make_batch, roll_out


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

    numbers = {"return": jnp.mean(learner.episodes.last), **losses._asdict()}
    numbers |= update_statistics(learner.network, rollout.extras)
    if learner.rewards is not None:
        numbers["reward_std"] = learner.rewards.std
    return learner, numbers


def update_statistics(network: StatefulModule, extras: Any) -> dict[str, Array]:
    """Folds a rollout into the network's statistics, and watches it happen."""
    normalizer = observation_normalizer(network)
    if normalizer is None:
        network.update_statistics(extras)
        return {}
    before = nnx.clone(normalizer)
    clipped = metrics(before, extras=extras[0])["clipped"]  # as the policy saw them
    network.update_statistics(extras)
    now = metrics(normalizer, since=before)
    return {
        **{name: now[name] for name in ("count", "skipped", "drift")},
        "clip_share": clipped,
        "mean": normalizer.mean.get_value(),
        "std": normalizer.std,
    }
