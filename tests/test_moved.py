# SPDX-License-Identifier: Apache-2.0
"""Statistics read off modules and off what other libraries make."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import (
    Normalizer,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    moved,
)
from nnx_norm.conventions import ADDED_TO_STD


def test_field_reads_objects_mappings_and_variables():
    variable = nnx.Variable(jnp.ones(2))
    for source in ({"mean": variable}, types.SimpleNamespace(mean=variable)):
        assert np.asarray(moved.field(source, "mean")).tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="has no 'var'"):
            moved.field(source, "var")
        assert moved.optional(source, "var", 3) == 3


def test_float64_of_every_kind_of_tree():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": (np.int64(3), nnx.Variable(4.0))}
    out = moved.float64(tree)
    assert out["a"].dtype == out["b"][0].dtype == np.float64
    assert moved.float64([1, 2]).tolist() == [1.0, 2.0]
    assert moved.number(jnp.full((1,), 7)) == 7.0


@pytest.mark.parametrize(
    "module",
    [
        Normalizer(2),
        RunningMeanStd(2, epsilon=1.0),
        RewardNormalizer(0.9, shape=2),
        RewardRunningMeanStd(2, gamma=0.9, epsilon=1.0),
    ],
    ids=lambda m: type(m).__name__,
)
def test_exported_is_what_the_module_divides_by(module: Any):
    if isinstance(module, RunningMeanStd):
        module.update_from_moments([1.0, 2.0], [3.0, 8.0], 1e9)
    else:
        module.set_statistics([1.0, 2.0], [4.0, 9.0], 10)
    out = moved.exported(module)
    size = 1.0 if isinstance(module, RunningMeanStd) else 0.0
    assert out.std == pytest.approx(np.sqrt(out.variance + size))
    assert out.std == pytest.approx([2.0, 3.0])
    ones = np.asarray(module.normalize(np.ones(2, np.float32)))
    centre = 0.0 if "Reward" in type(module).__name__ else out.mean
    assert ones == pytest.approx((1 - centre) / out.std, abs=1e-6)


def test_excluded_leaves_are_none():
    norm = Normalizer({"a": 1, "b": 2}, exclude=["b"])
    assert moved.exported(norm).mean["b"] is None
    assert moved.variance_for(moved.exported(norm), ADDED_TO_STD, 0.1)["b"] is None


def test_what_has_no_statistics_is_refused():
    with pytest.raises(TypeError, match="Linear"):
        moved.exported(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="no shape yet"):
        moved.exported(RunningMeanStd())
    with pytest.raises(ValueError, match="dict; expected one array"):
        moved.one_array({"a": np.zeros(1)})
