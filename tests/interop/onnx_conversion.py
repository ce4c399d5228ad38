# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Policies as ONNX, through jax2onnx, run by onnxruntime.

jax2onnx 0.17 admits no orbax-checkpoint of today, so these tests take an environment of
their own, without the test extra:

    pip install -e . jax2onnx==0.17.1 onnxruntime pytest pytest-xdist hypothesis
    python -m pytest -W default tests/interop/onnx_conversion.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from agreement import batches
from flax import nnx
from jax2onnx import to_onnx

from nnx_norm import Normalizer, RunningMeanStd, Sequential
from nnx_norm.interop import fold_into_linear

NEWEST = 26  # the first opset with BitCast, which reading the residuals takes
DEFAULT = 23


@pytest.fixture(autouse=True)
def their_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def converted(fn: Callable[[Any], Any], x: np.ndarray, opset: int) -> np.ndarray:
    model = to_onnx(fn, [("B", x.shape[1])], opset=opset)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    return y


def filled(**settings: Any) -> Normalizer:
    norm = Normalizer(5, **settings)
    for x in batches():
        norm.update_statistics(x[None])
    return norm


def test_policy_with_its_normalizer():
    linear = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    policy = Sequential([filled(clip=5.0), linear, jnp.tanh])

    def act(x: Any) -> Any:
        return policy(policy.initialize_state(x.shape[0]), x).output

    x = batches(seed=9)[0]
    assert np.allclose(converted(act, x, NEWEST), act(jnp.asarray(x)), atol=1e-6)


def test_port():
    port = RunningMeanStd(5, clamp_value=5.0)
    port.record_moments(jnp.asarray(batches()[0]))
    x = batches(seed=9)[0]
    assert np.allclose(converted(port, x, NEWEST), port(jnp.asarray(x)), atol=1e-5)


def test_folded_policy_in_an_older_opset():
    norm, x = filled(), batches(seed=9)[0]
    linear = fold_into_linear(norm, nnx.Linear(5, 2, rngs=nnx.Rngs(0)))
    y = converted(lambda x: jnp.tanh(linear(x)), x, DEFAULT)
    offset = float(jnp.max(jnp.abs(norm.mean.get_value()) / norm.std))
    wanted = jnp.tanh(linear(jnp.asarray(x)))
    assert np.allclose(y, wanted, atol=1e-6 * (1 + offset))
