# SPDX-License-Identifier: Apache-2.0
"""RewardRunningMeanStd: its boundary convention, its running return, scale only."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from nnx_norm import (
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningReturn,
    materialize_lazy_running_stats_from_state_dict,
)

NO = jnp.array([False])


def running_return(stats: RewardRunningMeanStd) -> list[float]:
    return jnp.asarray(stats.discounted_reward.get_value()).tolist()


def play(stats: Any, rewards: list[float], ends: list[bool]) -> list[float]:
    seen = []
    for reward, end in zip(rewards, ends, strict=True):
        stats.record_reward(jnp.array([reward]), jnp.array([end]))
        seen += running_return(stats)
    return seen


def test_running_return_of_the_issue():
    stats = RewardRunningMeanStd(gamma=0.5)
    stats.record_reward(jnp.array([1.0, 2.0]), jnp.array([False, False]))
    assert running_return(stats) == [1.0, 2.0]
    stats.record_reward(jnp.array([1.0, 2.0]), jnp.array([False, True]))
    assert running_return(stats) == [1.5, 2.0]
    assert stats.to_numpy().count == 5


def test_boundary_is_the_sources_and_not_that_of_reward_normalizer():
    rewards, ends = [1.0, 2.0, 3.0, 4.0, 5.0], [False, False, True, False, False]
    stats = RewardRunningMeanStd(gamma=0.5, initial_count=0)
    seen = play(stats, rewards, ends)
    assert seen == [1.0, 2.5, 3.0, 5.5, 7.75]
    assert stats.to_numpy().var.item() == pytest.approx(np.var(seen), rel=1e-6)
    ours = RewardNormalizer(0.5)
    ours.update(jnp.array(rewards)[:, None], jnp.array(ends)[:, None])
    assert float(ours.variance) == 4.0  # of 1, 2.5, 4.25, 4, 7


def test_first_call_takes_the_reward_whatever_the_flag():
    stats = RewardRunningMeanStd(gamma=0.5)
    assert play(stats, [3.0], [True]) == [3.0]


def test_rewards_are_scaled_never_centred():
    stats = RewardRunningMeanStd(gamma=0.5, initial_count=0, epsilon=0.0)
    play(stats, [1.0] * 4, [False] * 4)
    assert stats.normalize(jnp.float32(1.0)).item() == pytest.approx(2.984, rel=1e-3)
    y = stats.normalize(jnp.array([-1.0, 0.0, 1.0]))
    assert y[1] == 0 and y[0] == -y[2] < 0
    np.testing.assert_allclose(stats.normalize(y, un_norm=True), [-1, 0, 1], rtol=1e-6)


def test_fresh_instance_divides_by_one_and_clamps_first_on_the_way_back():
    stats = RewardRunningMeanStd(gamma=0.9, clamp_value=5.0)
    scale = np.sqrt(1 + 1e-5)
    assert stats(jnp.float32(2.0)).item() == pytest.approx(2.0 / scale, rel=1e-6)
    assert stats(jnp.float32(100.0)).item() == 5.0
    back = stats.normalize(jnp.float32(100.0), un_norm=True).item()
    assert back == pytest.approx(5.0 * scale, rel=1e-6)


def test_return_is_a_variable_of_its_own_type_and_goes_on_after_a_restore():
    stats = RewardRunningMeanStd(gamma=0.5)
    play(stats, [1.0, 1.0], [False, False])
    assert len(jax.tree.leaves(nnx.state(stats, RunningReturn))) == 2
    other = RewardRunningMeanStd(gamma=0.5)
    nnx.update(other, nnx.state(stats))
    assert play(other, [1.0], [False]) == [1.75]


@pytest.mark.parametrize("num_envs", [None, 1])
def test_orbax_restores_it_in_the_middle_of_an_episode(
    tmp_path: Path, num_envs: int | None
):
    stats = RewardRunningMeanStd(gamma=0.5)
    play(stats, [1.0, 1.0], [False, False])
    other = RewardRunningMeanStd(gamma=0.5, num_envs=num_envs)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(stats))
        checkpointer.wait_until_finished()
        saved = checkpointer.metadata(tmp_path / "state").item_metadata.tree
        materialize_lazy_running_stats_from_state_dict(other, saved)
        restored = checkpointer.restore(tmp_path / "state", nnx.state(other))
    nnx.update(other, restored)
    assert play(other, [1.0], [False]) == [1.75]
    assert other.to_numpy().count == 4


def test_another_number_of_environments_restarts_the_returns_only():
    stats = RewardRunningMeanStd(gamma=0.5)
    play(stats, [1.0, 1.0], [False, False])
    stats.record_reward(jnp.array([2.0, 4.0]), jnp.array([False, False]))
    assert running_return(stats) == [2.0, 4.0] and stats.to_numpy().count == 5


def test_num_envs_makes_it_a_scan_carry():
    def step(stats: Any, reward: jax.Array) -> tuple[Any, None]:
        stats.record_reward(reward, jnp.zeros(2, bool))
        return stats, None

    stats = RewardRunningMeanStd(gamma=0.5, num_envs=2)
    carried, _ = jax.lax.scan(step, stats, jnp.array([[1.0, 2.0], [1.0, 2.0]]))
    assert running_return(carried) == [1.5, 3.0]


def test_nnx_jit_creates_the_return_in_place():
    stats = RewardRunningMeanStd(gamma=0.5)
    for graph in (True, False):
        fold = nnx.jit(lambda s, r, e: s.record_reward(r, e), graph=graph)
        fold(stats, jnp.array([1.0]), NO)
    assert running_return(stats) == [1.5] and stats.to_numpy().count == 3


def test_tree_of_rewards_and_flags_in_the_rewards_shape():
    stats = RewardRunningMeanStd({"a": (), "b": 2}, gamma=0.5)
    reward = {"a": jnp.ones(3), "b": jnp.ones((3, 2), jnp.int32)}
    for _ in range(2):
        stats.record_reward(reward, jnp.array([0.0, 1.0, 0.0]))
    assert stats.discounted_reward.get_value()["b"][:, 0].tolist() == [1.5, 1.0, 1.5]
    column = RewardRunningMeanStd((1,), gamma=0.5)
    for _ in range(2):
        column.record_reward(jnp.ones((2, 1)), jnp.array([[False], [True]]))
    assert running_return(column) == [[1.5], [1.0]]


def test_nan_ends_with_its_episode():
    stats = RewardRunningMeanStd(gamma=0.5)
    assert play(stats, [np.nan, 1.0, 1.0], [False, False, True])[2] == 1.0


def test_override_of_record_moments_sees_the_returns():
    class Seen(RewardRunningMeanStd):
        def record_moments(self, x: Any) -> None:
            seen.append(x.tolist())

    seen: list[Any] = []
    play(Seen(gamma=0.5), [1.0, 1.0], [False, False])
    assert seen == [[1.0], [1.5]]


def test_steady_return_is_that_of_gamma():
    for gamma, steady in ((0.9, 10.0), (0.99, 100.0)):
        stats = RewardRunningMeanStd(gamma=gamma, num_envs=1)
        fold = nnx.jit(lambda s: s.record_reward(jnp.ones(1), NO))
        for _ in range(300):
            fold(stats)
        expected = steady * (1 - gamma**300)
        assert running_return(stats)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, 99, float("nan")])
def test_gamma_out_of_range_is_refused(gamma: float):
    with pytest.raises(ValueError, match="gamma"):
        RewardRunningMeanStd(gamma=gamma)


def test_gamma_is_required():
    with pytest.raises(TypeError, match="gamma"):
        RewardRunningMeanStd()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("reward", "terminated", "message"),
    [
        (jnp.ones(2), jnp.zeros(3, bool), r"terminated has shape \(3,\)"),
        (jnp.ones((4, 2)), jnp.zeros(2, bool), "reward has the leading axes"),
        (jnp.float32(1.0), NO, "no leading axis"),
    ],
)
def test_a_refused_step_changes_nothing(reward: Any, terminated: Any, message: str):
    stats = RewardRunningMeanStd(gamma=0.5)
    play(stats, [1.0], [False])
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(stats)))
    with pytest.raises(ValueError, match=message):
        stats.record_reward(reward, terminated)
    after = nnx.to_pure_dict(nnx.state(stats))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_axis_combines_the_returns_of_all_devices_and_keeps_each():
    stats = RewardRunningMeanStd(gamma=0.5, axis_name="d", initial_count=0, num_envs=2)
    axes = nnx.StateAxes({RunningReturn: 0, ...: None})
    nnx.update(
        stats,
        jax.tree.map(lambda v: jnp.stack([v, v]), nnx.state(stats, RunningReturn)),
    )
    fold = nnx.vmap(
        lambda s, r: s.record_reward(r, jnp.zeros(2, bool)),
        in_axes=(axes, 0),
        axis_name="d",
    )
    fold(stats, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    assert stats.to_numpy().count == 4 and stats.to_numpy().mean.item() == 2.5
    assert running_return(stats) == [[1.0, 2.0], [3.0, 4.0]]
