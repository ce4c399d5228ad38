# SPDX-License-Identifier: Apache-2.0
"""Vector environments: what they did is what is folded, in every autoreset mode."""

import runpy
import sys
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from nnx_norm import Normalizer, RewardNormalizer, check_statistics, vector_env
from nnx_norm.vector_env import NormalizeVectorEnv

GAMMA = 0.9
Episode = list[
    tuple[np.ndarray, float]
]  # observation, and the reward that came with it


class Counting(gymnasium.Env[Any, Any]):
    """Episodes of known length, observations and rewards, all of them written down."""

    def __init__(self, seed: int = 0):
        self.rng, self.episodes = np.random.default_rng(seed), []
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.length = 0

    def _observe(self, reward: float) -> Any:
        observation = self.rng.normal([1e3, -5], [1, 20]).astype(np.float32)
        self.episodes[-1].append((observation, reward))
        return observation

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episodes.append([])
        self.length = int(self.rng.integers(1, 5))
        return self._observe(np.nan), {}

    def step(self, action: Any) -> Any:
        reward = float(np.float32(self.rng.normal(3, 2)))
        observation = self._observe(reward)
        over = len(self.episodes[-1]) > self.length
        cut = over and self.length % 2 == 0
        return observation, reward, over and not cut, cut, {}


