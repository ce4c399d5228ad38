# SPDX-License-Identifier: Apache-2.0
"""State dicts of the PyTorch RunningMeanStd, in and out."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import (
    RewardRunningMeanStd,
    RunningMeanStd,
    running_mean_std_from_state_dict,
    running_mean_std_to_state_dict,
)


class Tensor:
    """A tensor on a device of its own."""

    def __init__(self, array: Any, ready: bool = False):
        self.array, self.ready, self.shape = np.asarray(array), ready, np.shape(array)

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return Tensor(self.array, True)

    def numpy(self) -> np.ndarray:
        if not self.ready:
            raise TypeError("can't convert device tensor to numpy")
        return self.array


class Agent(nnx.Module):
    """As a model of the source: normalizers at several depths."""

    def __init__(self, width: int | None = None):
        self.reward_norm = RewardRunningMeanStd(gamma=0.9)
        self.heads = nnx.List([RunningMeanStd(width), RunningMeanStd(2)])


def saved(seed: int = 0, prefix: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in (("reward_norm", ()), ("heads.0", (3,)), ("heads.1", (2,))):
        scale = 10 ** rng.uniform(-6, 6)
        out[f"{prefix}{name}.mean"] = np.asarray(rng.normal(size=shape) * scale)
        out[f"{prefix}{name}.var"] = np.asarray(rng.random(shape) * scale**2)
        out[f"{prefix}{name}.count"] = np.asarray(rng.integers(1, 2**48))
    return out | {f"{prefix}heads.0.weight": np.ones((2, 2))}


def own(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if not k.endswith("weight")}


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("prefix", ["", "actor.", "model.actor."])
def test_there_and_back_is_exact_in_float64(width: int | None, prefix: str):
    for seed in range(10):
        state = saved(seed, prefix)
        agent = running_mean_std_from_state_dict(Agent(width), state, prefix)
        back = running_mean_std_to_state_dict(agent, prefix)
        assert back.keys() == own(state).keys()
        for key, value in back.items():
            assert value.dtype == state[key].dtype and value.shape == state[key].shape
            assert value.tobytes() == state[key].tobytes()


def test_tensors_and_nested_mappings():
    state = saved()
    tensors = {k: Tensor(v) for k, v in state.items()}
    nested = {
        "actor": {"heads": {"0": {k[8:]: state[k] for k in state if "s.0." in k}}}
    }
    agent = running_mean_std_from_state_dict(Agent(), tensors)
    assert agent.heads[0].to_numpy().mean.tolist() == state["heads.0.mean"].tolist()
    one = running_mean_std_from_state_dict(RunningMeanStd(), nested, "actor.heads.0")
    assert one.to_numpy().mean.tolist() == state["heads.0.mean"].tolist()


def test_goes_on_as_the_source_would():
    state = {"mean": np.array([1 / 3]), "var": np.array([2.0]), "count": np.int64(9)}
    stats = running_mean_std_from_state_dict(RunningMeanStd(1), state)
    stats.record_moments(jnp.array([[1.0]]))
    mean = 1 / 3 + (1 - 1 / 3) / 10
    var = (2.0 * 9 + (1 - 1 / 3) ** 2 * 0.9) / 10
    full = stats.to_numpy()
    assert full.mean.item() == pytest.approx(mean, rel=1e-7)
    assert full.var.item() == pytest.approx(var, rel=1e-7)
    assert full.count == 10


def test_running_return_stays():
    agent = Agent(3)
    agent.reward_norm.record_reward(jnp.array([2.0]), jnp.array([False]))
    running_mean_std_from_state_dict(agent, saved())
    returns = agent.reward_norm.discounted_reward.get_value()
    assert jnp.asarray(returns).tolist() == [2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads.1.mean": None}, "'heads.1.mean' is missing"),
        ({"heads.1.count": None}, "'heads.1.count' is missing"),
        ({"heads.1.var": None}, "'heads.1.var' is missing"),
        ({"heads.1.mean": np.zeros(5)}, r"heads.1.mean has shape \(5,\)"),
        ({"heads.1.var": -np.ones(2)}, "heads.1.var"),
        ({"heads.1.count": np.int64(-1)}, "heads.1.count"),
        ({"heads.1.mean": np.array([0.0, 1e39])}, "float32"),
        ({"heads.1.mean": np.array([0.0, np.nan])}, "finite"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    change: Any, message: str
):
    agent = Agent()
    state = {k: v for k, v in (saved() | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        running_mean_std_from_state_dict(agent, state)
    assert agent.heads[0].is_lazy
    assert agent.reward_norm.to_numpy().mean.item() == 0


def test_model_without_statistics_is_refused():
    with pytest.raises(ValueError, match="no RunningMeanStd"):
        running_mean_std_from_state_dict(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), saved())


def test_lazy_modules_are_left_out_and_trees_keep_their_paths():
    assert running_mean_std_to_state_dict(RunningMeanStd()) == {}
    stats = RunningMeanStd((jnp.zeros(2), {"a": jnp.zeros(1)}), initial_count=0.5)
    stats.record_moments((jnp.ones((3, 2)), {"a": jnp.ones((3, 1))}))
    state = running_mean_std_to_state_dict(stats, "norm")
    assert "norm.mean.1.a" in state and state["norm.count"].item() == 3.5
    other = RunningMeanStd((jnp.zeros(2), {"a": jnp.zeros(1)}))
    running_mean_std_from_state_dict(other, state, "norm")
    back = running_mean_std_to_state_dict(other, "norm")
    assert all(back[k].tobytes() == state[k].tobytes() for k in state)


def test_a_wrong_prefix_names_the_right_ones():
    saved = {"a.norm.mean": [0.1], "a.norm.var": [4.0], "a.norm.count": 9}
    with pytest.raises(ValueError, match=r"missing .* statistics at \['a\.norm'\]"):
        running_mean_std_from_state_dict(RunningMeanStd(1), saved, "norm")
    with pytest.raises(ValueError, match="there are such statistics at no prefix"):
        running_mean_std_from_state_dict(RunningMeanStd(1), {"w": [1.0]})
