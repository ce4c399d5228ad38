# SPDX-License-Identifier: Apache-2.0
"""Running returns end after the last reward of an episode; rewards are only scaled."""

import json
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support import EPS, bits, moments64, statistics

from nnx_norm import NormalizerStatistics, RewardNormalizer, RunningReturn

T, B = 6, 3


def column(values: Any) -> jax.Array:
    """Values of one environment over time, as [T, 1]."""
    array = jnp.asarray(values)
    return (array if array.dtype == bool else array.astype(jnp.float32))[:, None]


def ends(steps: int, *at: int) -> jax.Array:
    return column([t in at for t in range(steps)])


def returns_of(
    rewards: Any, done: Any, gamma: float, mask: Any = None, start: Any = 0.0
):
    """The oracle, in float64: the returns [T, B] that count, and what is carried on."""
    rewards, running = np.asarray(rewards, np.float64), np.zeros(np.shape(rewards)[1])
    running = running + start
    seen = []
    for t in range(len(rewards)):
        valid = np.ones(len(running), bool) if mask is None else np.asarray(mask[t])
        running = np.where(valid, gamma * running + rewards[t], running)
        seen.append(running[valid])
        running = np.where(valid & np.asarray(done[t]), 0.0, running)
    return np.concatenate(seen), running


def assert_folded(norm: RewardNormalizer, returns: np.ndarray, rtol: float = 2e-6):
    right, d = moments64(returns), norm.to_dict()
    assert d["count"] == right.count
    spread = np.sqrt(right.M2 / right.count)
    assert abs(d["mean"] - right.mean) <= rtol * (spread + abs(right.mean))
    np.testing.assert_allclose(d["M2"], right.M2, rtol=10 * rtol)


# Returns


def test_a_return_ends_after_the_last_reward_of_its_episode():
    rewards = column([1, 2, 3, 4, 5])  # returns 1, 2.5, 4.25, 4, 7
    for flags in (
        {"terminated": ends(5, 2)},
        {"terminated": ends(5), "truncated": ends(5, 2)},
        {"terminated": ends(5, 2), "truncated": ends(5, 2)},
        {"terminated": ends(5, 2).astype(jnp.float32)},
        {"terminated": np.asarray(ends(5, 2))},
    ):
        norm = RewardNormalizer(0.5)
        norm.update(rewards, **flags)
        assert statistics(norm) == (3.75, 20.0, 5)
        assert (float(norm.variance), float(norm.std)) == (4.0, 2.0)
        assert norm.running_return.get_value().tolist() == [7.0]


def test_without_an_end_the_return_goes_on():
    norm = RewardNormalizer(0.5)
    norm.update(column([1, 2, 3, 4, 5]), ends(5))
    assert_folded(norm, np.array([1, 2.5, 4.25, 6.125, 8.0625]))


def test_undiscounted_returns_of_episodes_are_bounded():
    norm = RewardNormalizer(1)
    norm.update(column([1] * 6), ends(6, 2, 5))
    assert statistics(norm) == (2.0, 4.0, 6)
    assert norm.running_return.get_value().tolist() == [0.0]


def test_gamma_zero_scales_by_the_rewards_themselves():
    norm = RewardNormalizer(0)
    norm.update(column([1, 3, 5, 7]), ends(4))
    assert statistics(norm) == (4.0, 20.0, 4)


def test_a_masked_step_is_as_if_absent():
    norm, right = RewardNormalizer(0.5), RewardNormalizer(0.5)
    done = column([False, False, True, True, False, False])
    mask = column([True, True, True, False, True, True])
    for dummy in (0.0, math.nan):
        norm.reset()
        norm.update(column([1, 2, 3, dummy, 4, 5]), done, mask=mask)
        assert statistics(norm) == (3.75, 20.0, 5)
    right.update(column([1, 2, 3, 4, 5]), ends(5, 2))
    assert bits(norm) == bits(right)
    kept = RewardNormalizer(0.5)  # also in the middle of an episode, its end unread
    kept.update(column([1, 9, 2]), ends(3, 1), mask=column([True, False, True]))
    assert kept.running_return.get_value().tolist() == [2.5]


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.99, 1.0]))
def test_returns_of_any_rollout_are_those_of_the_oracle(seed, gamma):
    rng = np.random.default_rng(seed)
    norm, seen, running = RewardNormalizer(gamma), [], 0.0
    for _ in range(2):  # the running returns go on from call to call
        rewards = rng.normal(size=(T, B)).astype(np.float32) + 1
        terminated, truncated, mask = rng.random((3, T, B)) < [
            [[0.2]],
            [[0.2]],
            [[0.8]],
        ]
        mask[0] = True
        norm.update(rewards, terminated, truncated, mask)
        done = terminated | truncated
        returns, running = returns_of(rewards, done, gamma, mask, running)
        seen.append(returns)
        carried = norm.running_return.get_value()
        np.testing.assert_allclose(carried, running, rtol=4 * EPS, atol=1e-6)
    assert_folded(norm, np.concatenate(seen))


