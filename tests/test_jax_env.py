# SPDX-License-Identifier: Apache-2.0
"""Ends of episodes, as each library tells them, against episodes written down in loops.

nnx-ppo is there on every stack, gymnax where it installs; brax: tests/interop.
"""

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nnx_ppo.wrappers.episode_wrapper import EpisodeWrapper
from small_env import State, Walk
from support import assert_moments
from test_readme import ROOT, blocks

from nnx_norm import Normalizer, RewardNormalizer
from nnx_norm.jax_env import Ends, brax_ends, gymnax_ends

GAMMA, LIMIT, T, B = 0.9, 6, 60, 4


class Episodes(NamedTuple):
    """What happened in each step `[T, B]`: its number, and whether an end came."""

    time: np.ndarray
    """Steps of the episode before this one."""
    own: np.ndarray
    """The episode ends by its own rule."""
    out: np.ndarray
    """It has had as many steps as the limit allows."""

    @property
    def truncated(self) -> np.ndarray:
        return self.out & ~self.own


def episodes(seed: int = 0) -> Episodes:
    """Episodes that would last 1 to 9 steps by themselves, one after the other."""
    rng = np.random.default_rng(seed)
    found = Episodes(np.zeros((T, B), np.int32), *np.zeros((2, T, B), bool))
    for env in range(B):
        time, length = 0, rng.integers(1, 10)
        for t in range(T):
            found.time[t, env] = time
            time += 1
            found.own[t, env], found.out[t, env] = time == length, time == LIMIT
            if time == min(length, LIMIT):
                time, length = 0, rng.integers(1, 10)
    both = found.own & found.out
    assert both.any() and found.truncated.any() and (found.own & ~found.out).any()
    return found


def returns64(rewards: Any, done: Any, gamma: float = GAMMA) -> np.ndarray:
    """Discounted returns `[T, B]`, in a loop; each ends after its episode's reward."""
    running, found = np.zeros(np.shape(rewards)[1]), []
    for reward, end in zip(np.asarray(rewards, np.float64), done, strict=True):
        running = gamma * running + reward
        found.append(running)
        running = np.where(end, 0.0, running)
    return np.stack(found)


def variance_of_updates(rewards: Any, ends: Ends) -> float:
    """The variance that two updates with one half of the steps each arrive at."""
    norm = RewardNormalizer(GAMMA, num_envs=np.shape(rewards)[1])
    half = len(rewards) // 2
    for part in (slice(None, half), slice(half, None)):
        norm.update(rewards[part], *(flags[part] for flags in ends))
    assert norm.count == np.size(rewards)
    return float(norm.to_dict()["variance"])


def brax_state(e: Episodes, dtype: Any = np.float32) -> Any:
    """Stacked states as brax's EpisodeWrapper leaves them."""
    truncation = np.where(e.out, 1 - e.own, 0).astype(dtype)
    info = {"truncation": jnp.asarray(truncation), "steps": jnp.float32(e.time + 1)}
    done = jnp.asarray((e.own | e.out).astype(dtype))
    return State(None, None, jnp.zeros((T, B)), done, {}, info)


def check(ends: Ends, terminated: Any, truncated: Any) -> None:
    for got, right in zip(ends, (terminated, truncated), strict=True):
        assert got.dtype == jnp.bool_ and not got.weak_type
        np.testing.assert_array_equal(got, right)
    np.testing.assert_array_equal(ends.done, np.asarray(terminated | truncated))
    assert not np.any(ends.terminated & ends.truncated)


def scanned(read: Any) -> Any:
    return lambda *tree: jax.lax.scan(lambda _, x: (None, read(*x)), None, tree)[1]


TRANSFORMS = {"eager": lambda f: f, "jit": jax.jit, "vmap": jax.vmap, "scan": scanned}
everywhere = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@everywhere
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.bool_, np.int32])
def test_brax_tells_time_outs_from_ends(transform, dtype):
    e = episodes()
    check(transform(brax_ends)(brax_state(e, dtype)), e.own, e.truncated)


@everywhere
def test_brax_without_its_truncation(transform):
    e, state = episodes(1), brax_state(episodes(1))
    never = state.replace(info={})
    check(transform(brax_ends)(never), e.own | e.out, np.zeros_like(e.own))
    wiped = state.info | {"truncation": jnp.zeros((T, B))}  # full_reset of Playground
    ends = transform(lambda s: brax_ends(s, limit=LIMIT))(state.replace(info=wiped))
    check(ends, e.own & ~e.out, e.out)


