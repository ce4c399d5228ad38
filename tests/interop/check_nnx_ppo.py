# SPDX-License-Identifier: Apache-2.0
"""nnx-ppo's training with our Normalizer and with its own: the same learning.

With the test extra alone, so that the returns of each seed are shown:

    python -m pytest -s -W default tests/interop/check_nnx_ppo.py

Its own test suite with our class is another command: see tests/nnx_ppo_plugin.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_ppo.algorithms import distillation, ppo
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.networks import factories
from nnx_ppo.networks.normalizer import Normalizer as Theirs

from nnx_norm import Normalizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_env import Walk  # noqa: E402

STEPS = 200_000
SEEDS = range(5)


@pytest.fixture(autouse=True)
def their_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def agent(kind: Any, seed: int = 0) -> Any:
    rngs = nnx.Rngs(seed, action_sampling=seed)
    net: Any = factories.make_mlp_actor_critic(
        2, 2, [32, 32], [32, 32], rngs, normalize_obs=kind is not None
    )
    if kind is not None:
        net.layers[0] = kind(2)
    return net


def learned(kind: Any, seed: int) -> list[float]:
    """Mean reward of evaluation episodes, before and after the training."""
    config = TrainConfig(
        ppo=PPOConfig(
            n_envs=64, rollout_length=16, total_steps=STEPS, learning_rate=1e-3
        ),
        eval=EvalConfig(every_steps=STEPS // 2, n_envs=64, max_episode_length=50),
        seed=seed,
        checkpoint_every_steps=0,
    )
    history = ppo.train_ppo(Walk(), agent(kind, seed), config).eval_history
    return [float(entry["eval/episode_reward/mean"]) for entry in history]


@pytest.fixture
def compiled_once(tmp_path: Path) -> Iterator[None]:
    """Seeds share what is compiled: their training jits it anew for each."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 0.2), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.mark.usefixtures("compiled_once")
def test_same_learning_as_with_their_own():
    """About a minute. Returns stay below 50; `-s` shows them all."""
    ours, theirs = (
        np.array([learned(kind, seed) for seed in SEEDS])
        for kind in (Normalizer, Theirs)
    )
    without = learned(None, 0)
    print("episode reward before, at half and after, one row per seed", SEEDS)
    print("ours", ours.round(1), "theirs", theirs.round(1), "none", without, sep="\n")
    assert np.allclose(ours[:, 0], theirs[:, 0], rtol=1e-6)  # before any sample
    assert np.median(ours[:, -1]) > 20 * np.median(ours[:, 0])
    assert np.median(ours[:, -1]) > 0.9 * np.median(theirs[:, -1])
    assert np.median(ours[:, -1]) > 20 * without[-1]


def test_distillation_from_teacher_to_student():
    teacher, student = agent(Normalizer), agent(Normalizer, 1)
    norm = teacher.layers[0]
    x = jnp.array([5000.0, 0.0]) + jax.random.normal(jax.random.key(0), (1, 8, 2))
    norm.update_statistics(x)
    before = norm.to_dict()
    state = distillation.new_distillation_state(Walk(), teacher, student, 4, seed=1)
    for _ in range(2):
        state, metrics = distillation.distillation_step(
            Walk(), teacher, state, 4, 4, 2, 2
        )
    assert all(np.all(np.isfinite(v)) for v in jax.tree.leaves(metrics))
    assert student.layers[0].count == 32
    assert np.array_equal(
        norm.to_dict()["M2"], before["M2"]
    )  # the teacher stands still