@hypothesis.given(st.integers(0, 2**32 - 1))
def test_any_cut_in_time_folds_the_same_returns(seed):
    rng = np.random.default_rng(seed)
    rewards = np.round(rng.normal(size=(T, B)) * 4).astype(np.float32)
    done = rng.random((T, B)) < 0.3
    whole, cut = RewardNormalizer(0.5), RewardNormalizer(0.5)
    whole.update(rewards, done)
    for part in (slice(0, 3), slice(3, T)):
        cut.update(rewards[part], done[part])
    for norm in (whole, cut):
        assert_folded(norm, returns_of(rewards, done, 0.5)[0])
    a, b = cut.running_return.get_value(), whole.running_return.get_value()
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("gamma", [0.9, 0.99, 0.9999])
def test_gamma_is_not_rounded(gamma):
    steps = 2000
    norm = RewardNormalizer(gamma)
    norm.update(jnp.ones((steps, 1)), jnp.zeros((steps, 1), bool))
    right = (1 - gamma**steps) / (1 - gamma)
    assert norm.running_return.get_value()[0] == pytest.approx(right, rel=1e-6)


def test_environments_do_not_mix():
    norm = RewardNormalizer(0.5)
    rewards = jnp.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    norm.update(rewards, jnp.array([[False, True], [False, False], [True, False]]))
    assert norm.running_return.get_value().tolist() == [0.0, 40.0]
    assert_folded(norm, np.array([1, 10, 2.5, 20, 4.25, 40]))


# Scaling


def test_rewards_are_never_centred():
    norm = RewardNormalizer(0.5)
    norm.update(column([1, 1, 1, 1]), ends(4))
    assert float(norm.normalize(1.0)) == pytest.approx(2.984, abs=1e-3)
    assert float(norm.normalize(0.0)) == 0.0
    assert float(norm.normalize(-1.0)) == -float(norm.normalize(1.0))


def test_the_divisor_is_one_until_two_different_returns_are_known():
    norm = RewardNormalizer(0.9, clip=100.0)
    assert (float(norm.normalize(3.0)), float(norm.std)) == (3.0, 1.0)
    norm.update(jnp.ones((1, 1)), jnp.zeros((1, 1), bool))
    assert (float(norm.normalize(1.0)), norm.count) == (1.0, 1)
    zeros = RewardNormalizer(0.9)
    zeros.update(jnp.zeros((1, 4096)), jnp.zeros((1, 4096), bool))
    assert (float(zeros.normalize(100.0)), float(zeros.normalize(0.0))) == (100.0, 0.0)
    equal = RewardNormalizer(0.9)
    equal.update(jnp.ones((1, 4096)), jnp.zeros((1, 4096), bool))
    assert (float(equal.normalize(1.0)), float(equal.to_dict()["std"])) == (1.0, 1.0)
    equal.update(2 * jnp.ones((1, 4096)), jnp.zeros((1, 4096), bool))
    assert float(equal.std) == pytest.approx((2.9 - 1) / 2)


def test_epsilon_is_the_floor_of_the_variance_once_returns_differ():
    norm = RewardNormalizer(0.0, epsilon=4.0)
    norm.update(column([1, 3]), ends(2))
    assert (float(norm.variance), float(norm.std)) == (1.0, 2.0)
    assert float(norm.normalize(5.0)) == 2.5


