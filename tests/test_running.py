# SPDX-License-Identifier: Apache-2.0
"""The ports against their source's algorithm, written anew in float64 NumPy."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import nnx_norm
from nnx_norm import RewardRunningMeanStd, RunningMeanStd, running

SHAPES = [(), (3,), (2, 2)]


@dataclasses.dataclass
class Source:
    """What the ports must reproduce: float64 buffers, one prior sample."""

    shape: tuple[int, ...]
    epsilon: float = 1e-5
    clamp_value: float | None = None
    ema_decay: float | None = None
    gamma: float = 1.0
    count: float = 1.0

    def __post_init__(self):
        self.mean, self.var = np.zeros(self.shape), np.ones(self.shape)
        self.discounted_reward: np.ndarray | None = None

    def record_moments(self, x: np.ndarray) -> None:
        if len(x):
            self.update_from_moments(x.mean(0), x.var(0), len(x))

    def update_from_moments(self, mean: np.ndarray, var: np.ndarray, count: float):
        d = self.ema_decay
        if d is not None:
            self.mean = d * self.mean + (1 - d) * mean
            self.var = d * self.var + (1 - d) * var
            return
        total, delta = self.count + count, mean - self.mean
        M2 = self.var * self.count + var * count
        M2 = M2 + delta**2 * self.count * count / total
        self.mean = self.mean + delta * count / total
        self.var, self.count = M2 / total, total

    def record_reward(self, reward: np.ndarray, terminated: np.ndarray) -> None:
        if self.discounted_reward is None:
            self.discounted_reward = reward
        else:
            going_on = 1.0 - terminated.reshape(len(reward), *[1] * (reward.ndim - 1))
            old = self.discounted_reward * self.gamma * going_on
            self.discounted_reward = old + reward
        self.record_moments(self.discounted_reward)

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.var + self.epsilon)

    def clamp(self, x: np.ndarray) -> np.ndarray:
        c = self.clamp_value
        return x if c is None else np.clip(x, -c, c)

    def normalize(self, x: np.ndarray, un_norm: bool, centred: bool) -> np.ndarray:
        mean = self.mean if centred else np.zeros(self.shape)
        if un_norm:
            return self.clamp(x) * self.std + mean
        return self.clamp((x - mean) / self.std)


def close(ours: np.ndarray, theirs: np.ndarray, scale: np.ndarray) -> bool:
    return bool(np.all(np.abs(ours - theirs) <= 1e-6 * scale))


def settings(rng: np.random.Generator, shape: tuple[int, ...]) -> dict:
    clamps, decays = (None, 0.7, 5.0), (None, (0.5, 0.99, 0.9)[len(shape)])
    return {
        "epsilon": float(rng.choice([1e-5, 1e-2, 1.0])),
        "clamp_value": clamps[rng.integers(3)],
        "ema_decay": decays[rng.integers(2)],
    }


def batches(rng: np.random.Generator, shape: tuple[int, ...]) -> list[np.ndarray]:
    """1 to 50 batches of float32, half precision or integers; offsets and drifts."""
    loc = rng.normal(size=shape) * 10 ** rng.uniform(-2, 4)
    scale = 10 ** rng.uniform(-2, 2)
    drift = scale * rng.uniform(-1, 1)
    dtype, size = np.dtype(np.float32), int(rng.choice([1, 6])) if shape else 6
    if len(shape) == 1 and rng.random() < 0.4:
        dtype, size = np.dtype(str(rng.choice(["float16", "int32", "uint8"]))), 6
        loc, scale, drift = 100.0, 20.0, 0.1

    def batch(i: int) -> np.ndarray:
        x = rng.normal(loc + drift * i, scale, (size if i != 3 else 0, *shape))
        return (x.clip(0, 255) if dtype.kind == "u" else x).astype(dtype)

    return [batch(i) for i in range(int(rng.integers(1, 51)))]


def check(ours: RunningMeanStd, source: Source, probe: np.ndarray, centred: bool):
    """Everything that a user reads agrees to 1e-6 of its scale."""
    full = ours.to_numpy()
    assert full.count == source.count
    assert close(full.mean, source.mean, np.abs(source.mean) + source.std)
    assert close(full.var, source.var, source.var)
    scale = np.abs(probe) + np.abs(source.mean) * centred + source.std
    y = np.asarray(ours.normalize(jnp.asarray(probe)), np.float64)
    assert close(
        y * source.std, source.normalize(probe, False, centred) * source.std, scale
    )
    z = probe / np.abs(probe).max() * 9
    back = np.asarray(ours.normalize(jnp.asarray(z, jnp.float32), un_norm=True))
    want = source.normalize(z.astype(np.float32).astype(np.float64), True, centred)
    assert close(back, want, np.abs(z) * source.std + np.abs(source.mean) + source.std)


@pytest.mark.parametrize("seed", range(150))
def test_running_mean_std_is_the_source_in_float64(seed: int):
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % 3]
    given = settings(rng, shape)
    ours = RunningMeanStd(None if seed % 2 else shape, **given)
    source = Source(shape, **given)
    for x in (stream := batches(rng, shape)):
        ours.record_moments(jnp.asarray(x))
        source.record_moments(x.astype(np.float64))
    extra = rng.normal(size=(2, *shape)) * 3
    ours.update_from_moments(extra[0], extra[1] ** 2, 7)
    source.update_from_moments(extra[0], extra[1] ** 2, 7)
    probe = (stream[-1] if len(stream[-1]) else extra).astype(np.float32)
    check(ours, source, probe.astype(np.float64) + 1e-3, centred=True)


@pytest.mark.parametrize("seed", range(75))
def test_reward_running_mean_std_is_the_source_in_float64(seed: int):
    rng = np.random.default_rng(1000 + seed)
    shape = SHAPES[seed % 2]
    given = settings(rng, shape)
    gamma = float(rng.choice([0.5, 0.99, 1.0]))
    lazy = None if seed % 4 == 3 else shape
    ours = RewardRunningMeanStd(lazy, gamma=gamma, **given)
    source = Source(shape, gamma=gamma, **given)
    rewards = rng.normal(rng.normal(), 10 ** rng.uniform(-2, 2), (50, 6, *shape))
    for reward in rewards[: rng.integers(1, 51)].astype(np.float32):
        ended = rng.random(6) < 0.1
        ours.record_reward(jnp.asarray(reward), jnp.asarray(ended))
        source.record_reward(reward.astype(np.float64), ended)
        returns = source.discounted_reward
        assert returns is not None
        running_return = np.asarray(ours.discounted_reward.get_value())
        assert close(running_return, returns, np.abs(rewards).max() + np.abs(returns))
    check(ours, source, rewards[0].astype(np.float32).astype(np.float64), centred=False)


def test_known_moments_of_a_table():
    mean, var, count = running.combine_moments([0.0, 4.0], [1.0, 1.0], [2, 2])
    assert (float(mean), float(var), int(count)) == (2.0, 5.0, 4)
    five = np.array([-1.0, 1.0, 3.0, 5.0, 10.0])
    mean, var, count = running.combine_moments([0.0, 4.0, 10.0], [1, 1, 0], [2, 2, 1])
    assert math.isclose(mean, five.mean()) and math.isclose(var, five.var())
    assert int(count) == 5


def test_four_names_of_the_contract():
    for name in running.__all__:
        assert getattr(running, name) is getattr(nnx_norm, name)


def test_table_of_conventions_has_a_row_for_each():
    rows = [line for line in (running.__doc__ or "").splitlines() if line[:1] == "|"]
    first = [row.split("|")[1].strip(" `") for row in rows[2:]]
    assert [name.split()[0] for name in first] == [
        "RunningMeanStd",
        "RewardRunningMeanStd",
        "ProtoMotions'",
        "Gymnasium",
        "Stable-Baselines3",
        "RewardNormalizer",
        "Normalizer",
    ]
    assert {row.count("|") for row in rows} == {5}
