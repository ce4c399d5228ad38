# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The ends of brax's episodes, told by its wrappers, against a loop without them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs
from test_jax_env import check, returns64, run_readme, variance_of_updates

from nnx_norm.jax_env import brax_ends

LIMIT, B = 20, 8


@pytest.fixture(autouse=True)
def their_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition.reshape(-1, *[1] * (y.ndim - 1)), x, y)


def alone(env: Any, actions: Any, limit: int) -> tuple[np.ndarray, ...]:
    """Rewards, own ends and time-outs `[T, B]` by steps of the bare environment.

    Whoever has ended goes back to where they first started.
    """
    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    number = actions.shape[1]
    first = state = reset(jax.random.split(jax.random.PRNGKey(0), number))
    time, seen = np.zeros(number, int), []
    for action in actions:
        state = step(state, action)
        time += 1
        own, out = np.asarray(state.done) == 1, time == limit
        seen.append((np.asarray(state.reward), own, out))
        over = own | out
        time[over] = 0
        state = jax.tree.map(functools.partial(where, over), first, state)
    rewards, own, out = map(np.stack, zip(*seen, strict=True))
    return rewards, own, out


def test_brax_ends_its_episodes_where_a_loop_does():
    env = envs.get_environment("inverted_pendulum")
    wrapped = envs.training.wrap(env, episode_length=LIMIT)
    actions = jax.random.uniform(jax.random.key(1), (300, B, 1), minval=-3, maxval=3)

    def step(state: Any, action: Any) -> Any:
        after = wrapped.step(state, action)
        ends = brax_ends(after), brax_ends(after, limit=LIMIT)
        return after, (after.reward, after.done, after.info["truncation"], ends)

    @jax.jit
    def run(actions: Any) -> Any:
        start = wrapped.reset(jax.random.split(jax.random.PRNGKey(0), B))
        return jax.lax.scan(step, start, actions)[1]

    rewards, done, truncation, (ends, counted) = run(actions)
    right, own, out = alone(env, actions, LIMIT)
    assert (own & ~out).any() and (out & ~own).any()
    check(ends, own, out & ~own)
    check(counted, own & ~out, out)
    assert done.dtype == truncation.dtype == jnp.float32
    np.testing.assert_allclose(rewards, right, rtol=1e-5)
    # The pendulum earns 1 for every step; other rewards tell more about the ends.
    rewards = jnp.asarray(np.random.default_rng(0).normal(3, 2, own.shape), "f4")
    variance = np.var(returns64(rewards, own | out))
    got = variance_of_updates(rewards, ends)
    np.testing.assert_allclose(got, variance, rtol=1e-6)
    assert abs(np.var(returns64(rewards, own)) / variance - 1) > 1e-3


def test_brax_example_of_the_readme():
    names = run_readme("brax")
    actions = np.ones((128, 16, 1), np.float32)
    env = envs.get_environment("inverted_pendulum")
    rewards, own, out = alone(env, actions, limit=50)
    check(names["ends"], own, out & ~own)
    assert names["norm"].count == names["rewards"].count == 128 * 16
    got = names["rewards"].to_dict()["variance"]
    right = np.var(returns64(rewards, own | out, gamma=0.99))
    np.testing.assert_allclose(got, right, rtol=1e-6)