def test_clip_and_inverse():
    norm = RewardNormalizer(0.0, clip=1.5)
    norm.update(column([1, 5]), ends(2))  # std 2
    r = jnp.array([-100.0, -2.0, 0.0, 2.0, 100.0])
    assert norm.normalize(r).tolist() == [-1.5, -1.0, 0.0, 1.0, 1.5]
    assert norm.denormalize(norm.normalize(r)).tolist() == [-3.0, -2.0, 0.0, 2.0, 3.0]
    assert float(norm.denormalize(7.0)) == 14.0
    never = RewardNormalizer(0.0, clip=0)
    assert never.normalize(r).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    "dtype, right",
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("int32", "float32")],
)
def test_rewards_keep_their_float_dtype(dtype, right):
    norm = RewardNormalizer(0.5)
    r = jnp.array([[1, 2, 3], [4, 5, 6]], dtype)
    norm.update(r, jnp.zeros((2, 3), bool))
    assert_folded(norm, returns_of(r, np.zeros((2, 3), bool), 0.5)[0])
    assert norm.normalize(r).dtype == norm.denormalize(r).dtype == right
    assert {kind[0] for kind in bits(norm).values()} == {"float32"}


# Trees


def test_a_tree_of_rewards_has_one_scale_per_element():
    norm = RewardNormalizer(0.5, shape={"task": (), "cost": 2}, num_envs=1)
    task, cost = column([1, 2, 3, 4, 5]), column([2, 4, 6, 8, 10])
    rewards = {"cost": jnp.stack([cost, -100 * cost], axis=-1), "task": task}
    norm.update(rewards, ends(5, 2))
    assert norm.variance["task"] == 4.0
    assert norm.variance["cost"].tolist() == [16.0, 160000.0]
    assert norm.running_return.get_value()["cost"].tolist() == [[14.0, -1400.0]]
    out = norm.normalize(rewards)
    assert out["cost"][0].tolist() == [[0.5, -0.5]] and out["task"].tolist()[4] == [2.5]
    assert jax.tree.map(jnp.shape, out) == {"cost": (5, 1, 2), "task": (5, 1)}
    empty = RewardNormalizer(0.5, shape={})
    empty.update({}, ends(5))
    assert (empty.count, empty.normalize({})) == (0, {})


# NaN


def test_a_step_that_is_not_finite_stays_out_of_the_return():
    norm = RewardNormalizer(0.5)
    rewards = column([1, 2, math.nan, 3, math.inf, 4, 5])
    norm.update(rewards, ends(7, 3))
    assert statistics(norm) == (3.75, 20.0, 5)
    assert norm.to_dict()["skipped"] == 2
    ended = RewardNormalizer(0.5)  # its end is read: only the reward is unknown
    ended.update(column([1, math.nan, 3]), ends(3, 1))
    assert ended.running_return.get_value().tolist() == [3.0]
    tree = RewardNormalizer(0.5, shape={"task": (), "cost": 2}, num_envs=1)
    task, cost = column([1, 1, 1, 1, math.nan]), jnp.ones((5, 1, 2))
    tree.update({"task": task, "cost": cost.at[4].set(9.0)}, ends(5, 2, 3))
    assert tree.count == 4 and tree.to_dict()["skipped"] == 1
    assert tree.running_return.get_value()["cost"].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("huge", [3e38, -3e38])
def test_a_return_that_float32_cannot_hold_is_a_skipped_step(huge: float):
    rewards = np.full((6, 2), 2.0, np.float32)
    rewards[2:4, 0] = huge  # each is finite; the second makes a return that isn't
    norm = RewardNormalizer(0.9, num_envs=2)
    norm.update(rewards[:2], np.zeros((2, 2)))
    before = norm.to_dict()
    norm.update(rewards[3:4], np.zeros((1, 2)))  # its square is beyond float32: refused
    norm.update(rewards[3:4], np.zeros((1, 2)))
    returns = np.asarray(norm.running_return.get_value())
    # One step of 3e38 was taken, the other would be infinite and stands still.
    np.testing.assert_allclose(returns[0], 0.9 * 3.8 + huge, rtol=1e-6)
    assert np.isfinite(norm.to_dict()["variance"])
    assert norm.count + norm.skipped.get_value() == before["count"] + 4
    ended = np.array([[True, False]])
    norm.update(rewards[4:5], ended)
    norm.update(rewards[5:], np.zeros((1, 2)))
    assert norm.running_return.get_value()[0] == 2.0  # and the next episode is like any


