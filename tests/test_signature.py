# SPDX-License-Identifier: Apache-2.0
"""What help() says of how modules are made, and of how they are called."""

import inspect
import pydoc
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_norm
from nnx_norm import Delay, Normalizer, RewardNormalizer, RunningMeanStd, Sequential

MODULES = [
    value
    for value in map(vars(nnx_norm).get, nnx_norm.__all__)
    if isinstance(value, type) and issubclass(value, nnx.Module)
]


@pytest.mark.parametrize("kind", MODULES, ids=lambda k: k.__name__)
def test_signatures_are_those_of_the_constructors(kind: Any):
    own = inspect.signature(kind.__init__).parameters
    assert list(inspect.signature(kind).parameters) == list(own)[1:]


def test_help_names_the_arguments():
    assert len(MODULES) >= 10
    text = pydoc.plain(pydoc.render_doc(Normalizer))
    assert "|  Normalizer(\n" in text or "|  Normalizer(shape: 'Any', *" in text
    assert "Any, **kwargs" not in text.split("Methods defined here")[0]
    assert "gamma" in str(inspect.signature(RewardNormalizer))


def test_subclasses_and_instances_have_their_own():
    class Mine(Normalizer):
        def __init__(self, size: int):
            super().__init__(size)

    assert str(inspect.signature(Mine)) == "(size: int)"
    called = inspect.signature(Normalizer(2)).parameters
    assert list(called) == ["state", "x", "rollout_extras"]
    assert list(inspect.signature(RunningMeanStd(2)).parameters) == ["x"]
    model = Sequential([Delay(jnp.zeros(2), 1)])
    assert "rollout_extras" in inspect.signature(model).parameters
