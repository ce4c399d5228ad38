# SPDX-License-Identifier: Apache-2.0
"""State dicts of rsl_rl and skrl; the libraries themselves: interop/check_torch.py."""

import types
from typing import Any

import numpy as np
import pytest

from nnx_norm import Normalizer, RewardNormalizer, RewardRunningMeanStd
from nnx_norm.interop import (
    from_rsl_rl,
    from_rsl_rl_rewards,
    from_skrl,
    from_torchrl,
    to_rsl_rl,
    to_skrl,
)
from nnx_norm.moved import exported


@pytest.fixture
def ours() -> Normalizer:
    norm = Normalizer((2, 3))
    norm.set_statistics(np.arange(6.0).reshape(2, 3), 4.0, 2**40 + 1)
    return norm


@pytest.mark.parametrize("prefix", ["", "agent.norm"])
@pytest.mark.parametrize(
    ("to", "back"), [(to_rsl_rl, from_rsl_rl), (to_skrl, from_skrl)]
)
def test_export_and_import_keep_statistics(
    ours: Normalizer, to: Any, back: Any, prefix: str
):
    state = {f"{prefix}.{k}" if prefix else k: v for k, v in to(ours).items()}
    norm = back(state, prefix)
    assert norm.count == 2**40 + 1
    assert exported(norm).std == pytest.approx(exported(ours).std, rel=1e-7)
    assert exported(norm).mean.tolist() == exported(ours).mean.tolist()
    nested = {"agent": {"norm": to(ours)}}
    assert back(nested, "agent.norm").count == 2**40 + 1
    with pytest.raises(ValueError, match="has no"):
        back(nested, "agent.other")


def test_dtypes_and_shapes_of_state_dicts(ours: Normalizer):
    state = to_rsl_rl(ours)
    assert {k: (v.shape, v.dtype.name) for k, v in state.items()} == {
        "_mean": ((1, 2, 3), "float32"),
        "_var": ((1, 2, 3), "float32"),
        "_std": ((1, 2, 3), "float32"),
        "count": ((), "int64"),
    }
    assert {v.dtype.name for v in to_skrl(ours).values()} == {"float64"}
    with pytest.raises(ValueError, match="epsilon 3"):
        to_skrl(ours, epsilon=3.0)


@pytest.mark.parametrize("key", ["goal", ("agent", "goal")])
def test_torchrl_nested_keys_and_decay(key: Any):
    count = (*key[:-1], "goal_count") if isinstance(key, tuple) else "goal_count"
    parts = {"loc": {key: np.ones(1)}, "scale": {key: np.full(1, 2.0)}, "eps": 1e-4}
    old = types.SimpleNamespace(_td={count: np.ones(1) * 7}, decay=0.5, **parts)
    new = types.SimpleNamespace(_td=None, _count={key: 2}, decay=0.5, **parts)
    assert from_torchrl(old, key).count == 7
    assert from_torchrl(new, key).count == 1.5


def test_rewards_of_rsl_rl_there_and_back():
    norm = RewardNormalizer(0.9)
    norm.set_statistics(1.0, 4.0, 50)
    state = {f"rnd.norm.emp_norm.{k}": v for k, v in to_rsl_rl(norm, epsilon=0).items()}
    std: Any = state["rnd.norm.emp_norm._std"]
    assert std.tolist() == [2.0]  # with no epsilon on it
    back = from_rsl_rl_rewards(state, "rnd.norm", gamma=0.5)
    assert (back.count, back.gamma, float(back.std)) == (50, 0.5, 2.0)
    assert back.running_return.get_value() is None  # the state dict has none
    with pytest.raises(ValueError, match="has no 'emp_norm'"):
        from_rsl_rl_rewards(state, "rnd.norm.emp_norm")


def test_rewards_of_rsl_rl_bring_discount_and_returns_of_a_module():
    inner = {"_mean": np.ones((1, 1)), "_var": np.full((1, 1), 4.0), "count": 9}
    average = types.SimpleNamespace(gamma=0.8, avg=np.array([[1.0], [-1.0]]))
    source = types.SimpleNamespace(emp_norm=inner, disc_avg=average)
    norm = from_rsl_rl_rewards(source, gamma=0.5)
    assert norm.gamma == 0.8
    assert norm.running_return.get_value().tolist() == [1.0, -1.0]
    port = RewardRunningMeanStd(gamma=0.8, epsilon=1e-8)
    assert from_rsl_rl_rewards(source, into=port) is port
    assert float(port.normalize(4.0)) == pytest.approx(2.0, rel=1e-6)
    assert port.discounted_reward.get_value().tolist() == [1.0, -1.0]


def test_damaged_statistics_are_refused():
    state = {"_mean": np.zeros((1, 2)), "_var": np.array([[1.0, -1.0]]), "count": 9}
    with pytest.raises(ValueError, match="variance of the input is -1; expected none"):
        from_rsl_rl(state)
    state["_var"] = np.array([[1.0, -1e-8]])  # what rounding leaves
    assert exported(from_rsl_rl(state)).std.tolist() == pytest.approx([1.01, 0.01])
    state["_var"] = np.ones(2)
    with pytest.raises(ValueError, match=r"_var has the shape \(2,\); expected \(1, "):
        from_rsl_rl(state)


def test_torchrl_of_another_entry_names_those_it_has():
    parts = {"loc": {"goal": np.ones(1)}, "scale": {"goal": np.ones(1)}, "eps": 1e-4}
    for counts in ({"_td": {"goal_count": 9}}, {"_td": None, "_count": {"goal": 9}}):
        source = types.SimpleNamespace(decay=1.0, in_keys=["goal"], **counts, **parts)
        with pytest.raises(ValueError, match=r"no statistics of 'obs'; .*\['goal'\]"):
            from_torchrl(source, "obs")
        assert from_torchrl(source, "goal").count == 9


def test_a_mean_and_a_variance_of_other_shapes_are_named():
    state = {"_mean": np.zeros((1, 2)), "_var": np.ones((1, 3)), "count": 9}
    with pytest.raises(ValueError, match=r"mean has the shapes \(2,\) and .* \(3,\)"):
        from_rsl_rl(state)