def test_propagate_lets_a_return_overflow():
    norm = RewardNormalizer(1.0, nonfinite="propagate")
    norm.update(np.full((2, 1), 3e38, np.float32), np.zeros((2, 1)))
    assert np.isinf(norm.running_return.get_value()).all()


@pytest.mark.parametrize("lead", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("num_envs", [3, None])
def test_no_step_and_no_environment_change_nothing(lead, num_envs):
    norm = RewardNormalizer(0.9, num_envs=num_envs)
    norm.update(np.ones((2, 3), np.float32), np.zeros((2, 3)))
    before = bits(norm)
    nothing = np.ones(lead, np.float32), np.zeros(lead)
    norm.update(*nothing)
    nnx.jit(RewardNormalizer.update)(norm, *nothing)
    assert bits(norm) == before


def test_a_device_without_steps_keeps_its_returns_and_folds_those_of_others():
    norm = RewardNormalizer(0.9, num_envs=3, axis_name="d")
    norm.running_return.set_value(jnp.float32([1, 2, 3]))
    update = nnx.vmap(
        lambda norm, r, ends: norm.update(r, ends),
        in_axes=None,
        axis_name="d",
        axis_size=2,
    )
    update(norm, np.ones((0, 3), np.float32), np.zeros((0, 3)))
    assert norm.running_return.get_value().tolist() == [1, 2, 3] and norm.count == 0


def test_propagate_lets_nan_in():
    norm = RewardNormalizer(0.5, nonfinite="propagate")
    norm.update(column([1, math.nan]), ends(2))
    assert np.isnan(norm.mean.get_value()) and norm.count == 2
    assert norm.to_dict()["skipped"] == 0


# State


def test_running_returns_exist_from_the_start_if_their_number_is_known():
    norm = RewardNormalizer(0.5, num_envs=B)
    assert norm.running_return.get_value().tolist() == [0.0] * B
    assert list(nnx.state(norm, RunningReturn)) == ["running_return"]
    assert not issubclass(RunningReturn, NormalizerStatistics)
    assert RewardNormalizer(0.5).running_return.get_value() is None


def test_another_number_of_environments_starts_the_returns_anew():
    norm = RewardNormalizer(0.5, num_envs=2)
    norm.update(jnp.ones((1, 2)), jnp.zeros((1, 2), bool))
    norm.update(jnp.full((1, 3), 4.0), jnp.zeros((1, 3), bool))
    assert norm.running_return.get_value().tolist() == [4.0] * 3
    assert norm.count == 5
    norm.update(jnp.full((1, 3), 4.0), jnp.zeros((1, 3), bool))
    assert norm.running_return.get_value().tolist() == [6.0] * 3


def test_a_state_of_another_number_of_environments_starts_the_returns_anew():
    saved = RewardNormalizer(0.5, num_envs=2)
    saved.update(jnp.ones((1, 2)), jnp.zeros((1, 2), bool))
    for num_envs in (None, 3):
        resumed = RewardNormalizer(0.5, num_envs=num_envs)
        nnx.update(resumed, nnx.state(saved))
        resumed.update(jnp.full((1, 3), 4.0), jnp.zeros((1, 3), bool))
        assert resumed.running_return.get_value().tolist() == [4.0] * 3
        assert resumed.count == 5


def test_the_module_is_a_scan_carry():
    rewards = np.arange(4.0, dtype=np.float32).reshape(4, 1, 1) + np.ones((4, 1, B))
    rewards = jnp.asarray(rewards, jnp.float32)
    done = jnp.zeros((4, 1, B), bool)

    def body(norm: RewardNormalizer, now: Any) -> Any:
        norm.update(*now)
        return norm, norm.normalize(now[0])

    norm, _ = jax.lax.scan(body, RewardNormalizer(0.5, num_envs=B), (rewards, done))
    right = RewardNormalizer(0.5)
    for now in zip(rewards, done, strict=True):
        right.update(*now)
    assert bits(norm) == bits(right) and norm.count == 4 * B


@pytest.mark.parametrize("scan", ["jax.lax", "nnx"])
def test_a_scan_says_that_num_envs_is_missing(scan):
    def body(norm: RewardNormalizer, rewards: Any) -> Any:
        norm.update(rewards, jnp.zeros(rewards.shape, bool))
        return norm, None

    norm, rewards = RewardNormalizer(0.5), jnp.ones((2, 1, B))
    with pytest.raises(TypeError, match=r"running_return.*NumEnvsNotGiven"):
        if scan == "nnx":
            nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
                norm, rewards
            )
        else:
            jax.lax.scan(body, norm, rewards)
    assert norm.running_return.get_value() is None and norm.count == 0
    norm.update(rewards[0], jnp.zeros((1, B), bool))  # no tracer was left
    assert norm.count == B