@everywhere
def test_gymnax_in_a_brax_state_tells_both_flags(transform):
    e = episodes(2)
    info = {"terminated": jnp.asarray(e.own), "truncated": jnp.asarray(e.out)}
    check(transform(brax_ends)(brax_state(e).replace(info=info)), e.own, e.truncated)


@everywhere
def test_gymnax_in_both_of_its_apis(transform):
    e = episodes(3)
    own, out, time = map(jnp.asarray, (e.own, e.out, e.time))
    ahead, info = (jnp.zeros((T, B, 3)), {"time": time}, jnp.ones((T, B))), {}
    new = (*ahead, own, out, info)
    check(transform(lambda *step: gymnax_ends(step))(*new), e.own, e.truncated)
    info = {"terminated": own, "truncated": out}
    kept = (*ahead, own | out, info)
    check(transform(lambda *step: gymnax_ends(step))(*kept), e.own, e.truncated)
    old = (*ahead, own | out, {})

    def read(time: Any, *step: Any) -> Ends:
        return gymnax_ends(step, time=time, limit=LIMIT)

    check(transform(read)(time, *old), e.own & ~e.out, e.out)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("limit", [LIMIT, jnp.int32(LIMIT), jnp.full((T, B), LIMIT)])
def test_limits_are_numbers_or_one_for_each_environment(dtype, limit):
    e = episodes(4)
    step = (None, None, None, jnp.asarray(e.own | e.out), {})
    time = jnp.asarray(e.time.astype(dtype))
    check(gymnax_ends(step, time=time, limit=limit), e.own & ~e.out, e.out)


@pytest.mark.parametrize("seed", [0, 1])
def test_returns_end_with_their_episodes(seed):
    e, rng = episodes(seed), np.random.default_rng(seed)
    rewards = jnp.asarray(rng.normal(3, 2, (T, B)), jnp.float32)
    got = variance_of_updates(rewards, brax_ends(brax_state(e)))
    right = np.var(returns64(rewards, e.own | e.out))
    np.testing.assert_allclose(got, right, rtol=1e-6)
    # It has teeth: time-outs overlooked, or ends a step late, are other numbers.
    overlooked = np.var(returns64(rewards, e.own))
    late = np.var(returns64(rewards, np.roll(e.own | e.out, 1, 0)))
    assert min(abs(overlooked / right - 1), abs(late / right - 1)) > 1e-2


def test_an_environment_of_nnx_ppo_in_one_jitted_scan():
    env: Any = EpisodeWrapper(Walk(), max_len=20)
    number = 8

    def step(state: Any, key: Any) -> Any:
        action = jax.random.uniform(key, (number, 2), minval=-0.5)
        after = jax.vmap(env.step)(state, action)
        new = jax.vmap(env.reset)(jax.random.split(key, number))

        def where(x: Any, y: Any) -> Any:
            over = after.done.astype(bool).reshape(-1, *[1] * (y.ndim - 1))
            return jnp.where(over, x, y)

        seen = (after.replace(info=dict(after.info)), brax_ends(after))
        return jax.tree.map(where, new, after), seen

    @jax.jit
    def run(key: Any) -> Any:
        keys = jax.random.split(key, number)
        return jax.lax.scan(step, jax.vmap(env.reset)(keys), jax.random.split(key, 300))

    # The environment's own arithmetic wants both.
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        _, (states, ends) = run(jax.random.key(0))
    position = np.asarray(states.data, np.float64)
    own, out = (position**2).sum(-1) > 9, np.asarray(states.info["step_counter"]) == 20
    assert (own & ~out).any() and (out & ~own).any()
    check(ends, own & ~out, out)
    check(brax_ends(states), own & ~out, out)
    got = variance_of_updates(states.reward, ends)
    right = np.var(returns64(states.reward, own | out))
    np.testing.assert_allclose(got, right, rtol=1e-6)


