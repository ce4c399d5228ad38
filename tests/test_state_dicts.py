# SPDX-License-Identifier: Apache-2.0
"""Saved states of every form."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm.state_dicts import as_numpy, find, names, nested, variable

NESTED = {"layers": {"0": {"mean": 1.0}, "1": {"mean": 2.0}}, "count": 3.0}


@pytest.mark.parametrize(
    "state",
    [
        NESTED,
        {"layers": {0: {"mean": 1.0}, 1: {"mean": 2.0}}, "count": 3.0},
        {"layers.0.mean": 1.0, "layers.1.mean": 2.0, "count": 3.0},
        {"layers.0": {"mean": 1.0}, "layers": {"1": {"mean": 2.0}}, "count": 3.0},
        {("layers", 0, "mean"): 1.0, ("layers", 1, "mean"): 2.0, ("count",): 3.0},
        nnx.State({"layers": {0: {"mean": 1.0}, 1: {"mean": 2.0}}, "count": 3.0}),
    ],
    ids=range(6),
)
def test_every_form_is_one(state: Any):
    assert nested(state) == NESTED


def test_variables_and_lists_of_numbers_are_taken_for_what_they_hold():
    state = nested({"mean": nnx.Variable(jnp.ones(2)), "var": [[1, 2], [3, 4]]})
    assert state["mean"].tolist() == [1.0, 1.0] and state["var"].shape == (2, 2)


def test_a_value_cannot_be_a_parent():
    with pytest.raises(ValueError, match="below another value"):
        nested({"a": 1.0, "a.b": 2.0})


def test_paths_go_through_lists_and_end_where_nothing_is():
    assert find({"a": [{"b": 1.0}]}, ("a", 0, "b")) == 1.0
    for path in (("a", 1), ("a", 0, "b", "c"), ("x",)):
        assert find({"a": [{"b": 1.0}]}, path) is None
    assert find(None, ("a",)) is None and find(1.0, ()) == 1.0
    assert names(("a.b", 3)) == ["a", "b", "3"]


def test_level_of_orbax_is_told_from_a_feature_named_value():
    level = {"mean": {"value": 1.0}, "count": {"value": 2.0}}
    feature = {"mean": {"value": 1.0}, "count": 2.0}
    both = {"mean": {"value": {"value": 1.0}}, "count": {"value": 2.0}}
    assert variable(level, "mean") == 1.0
    assert variable(feature, "mean") == variable(both, "mean") == {"value": 1.0}
    assert variable({"mean": {"value": 1.0}}, "mean") == 1.0
    assert variable(None, "mean") is None and variable(level, "var") is None


def test_arrays_of_other_libraries():
    class Lazy:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.arange(3.0)

    for array in (Lazy(), jnp.arange(3.0), np.arange(3.0), [0.0, 1.0, 2.0]):
        assert as_numpy(array).tolist() == [0.0, 1.0, 2.0]


class OfAnotherLibrary:
    """A tensor of a dtype that NumPy lacks: PyTorch's bfloat16 does this."""

    def detach(self) -> "OfAnotherLibrary":
        return self

    cpu = detach

    def numpy(self) -> np.ndarray:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def float(self) -> Any:
        return types.SimpleNamespace(numpy=lambda: np.ones(1, np.float32))


def test_tensors_of_a_dtype_that_numpy_lacks_come_as_float32():
    array = as_numpy(OfAnotherLibrary())
    assert array.dtype == np.float32 and array.tolist() == [1.0]
