# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Gymnasium, Stable-Baselines3 and scikit-learn themselves, in and out."""

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from agreement import CENTRE, LIMIT, assert_agreement, assert_moments, batches
from gymnasium import spaces
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.vector import NormalizeObservation as VectorObservation
from gymnasium.wrappers.vector import NormalizeReward as VectorReward
from sklearn.preprocessing import StandardScaler
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from nnx_norm import Normalizer, RewardNormalizer, RewardRunningMeanStd, RunningMeanStd
from nnx_norm.interop import (
    from_gymnasium,
    from_gymnasium_rewards,
    from_sb3,
    from_sb3_rewards,
    from_sklearn,
    to_gymnasium,
    to_sb3,
    to_sklearn,
)

BOX = spaces.Box(-np.inf, np.inf, CENTRE.shape, np.float32)
DICT = spaces.Dict({"body": BOX, "mode": spaces.Discrete(3)})


class Noise(gymnasium.Env):
    """Observations of all kinds; episodes of five steps, cut off or terminated."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any = BOX, seed: int = 0):
        self.observation_space, self.steps = space, 0
        self.rows = iter(np.concatenate(batches(20, seed=seed)))
        self.rewards = iter(np.random.default_rng(seed).normal(2, 3, size=2000))

    def observation(self) -> Any:
        row = next(self.rows)
        one = self.observation_space is DICT
        return {"body": row, "mode": self.steps % 3} if one else row

    def reset(self, **settings: Any) -> Any:
        self.steps = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        ended = self.steps == 5
        reward = float(next(self.rewards))
        return self.observation(), reward, ended and action == 1, ended, {}


def run(env: Any, steps: int = 23) -> Any:
    env.reset()
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(0)
        if terminated or truncated:
            env.reset()
    return env


def vector(number: int = 3) -> Any:
    makers = [lambda i=i: Noise(seed=i) for i in range(number)]
    return gymnasium.vector.SyncVectorEnv(makers)


def run_vector(env: Any, steps: int = 23) -> Any:
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(env.num_envs, int))
    return env


def their_normalize(wrapper: Any, x: np.ndarray) -> np.ndarray:
    """What the wrapper makes of an observation, by its own code."""
    wrapper.update_running_mean = False
    if hasattr(wrapper, "num_envs"):
        return wrapper.observations(x)
    return np.stack([wrapper.observation(row) for row in x])


@pytest.mark.parametrize("number", [1, 3])
def test_gymnasium_observations(number: int):
    env = NormalizeObservation(Noise()) if number == 1 else VectorObservation(vector())
    wrapper = run(env) if number == 1 else run_vector(env)
    norm, x = from_gymnasium(wrapper), batches(seed=9)[0]
    assert norm.count == pytest.approx(wrapper.obs_rms.count, rel=1e-14)
    assert_agreement(norm, norm.normalize(x), their_normalize(wrapper, x))
    port = from_gymnasium(wrapper.obs_rms, into=RunningMeanStd(epsilon=1e-8))
    assert_agreement(port, port.normalize(x), their_normalize(wrapper, x))
    assert port.to_numpy().var.tolist() == wrapper.obs_rms.var.tolist()
    back = to_gymnasium(port)
    assert back["var"].tolist() == wrapper.obs_rms.var.tolist()
    assert back["mean"].tolist() == wrapper.obs_rms.mean.tolist()


def test_gymnasium_goes_on_as_it_does():
    wrapper = run_vector(VectorObservation(vector()))
    norm = from_gymnasium(wrapper)
    for x in batches(seed=5):
        wrapper.obs_rms.update(x)
        norm.update_statistics(x[None])
    alive = np.arange(5) != 3  # the dead feature had epsilon folded into its variance
    variance = np.asarray(norm.variance)
    # Its sums are in float32, ours are not.
    assert np.allclose(variance[alive], wrapper.obs_rms.var[alive], rtol=1e-4)
    assert norm.count == pytest.approx(wrapper.obs_rms.count, rel=1e-14)
    vars(wrapper.obs_rms).update(to_gymnasium(norm))
    x = batches(seed=9)[0]
    assert_agreement(norm, norm.normalize(x), their_normalize(wrapper, x))


def test_gymnasium_before_any_sample():
    norm = from_gymnasium(NormalizeObservation(Noise()))
    assert norm.count == pytest.approx(1e-4)
    assert np.asarray(norm.normalize(np.ones(5, np.float32))) == pytest.approx(1.0)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("port", [False, True])
def test_gymnasium_rewards(number: int, port: bool):
    env = NormalizeReward(Noise()) if number == 1 else VectorReward(vector())
    wrapper = run(env) if number == 1 else run_vector(env)
    into = RewardRunningMeanStd(gamma=0.99, epsilon=1e-8) if port else None
    norm = from_gymnasium_rewards(wrapper, into=into)
    rewards = np.array([-3.0, 0.0, 20.0], np.float32)
    theirs = rewards / np.sqrt(wrapper.return_rms.var + wrapper.epsilon)
    assert norm.gamma == wrapper.gamma
    assert_agreement(norm, norm.normalize(rewards)[0], theirs[0])
    assert np.asarray(norm.normalize(rewards)) == pytest.approx(theirs, rel=LIMIT)
    carried = norm.discounted_reward if port else norm.running_return
    name = "discounted_reward" if number == 1 else "accumulated_reward"
    returns = getattr(wrapper, name)
    assert np.asarray(carried.get_value()) == pytest.approx(returns, rel=1e-6)
    back = to_gymnasium(norm)
    assert back["var"] == pytest.approx(wrapper.return_rms.var, rel=1e-12)


def venv(space: Any = BOX, number: int = 3, **settings: Any) -> Any:
    makers = [lambda i=i: Noise(space, seed=i) for i in range(number)]
    env = VecNormalize(DummyVecEnv(makers), **settings)
    env.reset()
    for _ in range(23):
        env.step(np.zeros(number, int))
    return env


def test_sb3_observations_and_the_way_back():
    env, x = venv(clip_obs=2.0), batches(seed=9)[0]
    norm = from_sb3(env)
    assert norm.clip == 2.0
    assert_agreement(norm, norm.normalize(x), env.normalize_obs(x))
    assert np.abs(norm.normalize(x)).max() == 2.0  # the clip was met
    vars(env.obs_rms).update(to_sb3(norm))
    assert_agreement(norm, norm.normalize(x), env.normalize_obs(x))
    stacked = VecFrameStack(env, 2)  # below another wrapper
    assert from_sb3(stacked).count == norm.count


def test_sb3_dict_space_passes_other_entries_through():
    env = venv(DICT, norm_obs_keys=["body"])
    norm = from_sb3(env)
    x = {"body": batches(seed=9)[0], "mode": np.arange(64) % 3}
    ours, theirs = norm.normalize(x), env.normalize_obs(x)
    assert_agreement(norm, ours["body"], theirs["body"])
    assert np.asarray(ours["mode"]).tolist() == theirs["mode"].tolist()
    back = to_sb3(norm)
    assert list(back) == ["body"]
    vars(env.obs_rms["body"]).update(back["body"])
    assert_agreement(norm, ours["body"], env.normalize_obs(x)["body"])
    again = from_sb3(pickle.loads(pickle.dumps(env)))  # as VecNormalize.save saves it
    assert_agreement(again, again.normalize(x)["body"], theirs["body"])


def test_sb3_rewards_and_their_returns():
    env = venv(clip_reward=1.5)
    norm = from_sb3_rewards(env)
    rewards = np.array([-3.0, 0.5, 200.0], np.float32)
    ours = np.asarray(norm.normalize(rewards))
    assert ours == pytest.approx(env.normalize_reward(rewards), rel=LIMIT)
    assert ours.max() == 1.5
    assert np.asarray(norm.running_return.get_value()) == pytest.approx(env.returns)
    # Going on: both fold the same returns.
    _, _, dones, _ = env.step(np.zeros(3, int))
    norm.update(env.get_original_reward()[None], dones[None])
    assert norm.count == pytest.approx(env.ret_rms.count, rel=1e-12)
    assert float(norm.variance) == pytest.approx(env.ret_rms.var, rel=1e-6)
    saved = pickle.loads(pickle.dumps(env))
    assert from_sb3_rewards(saved).running_return.get_value() is None


def test_sb3_without_observations_is_refused():
    with pytest.raises(ValueError, match="obs_rms"):
        from_sb3(venv(norm_obs=False))


def test_reward_normalizer_of_one_return_is_refused():
    wrapper = NormalizeReward(Noise())
    wrapper.reset()
    wrapper.step(0)
    with pytest.raises(ValueError, match="RewardNormalizer"):
        from_gymnasium_rewards(wrapper)
    port = RewardRunningMeanStd(gamma=0.99, epsilon=1e-8)
    assert from_gymnasium_rewards(wrapper, into=port) is port
    assert isinstance(from_gymnasium_rewards(run(wrapper)), RewardNormalizer)


@pytest.mark.parametrize("with_mean", [True, False])
@pytest.mark.parametrize("with_std", [True, False])
def test_sklearn(with_mean: bool, with_std: bool):
    scaler = StandardScaler(with_mean=with_mean, with_std=with_std)
    for x in batches():
        scaler.partial_fit(x)
    x = batches(seed=9)[0]
    norm = from_sklearn(scaler)
    assert norm.count == 192
    assert_agreement(norm, norm.normalize(x), scaler.transform(x.astype(np.float64)))
    if with_mean and with_std:
        back = StandardScaler()
        vars(back).update(to_sklearn(norm))
        theirs = back.transform(x.astype(np.float64))
        assert_agreement(norm, norm.normalize(x), theirs)
        back.partial_fit(x)
        assert back.n_samples_seen_ == 256


def test_sklearn_of_ours():
    norm = Normalizer(5)
    for x in batches():
        norm.update_statistics(x[None])
    scaler = StandardScaler()
    vars(scaler).update(to_sklearn(norm))
    x = batches(seed=9)[0]
    theirs = scaler.transform(x.astype(np.float64))
    assert_agreement(norm, norm.normalize(x), theirs)
    assert_moments(from_sklearn(scaler), np.concatenate(batches()))