def test_one_trace_serves_all_rollouts():
    traces = []

    @nnx.jit
    def update(norm: RewardNormalizer, rewards: Any, done: Any) -> None:
        traces.append(1)
        norm.update(rewards, done)

    norm, done = RewardNormalizer(0.5, num_envs=1), ends(5, 2)
    for _ in range(3):
        update(norm, column([1, 2, 3, 4, 5]), done)
    update(RewardNormalizer(0.5, num_envs=1), column([1, 2, 3, 4, 5]), done)
    assert len(traces) == 1 and norm.count == 15
    for change in (norm.freeze, norm.unfreeze) * 3:
        change()
        update(norm, column([1, 2, 3, 4, 5]), done)
    assert len(traces) == 2 and norm.count == 30


def test_a_member_of_a_population_is_like_one_alone():
    norm = nnx.vmap(lambda _: RewardNormalizer(0.5, num_envs=1))(jnp.arange(2))
    rewards = jnp.stack([column([1, 2, 3, 4, 5]), 2 * column([1, 2, 3, 4, 5])])
    nnx.vmap(lambda n, r: n.update(r, ends(5, 2)))(norm, rewards)
    assert norm.variance.tolist() == [4.0, 16.0]
    assert norm.count.tolist() == [5, 5]


def test_rewards_that_depend_on_parameters_carry_no_gradient_into_the_statistics():
    def loss(scale: Any) -> Any:
        module = RewardNormalizer(0.5, num_envs=1)
        module.update(scale * column([1, 2, 3, 4, 5]), ends(5, 2))
        return sum(jnp.sum(v) for v in jax.tree.leaves(nnx.state(module)))

    assert jax.grad(loss)(jnp.float32(2.0)) == 0.0
    assert loss(jnp.float32(2.0)) == 5 + 7.5 + 80 + 14  # count, mean, M2 and return


