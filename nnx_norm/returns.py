# SPDX-License-Identifier: Apache-2.0
"""Running returns: their Variable type, and the step that the ports take."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nnx_norm.extended import double, join, split
from nnx_norm.samples import align_leading


class RunningReturn(nnx.Variable):
    """Variable type of running returns: one per environment, sharded like them.

    Example:
      >>> from nnx_norm import RewardNormalizer
      >>> state = nnx.state(RewardNormalizer(0.99, num_envs=4), RunningReturn)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]
      [(4,)]
    """


@partial(jax.jit, static_argnames=("gamma",))
def advance(
    returns: list[jax.Array],
    residuals: list[jax.Array],
    rewards: list[jax.Array],
    ended: jax.Array,
    gamma: float,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`R * gamma * (1 - ended) + reward`, in float64 grade.

    Where an episode ended its history is dropped before the reward of that very step
    is added: the convention of the ports, one step earlier than `RewardNormalizer`'s.

    Args:
      returns: float32 arrays `[N, *shape]`.
      residuals: What float32 can't hold of them, the same shapes.
      rewards: Arrays of these shapes, of any real dtype.
      ended: Bool array `[N]`, or of the shape of every reward.
      gamma: Discount.

    Returns:
      New returns and residuals.

    Example:
      >>> old, rest = [jnp.array([4.0, 4.0])], [jnp.zeros(2)]
      >>> rewards, ended = [jnp.ones(2)], jnp.array([False, True])
      >>> [v.tolist() for v in advance(old, rest, rewards, ended, 0.5)[0]]
      [[3.0, 1.0]]
    """

    def step(value: Any, rest: Any, reward: Any) -> tuple[jax.Array, jax.Array]:
        # A product with zero would carry a NaN over into the next episode.
        history = jnp.where(align_leading(ended, value), 0.0, join(value, rest))
        return split(history * gamma + reward.astype(jnp.float64))

    rewards = lax.stop_gradient(rewards)
    with double():
        pairs = list(map(step, returns, residuals, rewards))
    return [value for value, _ in pairs], [rest for _, rest in pairs]