def test_what_does_not_fit_is_refused_by_name():
    state = brax_state(episodes())
    with pytest.raises(TypeError, match="state is a tuple without done or info; expec"):
        brax_ends((1, 2))
    short = state.replace(info={"truncation": jnp.zeros(B)})
    with pytest.raises(ValueError, match=r"info\['truncation'\] has shape \(4,\); exp"):
        jax.jit(brax_ends)(short)
    with pytest.raises(
        ValueError, match=r"no 'steps', only \['truncation'\]; expected"
    ):
        brax_ends(short, limit=5)
    with pytest.raises(ValueError, match="done holds 2.0; expected flags"):
        brax_ends(state.replace(done=state.done * 2))
    with pytest.raises(TypeError, match="done is 'no' of type str; expected an array"):
        brax_ends(SimpleNamespace(done="no", info={}))
    with pytest.raises(TypeError, match="step is a State; expected the tuple"):
        gymnax_ends(state)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"step has 2 entries; expected \(obs, state,"):
        gymnax_ends((0, 0))
    done = jnp.zeros((T, B))
    with pytest.raises(
        ValueError, match="one flag done for both .*; expected time= an"
    ):
        gymnax_ends((0, 0, 0, done, {}), limit=5)
    with pytest.raises(ValueError, match=r"time has shape \(4,\); expected \(60, 4\)"):
        gymnax_ends((0, 0, 0, done, {}), time=jnp.zeros(B), limit=5)
    with pytest.raises(
        ValueError, match=r"limit has shape \(60,\); expected \(60, 4\)"
    ):
        gymnax_ends((0, 0, 0, done, {}), time=done, limit=jnp.zeros(T))
    with pytest.raises(ValueError, match=r"truncated has shape \(4,\); expected \(60,"):
        gymnax_ends((0, 0, 0, done, jnp.zeros(B), {}))


def run_readme(package: str) -> dict[str, Any]:
    """Names after the README's example with that package, for four features."""
    found = blocks((ROOT / "README.md").read_text())
    (code,) = (code for kind, code in found if kind == "py" and package in code)
    norm, rewards = Normalizer(4), RewardNormalizer(0.99)
    names = {"jax": jax, "jnp": jnp, "norm": norm, "rewards": rewards}
    exec(compile(code, "README.md", "exec"), names)
    return names


if importlib.util.find_spec("gymnax"):

    def test_gymnax_itself():
        gymnax = importlib.import_module("gymnax")
        legacy = importlib.import_module("gymnax.wrappers").LegacyStepAPIWrapper
        env, params = gymnax.make("CartPole-v1")
        params, number = params.replace(max_steps_in_episode=20), 8

        def step(carry: Any, key: Any) -> Any:
            state = carry[1]
            action = jax.random.randint(key, (number,), 0, 2)
            args = (jax.random.split(key, number), state, action, params)
            new = jax.vmap(env.step, (0, 0, 0, None))(*args)
            old = jax.vmap(legacy(env).step, (0, 0, 0, None))(*args)
            limit = params.max_steps_in_episode
            bare = gymnax_ends((*old[:4], {}), time=state.time, limit=limit)
            ends = gymnax_ends(new), gymnax_ends(old), bare
            return new[:2], (state.time, new[5]["final_observation"], new[2], ends)

        @jax.jit
        def run(key: Any) -> Any:
            keys = jax.random.split(key, number)
            start = jax.vmap(env.reset, (0, None))(keys, params)
            return jax.lax.scan(step, start, jax.random.split(key, 400))[1]

        with jax.numpy_dtype_promotion("standard"):
            time, final, _, (new, old, bare) = run(jax.random.key(0))
        x, _, angle, _ = np.moveaxis(np.asarray(final, np.float64), -1, 0)
        own = (np.abs(x) > 2.4) | (np.abs(angle) > 12 * 2 * np.pi / 360)
        out = np.asarray(time) == 19
        assert own.any() and (out & ~own).any()
        check(new, own, out & ~own)
        check(old, own, out & ~own)
        check(bare, own & ~out, out)
        # Where an episode ended, the next step is the first of another one.
        np.testing.assert_array_equal(new.done[:-1], np.asarray(time)[1:] == 0)
        # CartPole's rewards are all 1; others tell more about the ends.
        rewards = jnp.asarray(np.random.default_rng(0).normal(3, 2, out.shape), "f4")
        got = variance_of_updates(rewards, new)
        right = np.var(returns64(rewards, own | out))
        np.testing.assert_allclose(got, right, rtol=1e-6)

    def test_gymnax_example_of_the_readme():
        with jax.numpy_dtype_promotion("standard"):
            names = run_readme("gymnax")
        x = np.asarray(names["x"], np.float64)
        assert_moments(names["norm"], x.reshape(-1, 4))
        # A start is near 0 in all features; a push away from it gives some speed.
        new = np.all(np.abs(x[1:]) <= 0.05, axis=-1)
        assert 5 < np.mean(new.sum(0)) < 20
        returns = returns64(names["r"], [*new, new[0]], gamma=0.99)
        assert names["rewards"].count == 128 * 16
        got = names["rewards"].to_dict()["variance"]
        np.testing.assert_allclose(got, np.var(returns), rtol=1e-6)
