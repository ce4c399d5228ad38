# SPDX-License-Identifier: Apache-2.0
"""A policy graph to test: the smallest modules of each kind, and what runs them."""

import importlib
import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import modules as ours
from nnx_norm.modules import (
    Concat,
    Delay,
    Parallel,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
)

# Containers of every library at hand that only duck-types its children: each law about
# containers holds for ours, and with theirs around ours and ours around theirs.
LIBRARIES = [ours]
if importlib.util.find_spec("nnx_ppo"):
    LIBRARIES.append(importlib.import_module("nnx_ppo.networks.containers"))
libraries = pytest.mark.parametrize(
    "library", LIBRARIES, ids=[library.__name__ for library in LIBRARIES]
)

B, T, F = 4, 5, 3


class Seen(nnx.Variable):
    """A statistic, to tell from parameters."""


class Tally(StatefulModule):
    """Sum and number of the rows it saw: the smallest stats-bearing module."""

    def __init__(self):
        self.total = Seen(jnp.zeros(F, jnp.float32))
        self.rows = Seen(jnp.float32(0))

    def __call__(self, state, x, rollout_extras=None):
        emitted = x if rollout_extras is None else rollout_extras
        loss, metrics = jnp.zeros((), jnp.float32), {"first": x[:, 0]}
        return StatefulModuleOutput(state, x + 1, loss, metrics, emitted)

    def update_statistics(self, rollout_extras, *, mask=None):
        if rollout_extras.shape[-1] != F:
            raise ValueError("history has the wrong number of features")
        valid = (
            jnp.ones(rollout_extras.shape[:-1], jnp.float32) if mask is None else mask
        )
        weight = valid.astype(jnp.float32)
        total = (rollout_extras * weight[..., None]).sum(tuple(range(weight.ndim)))
        self.total.set_value(self.total.get_value() + total)
        self.rows.set_value(self.rows.get_value() + weight.sum())


class Maskless(Tally):
    """As a library's that knows no masks."""

    def update_statistics(self, rollout_extras):  # pyright: ignore
        super().update_statistics(rollout_extras)


class Memory(StatefulModule):
    """The sum of an episode's inputs, and a loss per environment."""

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size, F), jnp.float32)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        state = state + x
        return StatefulModuleOutput(state, state, x[:, 0], {}, rollout_extras)


class Duck:
    """The four methods and nothing else: no nnx, an output of its own kind."""

    def initialize_state(self, batch_size):
        return jnp.zeros(batch_size, jnp.float32)

    def reset_state(self, prev_state):
        return prev_state * 0

    def update_statistics(self, rollout_extras):
        pass

    def __call__(self, state, x, rollout_extras=None):
        return SimpleNamespace(
            next_state=state + 1,
            output=x * 2,
            regularization_loss=jnp.asarray(0.0),
            metrics={},
            rollout_extras=None,
        )


def double(x):
    """A function that pickles, unlike jnp.tanh."""
    return 2 * x


def batch(seed=0, *lead):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=(*(lead or (B,)), F)), jnp.float32
    )


def linear(seed=0, features=F):
    return nnx.Linear(F, features, rngs=nnx.Rngs(seed))


def values(module):
    state = nnx.state(module, nnx.Not(nnx.RngKey))  # NumPy takes no keys
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def tallies(module):
    return [m for _, m in nnx.iter_modules(module) if isinstance(m, Tally)]


@jax.jit
def rollout(net, xs):
    """A rollout as a training loop does it: the module closed over, extras stacked.

    Compiled once for equal graphs, which is most of what these tests take.
    """

    def step(state, x):
        out = net(state, x)
        return out.next_state, (out.output, out.rollout_extras)

    return jax.lax.scan(step, net.initialize_state(xs.shape[1]), xs)


def graph():
    """Every kind of module at once."""
    return Sequential(
        [
            Tally(),
            Delay(jnp.zeros(F, jnp.float32), 2),
            linear(1),
            Parallel(b=Sequential([Tally(), double]), a=Memory()),
            Concat(b=linear(2, 2), a=Tally()),
        ]
    )
