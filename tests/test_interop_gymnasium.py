# SPDX-License-Identifier: Apache-2.0
"""Attributes of Gymnasium and SB3; the libraries themselves: interop/check_numpy.py."""

import types
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from nnx_norm import Normalizer, RewardNormalizer
from nnx_norm.interop import (
    from_gymnasium,
    from_gymnasium_rewards,
    from_sb3,
    from_sb3_rewards,
    to_gymnasium,
    to_sb3,
)
from nnx_norm.moved import exported

RMS = {"mean": np.array([0.5, 2.0]), "var": np.array([4.0, 0.0]), "count": 50.5}


def named(**attributes: Any) -> Any:
    return types.SimpleNamespace(**attributes)


def test_wrappers_of_gymnasium_itself():
    makers = [lambda: gymnasium.make("MountainCarContinuous-v0")] * 3
    env = NormalizeReward(NormalizeObservation(gymnasium.vector.SyncVectorEnv(makers)))
    env.reset(seed=0)
    for force in np.linspace(-1, 1, 20):
        env.step(np.full((3, 1), force, np.float32))
    observations: Any = env.env  # the wrapper below
    norm, rewards = from_gymnasium(env), from_gymnasium_rewards(env)
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    observations.update_running_mean = False
    theirs = observations.observations(x)
    size = 1 + np.abs(theirs) + np.abs(observations.obs_rms.mean) / exported(norm).std
    assert np.max(np.abs(np.asarray(norm.normalize(x)) - theirs) / size) <= 1e-6
    assert norm.count == pytest.approx(63 + 1e-4, rel=1e-12)
    scale = np.sqrt(env.return_rms.var + env.epsilon)
    assert float(rewards.std) == pytest.approx(scale, rel=1e-6)
    running = np.asarray(rewards.running_return.get_value())
    assert running == pytest.approx(env.accumulated_reward)
    assert from_gymnasium(observations.obs_rms).count == norm.count


def test_export_and_import_keep_the_divisor():
    norm = Normalizer(2, epsilon=1e-4)
    norm.set_statistics(RMS["mean"], RMS["var"], RMS["count"])
    back = from_gymnasium(to_gymnasium(norm))
    assert exported(back).std.tolist() == pytest.approx([2.0, 1e-2])
    assert back.count == 50.5
    with pytest.raises(ValueError, match="epsilon"):
        to_gymnasium(norm, epsilon=1e-3)
    with pytest.raises(ValueError, match="expected one array"):
        to_gymnasium(Normalizer({"a": 1}))


def test_wrappers_are_found_below_others():
    wrapper = named(obs_rms=named(**RMS), epsilon=1e-2, env=None)
    norm = from_gymnasium(named(env=named(env=wrapper)))
    assert exported(norm).std.tolist() == pytest.approx([2.0, 0.1], rel=2e-3)
    assert exported(norm).std.tolist() == pytest.approx(np.sqrt(RMS["var"] + 1e-2))
    with pytest.raises(ValueError, match="SimpleNamespace has no 'return_rms'"):
        from_gymnasium_rewards(named(env=wrapper))
    with pytest.raises(ValueError, match="no 'obs_rms'"):
        from_sb3(named(venv=named(venv=None)))


def test_dict_spaces_and_counts_that_differ():
    rms = {"a": named(**RMS), "b": named(**RMS)}
    space = named(spaces={"a": named(shape=(2,)), "c": named(shape=None)})
    wrapper = named(obs_rms=rms, epsilon=1e-8, clip_obs=9.0, observation_space=space)
    norm = from_sb3(wrapper)
    assert norm.to_dict()["exclude"] == ["c"]
    out = to_sb3(norm)
    assert sorted(out) == ["a", "b"] and out["a"]["count"] == 50.5
    assert out["b"]["var"].tolist() == RMS["var"].tolist()
    rms["b"] = named(**RMS | {"count": 3.0})
    with pytest.raises(ValueError, match=r"counts \{'a': 50.5, 'b': 3.0\}"):
        from_sb3(wrapper)


def test_rewards_there_and_back():
    norm = RewardNormalizer(0.9, num_envs=2)
    norm.set_statistics(1.0, 4.0, 50.5)
    attributes = {"gamma": 0.9, "epsilon": 1e-8}
    returns = np.array([1.0, -1.0])
    gym = named(
        return_rms=named(**to_gymnasium(norm)), discounted_reward=returns, **attributes
    )
    sb3 = named(
        ret_rms=named(**to_sb3(norm)), returns=returns, clip_reward=3.0, **attributes
    )
    for back in (from_gymnasium_rewards(gym), from_sb3_rewards(sb3)):
        assert back.count == 50.5 and float(back.std) == 2.0
        assert np.asarray(back.running_return.get_value()).tolist() == [1.0, -1.0]