def test_a_checkpoint_goes_on_in_the_middle_of_an_episode(tmp_path: Path):
    norm = RewardNormalizer(0.5, num_envs=1)
    norm.update(column([1, 1]), ends(2))
    abstract = nnx.eval_shape(lambda: RewardNormalizer(0.5, num_envs=1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(norm))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", nnx.state(abstract))
    nnx.update(abstract, restored)
    assert bits(abstract) == bits(norm)
    abstract.update(column([1]), ends(1))
    assert abstract.running_return.get_value().tolist() == [1.75]
    assert abstract.count == 3


def test_reset_starts_the_returns_anew_and_frozen_leaves_them():
    norm = RewardNormalizer(0.5, num_envs=1)
    norm.update(column([1, 2]), ends(2))
    norm.freeze()
    before = bits(norm)
    norm.update(column([100, math.nan]), ends(2))
    assert bits(norm) == before
    norm.unfreeze()
    norm.reset()
    assert bits(norm) == bits(RewardNormalizer(0.5, num_envs=1))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("num_envs", [None, B])
def test_from_dict_builds_one_with_its_settings(flat, num_envs):
    norm = RewardNormalizer(
        0.9, shape={"a": (), "b": 2}, num_envs=num_envs, clip=5, axis_name=("d", "e")
    )
    norm.set_statistics(0.1, 2.3, 7.5)
    again = RewardNormalizer.from_dict(norm.to_dict(flat=flat))
    assert bits(again) == bits(norm)
    text = json.dumps(norm.to_dict(flat=flat), default=lambda v: v.tolist())
    assert bits(RewardNormalizer.from_dict(json.loads(text))) == bits(norm)
    for name in ("gamma", "clip", "epsilon", "axis_name", "nonfinite", "spec"):
        assert getattr(again, name) == getattr(norm, name)


def test_from_dict_builds_a_population():
    norm = nnx.vmap(lambda _: RewardNormalizer(0.5, num_envs=B))(jnp.arange(2))
    norm.set_statistics(0.0, 4.0, [2, 3])
    assert bits(RewardNormalizer.from_dict(norm.to_dict(flat=True))) == bits(norm)


def test_flags_of_masked_steps_are_not_read():
    norm, odd = RewardNormalizer(0.5, num_envs=B), jnp.full((2, B), jnp.nan)
    mask = jnp.array([[True] * B, [False] * B])
    norm.update(jnp.ones((2, B)), odd.at[0].set(0.0), odd.at[0].set(1.0), mask)
    assert norm.count == B and norm.running_return.get_value().tolist() == [0.0] * B


# Refusals


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"gamma": 99}, ValueError),
        ({"gamma": -0.1}, ValueError),
        ({"gamma": math.nan}, ValueError),
        ({"gamma": "0.9"}, TypeError),
        ({"epsilon": -1e-8}, ValueError),
        ({"epsilon": 0}, ValueError),
        ({"clip": -1}, ValueError),
        ({"num_envs": -1}, ValueError),
        ({"num_envs": 1.5}, TypeError),
        ({"nonfinite": "drop"}, ValueError),
        ({"shape": 1.5}, TypeError),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        RewardNormalizer(**{"gamma": 0.9, **settings})


def test_gamma_is_required():
    with pytest.raises(TypeError, match="gamma"):
        RewardNormalizer()  # pyright: ignore[reportCallIssue]


GOOD = {"rewards": jnp.ones((2, 3)), "terminated": jnp.zeros((2, 3), bool)}
BAD = {
    "one axis": ({"rewards": jnp.ones(3)}, ValueError, "rewards[None]"),
    "no axis": ({"rewards": 1.0}, ValueError, "rewards has shape ()"),
    "three axes": ({"rewards": jnp.ones((2, 3, 1))}, ValueError, "(T, B)"),
    "terminated": (
        {"terminated": jnp.zeros((3, 2), bool)},
        ValueError,
        "terminated has shape (3, 2); expected (T, B) = (2, 3)",
    ),
    "truncated": (
        {"truncated": jnp.zeros((2,), bool)},
        ValueError,
        "truncated has shape (2,)",
    ),
    "mask shape": ({"mask": jnp.ones(2, bool)}, ValueError, "mask has shape (2,)"),
    "mask dtype": (
        {"mask": np.ones((2, 3), np.float32)},
        TypeError,
        "mask has dtype float32",
    ),
    "no flag": ({"terminated": None}, TypeError, "terminated is None"),
    "text": ({"rewards": "text"}, TypeError, "rewards is 'text'"),
    "tree": ({"rewards": {"a": jnp.ones((2, 3))}}, ValueError, "rewards['a']"),
}


@pytest.mark.parametrize("bad, error, words", BAD.values(), ids=BAD.keys())
def test_a_refused_call_changes_nothing(bad, error, words):
    norm = RewardNormalizer(0.5, num_envs=3)
    norm.set_statistics(0.1, 2.3, 7)
    before = bits(norm)
    with pytest.raises(error) as caught:
        norm.update(**{**GOOD, **bad})
    assert words in str(caught.value)
    assert bits(norm) == before


def test_an_axis_that_is_not_bound_is_named_and_changes_nothing():
    norm = RewardNormalizer(0.5, num_envs=3, axis_name="devcies")
    before = bits(norm)
    with pytest.raises(ValueError, match="axis_name 'devcies' is not bound"):
        norm.update(**GOOD)
    assert bits(norm) == before
    assert float(norm.normalize(1.0)) == 1.0


def test_normalize_names_what_does_not_fit():
    norm = RewardNormalizer(0.5, shape={"a": 2})
    with pytest.raises(ValueError, match=r"rewards\['a'\] has shape \(3,\)"):
        norm.normalize({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"rewards\['a'\] is missing"):
        norm.denormalize({})