class CountingDict(Counting):
    """The same with a dict of observations, one of them an integer."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.observation_space = gymnasium.spaces.Dict(
            pos=self.observation_space, goal=gymnasium.spaces.Discrete(7)
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, infos = super().reset()
        return {"pos": observation, "goal": int(observation[0]) % 7}, infos

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return {"pos": observation, "goal": int(observation[0]) % 7}, *rest


def made(mode: AutoresetMode, kind: Any = Counting) -> tuple[SyncVectorEnv, list[Any]]:
    envs = [kind(seed) for seed in range(3)]
    makers = [lambda env=env: env for env in envs]
    return SyncVectorEnv(makers, autoreset_mode=mode), envs


def run(wrapped: NormalizeVectorEnv, mode: AutoresetMode, steps: int) -> None:
    wrapped.reset()
    for _ in range(steps):
        *_, terminated, truncated, _ = wrapped.step(np.zeros(3, int))
        over = terminated | truncated
        if mode == AutoresetMode.DISABLED and over.any():
            wrapped.reset(options={"reset_mask": over})
    wrapped.fold()


def episodes(envs: list[Any]) -> list[Episode]:
    return [episode for env in envs for episode in env.episodes]


modes = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda m: m.name)


@modes
@pytest.mark.parametrize("fold_every", [1, 4, None])
def test_every_observation_and_every_reward_counts_once(mode, fold_every):
    vector, envs = made(mode)
    norm, rewards = Normalizer(2), RewardNormalizer(GAMMA)
    wrapped = NormalizeVectorEnv(vector, norm, rewards, fold_every=fold_every)
    run(wrapped, mode, 17)
    seen = np.stack([o for episode in episodes(envs) for o, _ in episode])
    assert norm.count == len(seen)
    d, x = norm.to_dict(), seen.astype(np.float64)
    assert np.all(np.abs(d["mean"] - x.mean(0)) <= 1e-7 * x.std(0))
    np.testing.assert_allclose(d["variance"], x.var(0), rtol=2e-7)

    returns = []
    for episode in episodes(envs):
        running = 0.0
        for _, reward in episode[1:]:
            running = GAMMA * running + reward
            returns.append(running)
    assert rewards.count == len(returns)
    np.testing.assert_allclose(
        rewards.to_dict()["variance"], np.var(returns), rtol=1e-6
    )


@modes
def test_what_comes_out_is_normalized_and_the_raw_is_kept(mode):
    vector, envs = made(mode)
    norm, rewards = Normalizer(2, clip=0.5), RewardNormalizer(GAMMA)
    norm.set_statistics(np.array([1e3, 0.0]), np.array([1.0, 25.0]), 10)
    rewards.set_statistics(0.0, 4.0, 10)
    norm.freeze()
    rewards.freeze()
    wrapped = NormalizeVectorEnv(vector, norm, rewards)
    assert wrapped.single_observation_space == gymnasium.spaces.Box(-0.5, 0.5, (2,))
    observation, _ = wrapped.reset()
    for _ in range(6):
        np.testing.assert_array_equal(
            observation, norm.normalize(jnp.asarray(wrapped.raw_observations))
        )
        assert observation.dtype == np.float32
        assert wrapped.observation_space.contains(observation)
        observation, reward, terminated, truncated, infos = wrapped.step(
            np.zeros(3, int)
        )
        np.testing.assert_allclose(
            reward, np.asarray(wrapped.raw_rewards) / 2, rtol=1e-6
        )
        over = terminated | truncated
        if mode == AutoresetMode.SAME_STEP:
            for i in np.flatnonzero(over):
                last, _ = envs[i].episodes[-2][-1]
                right = norm.normalize(jnp.asarray(last))
                np.testing.assert_array_equal(infos["final_obs"][i], right)
        else:
            assert "final_obs" not in infos
        if mode == AutoresetMode.DISABLED and over.any():
            observation, _ = wrapped.reset(options={"reset_mask": over})
    assert norm.count == rewards.count == 10


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_dicts_of_observations(mode):
    vector, envs = made(mode, CountingDict)
    norm = Normalizer({"pos": 2, "goal": ()}, exclude=["goal"])
    wrapped = NormalizeVectorEnv(vector, norm)
    space = wrapped.single_observation_space
    assert isinstance(space, gymnasium.spaces.Dict)
    assert space["goal"] == gymnasium.spaces.Discrete(7)
    run(wrapped, mode, 9)
    seen = np.stack([o for episode in episodes(envs) for o, _ in episode])
    assert norm.count == len(seen)
    np.testing.assert_allclose(norm.to_dict()["mean"]["pos"], seen.mean(0, np.float64))
    if mode == AutoresetMode.SAME_STEP:
        while "final_obs" not in (infos := wrapped.step(np.zeros(3, int))[-1]):
            pass
        first = np.flatnonzero(infos["_final_obs"])[0]
        last, _ = envs[first].episodes[-2][-1]
        final = infos["final_obs"][first]
        right = norm.normalize({"pos": jnp.asarray(last), "goal": None})["pos"]
        np.testing.assert_array_equal(final["pos"], right)
        assert final["goal"] == int(last[0]) % 7


def test_a_reset_within_an_episode_ends_the_running_return():
    vector, envs = made(AutoresetMode.NEXT_STEP)
    for env in envs:
        env.rng = np.random.default_rng(5)  # a first episode of several steps
    rewards = RewardNormalizer(GAMMA)
    wrapped = NormalizeVectorEnv(vector, rewards=rewards, fold_every=1)
    wrapped.reset()
    wrapped.step(np.zeros(3, int))
    assert np.all(rewards.running_return.get_value() != 0)
    wrapped.reset()
    assert np.all(rewards.running_return.get_value() == 0)
    waiting = RewardNormalizer(GAMMA)
    wrapped = NormalizeVectorEnv(vector, rewards=waiting, fold_every=None)
    wrapped.reset()
    wrapped.step(np.zeros(3, int))
    wrapped.reset()
    wrapped.fold()
    assert np.all(waiting.running_return.get_value() == 0) and waiting.count == 3


def test_environments_in_processes_of_their_own():
    vector = AsyncVectorEnv([Counting, Counting], context="spawn")
    norm = Normalizer(2)
    wrapped = NormalizeVectorEnv(vector, norm)
    try:
        wrapped.reset(seed=0)
        for _ in range(3):
            wrapped.step(np.zeros(2, int))
    finally:
        wrapped.close()
    assert norm.count == 8


def test_fold_every_is_checked():
    with pytest.raises(ValueError, match="fold_every is 0; expected at least 1"):
        NormalizeVectorEnv(made(AutoresetMode.NEXT_STEP)[0], fold_every=0)


def test_normalizers_of_the_other_kind_are_refused():
    vector, _ = made(AutoresetMode.NEXT_STEP)
    other: Any = RewardNormalizer(GAMMA)
    with pytest.raises(TypeError, match="observations is a RewardNormalizer; expected"):
        NormalizeVectorEnv(vector, other)
    other = Normalizer(2)
    with pytest.raises(TypeError, match="rewards is a Normalizer; expected a Reward"):
        NormalizeVectorEnv(vector, rewards=other)


@pytest.mark.parametrize("kind", [Counting, CountingDict])
def test_what_comes_out_belongs_to_the_caller(kind: Any):
    vector, _ = made(AutoresetMode.SAME_STEP, kind)
    shape = 2 if kind is Counting else {"pos": 2, "goal": ()}
    exclude = () if kind is Counting else ["goal"]
    norm, rewards = Normalizer(shape, exclude=exclude), RewardNormalizer(GAMMA)
    wrapped = NormalizeVectorEnv(vector, norm, rewards)
    out: list[Any] = [wrapped.reset()[0]]
    for _ in range(5):  # episodes have four steps at most: final_obs is there
        observation, reward, _, _, infos = wrapped.step(np.zeros(3, int))
        out += [observation, reward, *infos.get("final_obs", ())]
    arrays = [a for a in jax.tree.leaves(out) if isinstance(a, np.ndarray)]
    assert len(arrays) > 11 and all(a.flags.writeable for a in arrays)
    raw = [np.array(a) for a in jax.tree.leaves(wrapped.raw_observations)]
    for array in arrays:
        array[...] = 7
    for a, b in zip(raw, jax.tree.leaves(wrapped.raw_observations), strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrappers_of_gymnasium_that_write_go_on_top():
    vector, _ = made(AutoresetMode.NEXT_STEP)
    wrapped: Any = NormalizeVectorEnv(vector, Normalizer(2), RewardNormalizer(GAMMA))
    wrapped = gymnasium.wrappers.vector.ClipReward(wrapped, -0.5, 0.5)
    wrapped = gymnasium.wrappers.vector.FlattenObservation(wrapped)
    assert wrapped.reset()[0].shape == (3, 2)
    for _ in range(3):
        _, reward, *_ = wrapped.step(np.zeros(3, int))
    assert np.all(np.abs(reward) <= 0.5)


def test_folding_every_step_is_what_gymnasium_does_from_the_reset_on():
    theirs = gymnasium.wrappers.vector.NormalizeObservation(
        made(AutoresetMode.NEXT_STEP)[0]
    )
    ours = NormalizeVectorEnv(made(AutoresetMode.NEXT_STEP)[0], Normalizer(2))
    pairs = [(ours.reset()[0], theirs.reset()[0])]
    for _ in range(6):
        pairs.append(tuple(env.step(np.zeros(3, int))[0] for env in (ours, theirs)))
    for i, (a, b) in enumerate(pairs):  # its prior sample: 1e-4 of mean 0, at 1e3
        np.testing.assert_allclose(a[:, 1], b[:, 1], atol=2e-4, err_msg=str(i))
    assert np.std(pairs[0][0]) == pytest.approx(1, rel=1e-3)


def test_a_reward_normalizer_of_more_environments_starts_anew():
    rewards = RewardNormalizer(GAMMA, num_envs=6)
    rewards.update(np.ones((1, 6)), np.zeros((1, 6), bool))
    wrapped = NormalizeVectorEnv(made(AutoresetMode.NEXT_STEP)[0], None, rewards)
    wrapped.reset()
    wrapped.step(np.zeros(3, int))
    assert rewards.count == 9
    returns = rewards.running_return.get_value()
    ended = wrapped._ended
    assert returns.shape == (3,)
    raw = np.where(ended, 0, wrapped.raw_rewards)
    np.testing.assert_allclose(returns, raw, rtol=1e-6)


UNFIT: dict[str, Any] = {
    r"observations at 'vel'|'vel'": lambda: ({"pos": 2, "goal": (), "vel": 1}, {}),
    r"'goal'": lambda: ({"pos": 2}, {}),
    r"shape \(2,\) at pos; the normalizer was made for \(3,\)": lambda: (
        {"pos": 3, "goal": ()},
        {"exclude": ["goal"]},
    ),
    r'emit=.moments.; expected emit="inputs"': lambda: (
        {"pos": 2, "goal": ()},
        {"emit": "moments"},
    ),
    r"axis_name .*; expected None": lambda: (
        {"pos": 2, "goal": ()},
        {"axis_name": "i"},
    ),
}


@pytest.mark.parametrize("told", UNFIT)
def test_a_normalizer_that_cannot_work_is_refused_at_construction(told: str):
    shape, settings = UNFIT[told]()
    vector, _ = made(AutoresetMode.NEXT_STEP, CountingDict)
    with pytest.raises(ValueError, match=told):
        NormalizeVectorEnv(vector, Normalizer(shape, **settings))


def test_rewards_of_another_shape_and_populations_are_refused():
    vector, _ = made(AutoresetMode.NEXT_STEP)
    with pytest.raises(ValueError, match=r"shape \(2,\); .* made for \(3,\)"):
        NormalizeVectorEnv(vector, Normalizer(3))
    with pytest.raises(ValueError, match=r"expected the default shape=\(\)"):
        NormalizeVectorEnv(vector, rewards=RewardNormalizer(GAMMA, shape=2))
    many = nnx.vmap(lambda _: Normalizer(2))(jnp.arange(4))
    with pytest.raises(ValueError, match=r"population \(4,\); expected one"):
        NormalizeVectorEnv(vector, many)


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nnx-norm\[gymnasium"):
        runpy.run_path(vector_env.__file__)


def test_a_reset_leaves_returns_that_are_not_there_yet_alone():
    rewards = RewardNormalizer(GAMMA)
    before = repr(nnx.graphdef(rewards))
    NormalizeVectorEnv(SyncVectorEnv([Counting] * 2), None, rewards).reset()
    assert repr(nnx.graphdef(rewards)) == before
    check_statistics(rewards)
