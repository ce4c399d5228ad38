# SPDX-License-Identifier: Apache-2.0
"""Weeks of training in seconds: 10^12 samples, and a process that doesn't grow.

A run of record (`HYPOTHESIS_PROFILE=record`) makes 10,000 updates and 1,000 saves in
every way; otherwise the slow ways make fewer.
"""

import ctypes
import gc
import io
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx

from nnx_norm import Normalizer, RewardNormalizer, RunningMeanStd, fold
from tests.strategies import RECORD

SPEC = {"a": (2,), "b": ()}
TRILLION = 10**12
MEBIBYTE = 2**20


def history(seed: int, offset: float = 0.0) -> dict[str, np.ndarray]:
    """A rollout `[T=2, B=2]`, of quarters: its sums are exact."""
    rng = np.random.default_rng(seed)
    return {
        key: (offset + rng.integers(-40, 40, (2, 2, *shape)) / 4).astype(np.float32)
        for key, shape in SPEC.items()
    }


def exact_moments(
    rows: list[tuple[Fraction, Fraction]],
) -> tuple[Fraction, Fraction, Fraction]:
    """Mean, variance and count of `(value, weight)` pairs, without any rounding."""
    n = sum((w for _, w in rows), Fraction())
    mean = sum((x * w for x, w in rows), Fraction()) / n
    return mean, sum(((x - mean) ** 2 * w for x, w in rows), Fraction()) / n, n


@partial(jax.jit, static_argnums=0)
def step(graphdef: Any, state: Any, history: Any, weights: Any = None) -> Any:
    norm = nnx.merge(graphdef, state)
    norm.update_statistics(history, weights=weights)
    return nnx.state(norm)


@pytest.mark.parametrize("offset", [0.0, 10_000.0])
def test_a_trillion_samples_by_weights_are_counted_exactly(offset: float):
    norm = Normalizer(SPEC)
    graphdef, state = nnx.split(norm)
    weights = np.full((2, 2), 250e6, np.float32)  # whole in float32: 10^9 an update
    rows = []
    for seed in range(1000):
        rollout = history(seed, offset + seed / 4)  # the mean moves all the time
        state = step(graphdef, state, rollout, weights)
        rows += [(x, 250_000_000) for x in rollout["b"].ravel().tolist()]
    nnx.update(norm, state)
    assert norm.count == TRILLION
    for seed in range(3):  # and single samples still count
        rollout = history(seed)
        norm.update_statistics(rollout)
        rows += [(x, 1) for x in rollout["b"].ravel().tolist()]
    d = norm.to_dict()
    exact = [(Fraction(x), Fraction(w)) for x, w in rows]
    mean, variance, count = map(float, exact_moments(exact))
    assert d["count"] == count == TRILLION + 12
    assert abs(float(d["mean"]["b"]) - mean) <= 1e-7 * variance**0.5
    assert abs(float(d["variance"]["b"]) - variance) <= 5e-7 * variance


def test_updates_move_the_mean_of_a_trillion_samples_as_far_as_they_should():
    norm = Normalizer(())
    norm.set_statistics(1.0, 4.0, TRILLION)
    for _ in range(100):
        norm.update_statistics(np.full(4, 1e6, np.float32))
    mean, variance, count = exact_moments(
        [(Fraction(-1), Fraction(TRILLION, 2)), (Fraction(3), Fraction(TRILLION, 2))]
        + [(Fraction(10**6), Fraction(400))]
    )
    d = norm.to_dict()
    assert d["count"] == count
    assert abs(d["mean"] - float(mean)) < 1e-7 * float(variance) ** 0.5
    moved = (float(mean) - 1.0, float(variance) - 4.0)
    assert abs(d["mean"] - 1.0 - moved[0]) < 1e-6 * moved[0]
    assert abs(d["variance"] - 4.0 - moved[1]) < 1e-6 * moved[1]


def test_forty_doublings_by_merging_are_exact():
    norm, other = Normalizer(SPEC), Normalizer(SPEC)
    norm.update_statistics(history(0, 100.0))
    before = norm.to_dict()
    for _ in range(40):
        other.copy_from(norm)
        norm.merge_from(other)
    after = norm.to_dict()
    assert after["count"] == 4 * 2**40
    for name in ("mean", "variance"):
        for leaf, right in zip(
            *map(jax.tree.leaves, (after[name], before[name])), strict=True
        ):
            np.testing.assert_array_equal(leaf, right)


def test_reward_and_port_count_on_from_a_trillion():
    reward, port = RewardNormalizer(0.5, num_envs=2), RunningMeanStd(2)
    reward.set_statistics(0.0, 1.0, TRILLION)
    port.update_from_moments(np.zeros(2), np.ones(2), TRILLION)
    ends = np.zeros((3, 2), bool)
    for _ in range(5):
        reward.update(np.ones((3, 2), np.float32), ends)
        port.record_moments(np.ones((3, 2), np.float32))
    assert reward.count == TRILLION + 30
    assert port.to_numpy().count == TRILLION + 1 + 15  # and its prior sample


