# SPDX-License-Identifier: Apache-2.0
"""When statistics move in PPO: in `update_statistics`, once an iteration, never else.

A real rollout of a point that is pushed about, a clipped loss and gradient steps, in
our containers; one iteration is compiled once and shared by the tests.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import bits, moments64

from nnx_norm import Normalizer, Parallel, RewardNormalizer, Sequential
from nnx_norm.statistics import NormalizerStatistics

T, B, EPOCHS, MINIBATCHES = 6, 6, 4, 3
LIMIT = 4  # steps until an episode is cut off


class Agent(nnx.Module):
    """Policy and value behind one normalizer, which so folds every row once."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        normalizer = Normalizer({"pos": 2, "goal": 2})
        heads = Parallel(actor=nnx.Linear(4, 2, rngs=rngs), critic=Value(rngs))
        self.net = Sequential([normalizer, joined, heads])
        self.rewards = RewardNormalizer(0.9, num_envs=B)


class Value(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)[..., 0]


def joined(x: dict[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([x["goal"], x["pos"]], -1)


class Rollout(NamedTuple):
    """What a loss needs: leaves `[T, B, ...]`."""

    obs: Any
    extras: Any
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    cut: jax.Array


def log_prob(mean: jax.Array, action: jax.Array) -> jax.Array:
    return -0.5 * jnp.sum((action - mean) ** 2, -1)


def observe(pos: jax.Array) -> dict[str, jax.Array]:
    return {"pos": 100 + 10 * pos, "goal": jnp.full_like(pos, 3.0)}


@nnx.jit
def act(agent: Agent, key: jax.Array) -> Rollout:
    """A rollout; the agent is closed over inside, as everywhere."""

    def step(carry: Any, now: Any) -> Any:
        state, pos, t = carry
        obs = observe(pos)
        out = agent.net(state, obs)
        noise = jax.random.normal(jax.random.fold_in(key, now), (B, 2), jnp.float32)
        action = out.output["actor"] + noise
        t, moved = t + 1, pos + 0.1 * action
        cut = t >= LIMIT
        pos = jnp.where(cut[:, None], 0.5 * noise, moved)
        seen = Rollout(
            obs,
            out.rollout_extras,
            action,
            log_prob(out.output["actor"], action),
            -jnp.sum(moved**2, -1),
            cut,
        )
        return (out.next_state, pos, jnp.where(cut, 0, t)), seen

    start = jnp.linspace(-1, 1, 2 * B, dtype=jnp.float32).reshape(B, 2)
    first = (agent.net.initialize_state(B), start, jnp.arange(B) % LIMIT)
    return jax.lax.scan(step, first, jnp.arange(T))[1]


def replayed(net: Sequential, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """Ratios and values of the stored steps, extras handed back."""

    def step(state: Any, now: Rollout) -> Any:
        out = net(state, now.obs, now.extras)
        ratio = jnp.exp(log_prob(out.output["actor"], now.action) - now.log_prob)
        return out.next_state, (ratio, out.output["critic"])

    state = net.initialize_state(rollout.reward.shape[1])
    return jax.lax.scan(step, state, rollout)[1]


def loss(net: Sequential, rollout: Rollout, scaled: jax.Array) -> Any:
    ratio, value = replayed(net, rollout)
    gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled)
    return jnp.mean((value - scaled) ** 2) - jnp.mean(gain), ratio


@nnx.jit
def learn(
    agent: Agent, optimizer: nnx.Optimizer, rollout: Rollout, scaled: jax.Array
) -> jax.Array:
    """One gradient step on the environments of a minibatch; the ratios before it."""
    wrt = nnx.DiffState(0, nnx.Param)
    grads, ratio = nnx.grad(loss, argnums=wrt, has_aux=True)(agent.net, rollout, scaled)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies ints with floats
        optimizer.update(agent.net, grads)
    return ratio


class Stage(NamedTuple):
    """What was seen on the way through one iteration."""

    agent: Agent
    rollout: Rollout
    ratios: list[np.ndarray]  # of every minibatch, in order
    bits: dict[str, dict[str, Any]]  # of the statistics, by stage
    params: list[Any]  # before and after the gradient steps


def statistics(agent: Agent) -> dict[str, Any]:
    """The bits of all that isn't a parameter, running returns included."""
    found = bits(agent).items()
    return {k: v for k, v in found if "kernel" not in k and "bias" not in k}


@functools.cache
def iteration() -> Stage:
    """Rollout, epochs of minibatches, then the one update; after a warm first one."""
    agent, seen, ratios = Agent(), {}, []
    optimizer = nnx.Optimizer(agent.net, optax.adamw(1e-2), wrt=nnx.Param)
    warm = act(agent, jax.random.key(1))
    agent.net.update_statistics(warm.extras)
    agent.rewards.update(warm.reward, jnp.zeros((T, B), bool), warm.cut)
    seen["start"] = statistics(agent)
    params = [jax.tree.map(jnp.copy, nnx.state(agent, nnx.Param))]
    rollout = act(agent, jax.random.key(2))
    scaled = agent.rewards.normalize(rollout.reward)
    seen["rollout"] = statistics(agent)
    for _ in range(EPOCHS):
        for i in range(MINIBATCHES):
            part = slice(i, None, MINIBATCHES)  # of the environments, over all time
            some, aims = jax.tree.map(lambda v, p=part: v[:, p], (rollout, scaled))
            ratios.append(np.asarray(learn(agent, optimizer, some, aims)))
    seen["epochs"] = statistics(agent)
    params.append(jax.tree.map(jnp.copy, nnx.state(agent, nnx.Param)))
    agent.net.update_statistics(rollout.extras)
    agent.rewards.update(rollout.reward, jnp.zeros((T, B), bool), rollout.cut)
    seen["update"] = statistics(agent)
    return Stage(agent, rollout, ratios, seen, params)


def moved(a: Any, b: Any) -> bool:
    """Whether every leaf of two trees differs."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.any(np.asarray(x) != np.asarray(y)) for x, y in pairs)


def test_the_ratio_is_exactly_one_before_the_first_gradient_step():
    stage = iteration()
    assert np.all(stage.ratios[0] == 1.0)
    # Teeth: parameters moved since, and so have the ratios of the same minibatch.
    assert np.all(stage.ratios[MINIBATCHES] != 1.0)


def test_statistics_that_moved_in_between_would_show_in_the_ratio():
    stage = iteration()
    agent = nnx.clone(stage.agent)
    nnx.update(agent, stage.params[0])
    ratio = nnx.jit(replayed)(agent.net, stage.rollout)[0]  # statistics of after
    assert np.all(np.asarray(ratio) != 1.0)
    agent.net[0].copy_from(before := Agent().net[0])
    warm = act(Agent(), jax.random.key(1))
    agent.net[0].update_statistics(warm.extras[0])
    assert before.count == 0 and agent.net[0].count == T * B
    assert np.all(np.asarray(nnx.jit(replayed)(agent.net, stage.rollout)[0]) == 1.0)


def test_rollout_epochs_and_minibatches_fold_nothing():
    stage = iteration()
    assert len(stage.ratios) == EPOCHS * MINIBATCHES
    assert stage.bits["start"] == stage.bits["rollout"] == stage.bits["epochs"]
    assert moved(*stage.params)  # while everything that trains did


def test_the_update_folds_each_stored_input_once():
    stage = iteration()
    after, before = stage.bits["update"], stage.bits["epochs"]
    changed = "\n".join(k for k, v in after.items() if v != before[k])
    assert "mean" in changed and "running_return" in changed
    norm = stage.agent.net[0]
    assert norm.count == stage.agent.rewards.count == 2 * T * B  # with the warm one
    both = [act(Agent(), jax.random.key(1)).obs, stage.rollout.obs]
    d = norm.to_dict()
    for key in ("pos", "goal"):
        rows = np.concatenate([np.asarray(obs[key]).reshape(-1, 2) for obs in both])
        right = moments64(rows)
        np.testing.assert_allclose(d["mean"][key], right.mean, rtol=1e-6)
        np.testing.assert_allclose(d["M2"][key], right.M2, rtol=1e-4, atol=1e-9)
    for key, stored in stage.rollout.extras[0].items():  # s_t, and not s_{t+1}
        assert np.array_equal(stored, stage.rollout.obs[key])


PATHS = {
    "rollout": lambda a, r: act(a, jax.random.key(5)),
    "forward": lambda a, r: a.net(
        a.net.initialize_state(B), observe(jnp.ones((B, 2), jnp.float32))
    ),
    "replay": lambda a, r: replayed(a.net, r),
    "normalize": lambda a, r: a.net[0].normalize(r.obs),
    "denormalize": lambda a, r: a.net[0].denormalize(r.obs),
    "rewards": lambda a, r: a.rewards.denormalize(a.rewards.normalize(r.reward)),
    "reset": lambda a, r: a.net.reset_state(a.net.initialize_state(B)),
    "read": lambda a, r: (a.net[0].std, a.net[0].count, a.net[0].to_dict()),
}
FOLDS = {
    "update": lambda a, r: a.net.update_statistics(r.extras),
    "masked": lambda a, r: a.net.update_statistics(r.extras, mask=~r.cut),
    "weighted": lambda a, r: a.net.update_statistics(r.extras, weights=-r.reward),
    "the normalizer itself": lambda a, r: a.net[0].update_statistics(r.obs),
    "jitted": lambda a, r: nnx.jit(Sequential.update_statistics)(a.net, r.extras),
    "not finite": lambda a, r: a.net[0].update_statistics(
        jax.tree.map(lambda v: v * jnp.nan, r.obs)
    ),
    "merge": lambda a, r: a.net[0].merge_from(Agent().net[0]),
    "merge a dict": lambda a, r: a.net[0].merge_from(a.net[0].to_dict()),
    "rewards": lambda a, r: a.rewards.update(r.reward, r.cut),
    "merge rewards": lambda a, r: a.rewards.merge_from(a.rewards.to_dict()),
}


@pytest.mark.parametrize("path", PATHS)
def test_evaluation_changes_nothing(path):
    stage = iteration()
    before = bits(stage.agent)
    PATHS[path](stage.agent, stage.rollout)
    assert bits(stage.agent) == before


@pytest.mark.parametrize("path", FOLDS)
def test_what_is_frozen_folds_on_no_path(path):
    stage = iteration()
    agent = nnx.clone(stage.agent)
    for norm in (agent.net[0], agent.rewards):
        norm.freeze()
    before = bits(agent)
    FOLDS[path](agent, stage.rollout)
    assert bits(agent) == before


def test_the_optimizer_holds_no_statistics():
    agent = Agent()
    optimizer = nnx.Optimizer(agent.net, optax.adamw(1e-2), wrt=nnx.Param)
    held = [v for _, v in nnx.iter_graph(optimizer) if isinstance(v, nnx.Variable)]
    assert held and not any(isinstance(v, NormalizerStatistics) for v in held)
