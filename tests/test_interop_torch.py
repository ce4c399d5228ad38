# SPDX-License-Identifier: Apache-2.0
"""State dicts of rsl_rl and skrl; the libraries themselves: interop/check_torch.py."""

import types
from typing import Any

import numpy as np
import pytest

from nnx_norm import Normalizer
from nnx_norm.interop import from_rsl_rl, from_skrl, from_torchrl, to_rsl_rl, to_skrl
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
