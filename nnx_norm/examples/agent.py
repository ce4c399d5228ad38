# SPDX-License-Identifier: Apache-2.0
"""The policy graph of the PPO example: a normalizer ahead of two heads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nnx_norm import Lift, Normalizer, Parallel, Sequential, StatefulModule
from nnx_norm.examples.environments import Continuous, Discrete, Environment


class Gaussian(NamedTuple):
    """Independent normal distributions, one for each number of an action."""

    mean: Array
    log_std: Array

    def sample(self, key: Array) -> Array:
        """One action each."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: Array) -> Array:
        """Log density of each action."""
        z = (action - self.mean) / jnp.exp(self.log_std)
        return -jnp.sum(0.5 * z**2 + self.log_std + 0.5 * jnp.log(2 * jnp.pi), -1)

    def entropy(self) -> Array:
        """Of each distribution."""
        return jnp.sum(self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e), -1)


class Categorical(NamedTuple):
    """A choice among actions `0 .. n - 1`."""

    logits: Array

    def sample(self, key: Array) -> Array:
        """One action each."""
        return jax.random.categorical(key, self.logits)

    def log_prob(self, action: Array) -> Array:
        """Log probability of each action."""
        log_p = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_p, action[..., None], -1)[..., 0]

    def entropy(self) -> Array:
        """Of each distribution."""
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, -1)


class GaussianHead(nnx.Module):
    """Features to a `Gaussian` whose spread does not depend on them."""

    def __init__(self, features: int, size: int, *, rngs: nnx.Rngs):
        self.mean = linear(features, size, 0.01, rngs)
        self.log_std = nnx.Param(jnp.zeros(size, jnp.float32))

    def __call__(self, x: Array) -> Gaussian:
        """The distribution for each row."""
        mean = self.mean(x)
        log_std = jnp.broadcast_to(self.log_std.get_value(), mean.shape)
        return Gaussian(mean, log_std)


class CategoricalHead(nnx.Module):
    """Features to a `Categorical`."""

    def __init__(self, features: int, count: int, *, rngs: nnx.Rngs):
        self.logits = linear(features, count, 0.01, rngs)

    def __call__(self, x: Array) -> Categorical:
        """The distribution for each row."""
        return Categorical(self.logits(x))


class ValueHead(nnx.Module):
    """Features to one number."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.value = linear(features, 1, 1.0, rngs)

    def __call__(self, x: Array) -> Array:
        """One number for each row."""
        return self.value(x)[..., 0]


def linear(features: int, out: int, gain: float, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer whose outputs start about `gain` times as large as its inputs.

    Not orthogonal, as is usual in PPO: with jax 0.10 on few cores, several of the
    QR decompositions that takes can wait for each other for good.
    """
    init = nnx.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal")
    return nnx.Linear(features, out, kernel_init=init, rngs=rngs)


def policy_head(
    actions: Discrete | Continuous, features: int, rngs: nnx.Rngs
) -> GaussianHead | CategoricalHead:
    """The last layer of the policy for that kind of actions."""
    if isinstance(actions, Discrete):
        return CategoricalHead(features, actions.count, rngs=rngs)
    return GaussianHead(features, actions.size, rngs=rngs)


def build_network(
    environment: Environment,
    rngs: nnx.Rngs,
    *,
    normalize: bool,
    clip: float | None = None,
    hidden: int = 64,
) -> Sequential:
    """Normalizer, then policy and value, each with two hidden layers."""
    size = len(environment.features)

    def head(last: nnx.Module) -> Sequential:
        return Sequential(
            [
                Lift(linear(size, hidden, 1.0, rngs)),
                Lift(nnx.tanh),
                Lift(linear(hidden, hidden, 1.0, rngs)),
                Lift(nnx.tanh),
                Lift(last),
            ]
        )

    # Before its first update a normalizer knows nothing; so large a std keeps all
    # of the first rollout inside the clip and lets the policy act at random.
    normalizer = [Normalizer(size, clip=clip, initial_std=1e6)] if normalize else []
    heads = Parallel(
        policy=head(policy_head(environment.actions, hidden, rngs)),
        value=head(ValueHead(hidden, rngs=rngs)),
    )
    return Sequential([*normalizer, heads])


def observation_normalizer(network: StatefulModule) -> Normalizer | None:
    """The network's first layer, if that is a normalizer."""
    first = network.layers[0] if isinstance(network, Sequential) else None
    return first if isinstance(first, Normalizer) else None


def to_environment(actions: Discrete | Continuous, action: Array) -> Array:
    """A sampled action in the environment's own range.

    The policy works around zero with a spread of one, whatever the range; what
    it samples beyond the range is cut off here, so that no environment charges
    for more than it can do.
    """
    if isinstance(actions, Discrete):
        return action
    middle, reach = (actions.high + actions.low) / 2, (actions.high - actions.low) / 2
    return middle + reach * jnp.clip(action, -1, 1)