def resident() -> int:
    """Bytes of memory that the process holds, without what it could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else a leak hides in what was freed before
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def growth(step: Callable[[], Any], times: int) -> tuple[int, int]:
    """Bytes and JAX arrays that a process gains by so many steps, once warm."""
    for _ in range(max(times // 10, 3)):
        step()
    before, arrays = resident(), len(jax.live_arrays())
    for _ in range(times):
        step()
    return resident() - before, len(jax.live_arrays()) - arrays


def allowed(times: int) -> float:
    """Bytes that a process may grow by in so many updates, for noise: 0.9 KiB each."""
    return times / 10_000 * 8 * MEBIBYTE + MEBIBYTE


def cache_size() -> int:
    """How often updates have been compiled."""
    return getattr(fold._fold_inputs, "_cache_size")()  # noqa: B009


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_measure_sees_a_leak_in_an_update():
    kept: list[Any] = []
    # Twice the allowance: what earlier tests left in pieces takes some of it first.
    memory, _ = growth(lambda: kept.append(np.ones(2048, np.uint8)), 10_000)
    assert memory > allowed(10_000)
    _, arrays = growth(lambda: kept.append(jnp.ones(2) + 1), 10)
    assert arrays == 10


@linux
@pytest.mark.parametrize("way", ["jit", "eager", "reward", "port"])
def test_ten_thousand_updates_take_no_memory(way: str):
    norm: Any = Normalizer(SPEC)
    data, rewards = history(0), np.ones((3, 2), np.float32)
    ends = np.zeros((3, 2), bool)
    times = 10_000 if way == "jit" or RECORD else 1000
    compiled = jax.jit(
        lambda state, data: step(graphdef, state, data), donate_argnums=0
    )
    graphdef, state = nnx.split(norm)
    states = [state]
    if way == "reward":
        norm = RewardNormalizer(0.9, num_envs=2)
    if way == "port":
        norm = RunningMeanStd(2)

    def once() -> None:
        if way == "jit":
            states[0] = compiled(states[0], data)
        elif way == "eager":
            norm.update_statistics(data)
        elif way == "reward":
            norm.update(rewards, ends)
        else:
            norm.record_moments(rewards)

    once()
    traces = cache_size()
    memory, arrays = growth(once, times)
    assert arrays == 0
    assert memory < allowed(times)
    assert cache_size() == traces
    if way == "jit":
        nnx.update(norm, states[0])
    number = norm.to_numpy().count if way == "port" else norm.count
    samples = {"port": 3, "reward": 6}.get(way, 4)
    assert number == (way == "port") + samples * (1 + times + times // 10)


@linux
@pytest.mark.parametrize("way", ["npz", "split", "orbax"])
def test_a_thousand_saves_take_no_memory(way: str, tmp_path: Path):
    norm = Normalizer(SPEC)
    norm.set_statistics(0.1, 2.0, TRILLION)
    saver = orbax.checkpoint.StandardCheckpointer()

    def once() -> None:
        if way == "npz":
            file = io.BytesIO()
            np.savez(file, **norm.to_dict(flat=True))
            file.seek(0)
            with np.load(file) as saved:
                norm.load_dict(saved)
        elif way == "split":
            graphdef, state = nnx.split(norm)
            nnx.update(norm, nnx.state(nnx.merge(graphdef, state)))
        else:
            saver.save(tmp_path / "state", nnx.state(norm), force=True)
            saver.wait_until_finished()
            nnx.update(norm, saver.restore(tmp_path / "state", nnx.state(norm)))

    times = 1000 if RECORD else {"npz": 100, "split": 1000, "orbax": 10}[way]
    memory, arrays = growth(once, times)
    theirs = 0
    if way == "orbax":  # which takes 48 KiB a save itself, of plain arrays too
        theirs = growth(lambda: plain_save(saver, tmp_path, norm), times)[0]
    saver.close()
    assert arrays == 0
    # 8 KiB a save beside that; Orbax keeps threads and caches of its own.
    most = times * 2**13 + (16 if way == "orbax" else 1) * MEBIBYTE
    assert memory < most + max(theirs, 0)
    assert norm.count == TRILLION


def plain_save(saver: Any, folder: Path, norm: Normalizer) -> None:
    """A save of as many arrays, without a module."""
    arrays = dict(enumerate(jax.tree.leaves(nnx.state(norm))))
    saver.save(folder / "plain", arrays, force=True)
    saver.wait_until_finished()
    saver.restore(folder / "plain", arrays)
