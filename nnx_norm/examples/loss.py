# SPDX-License-Identifier: Apache-2.0
"""Learning from a batch: the clipped loss, in epochs of minibatches.

References:
  Schulman et al., *Proximal Policy Optimization Algorithms*, 2017.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nnx_norm import StatefulModule
from nnx_norm.examples import devices
from nnx_norm.examples.learner import Hyperparameters
from nnx_norm.examples.rollout import Batch


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
    rows = devices.split(rows, axis=1)  # and so the work on each minibatch
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
