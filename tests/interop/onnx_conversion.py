# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Policies as ONNX, through jax2onnx, run by onnxruntime.

jax2onnx 0.17 admits no orbax-checkpoint of today, so these tests take an environment of
their own, without the test extra:

    pip install -e . jax2onnx==0.17.1 onnxruntime pytest pytest-xdist hypothesis
    python -m pytest -s -W default tests/interop/onnx_conversion.py
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


def assert_close(y: Any, wanted: Any, limit: float, what: str) -> None:
    """Every output within `limit`; `-s` shows the largest difference."""
    difference = np.abs(y - np.asarray(wanted, np.float64))
    print(f"{what}: {difference.max():.2g} of outputs up to {np.abs(wanted).max():.2g}")
    assert y.dtype == np.float32 and y.shape == np.shape(wanted)
    assert difference.max() <= limit


def test_policy_with_its_normalizer():
    linear, norm = nnx.Linear(5, 2, rngs=nnx.Rngs(0)), filled(clip=2.0)
    policy = Sequential([norm, linear, jnp.tanh])

    def act(x: Any) -> Any:
        return policy(policy.initialize_state(x.shape[0]), x).output

    x = batches(seed=9)[0]
    assert np.abs(norm.normalize(x)).max() == 2.0  # the clip was met
    y = converted(norm.normalize, x, NEWEST)
    assert_close(y, norm.normalize(x), 1e-6, "normalizer")
    assert_close(converted(act, x, NEWEST), act(jnp.asarray(x)), 1e-6, "policy")


def test_port():
    port = RunningMeanStd(5, clamp_value=2.0)
    port.record_moments(jnp.asarray(batches()[0]))
    x = batches(seed=9)[0]
    assert_close(converted(port, x, NEWEST), port(jnp.asarray(x)), 1e-6, "port")


@pytest.mark.parametrize("opset", [DEFAULT, NEWEST])
def test_folded_policy_in_older_opsets_too(opset: int):
    norm, x = filled(), batches(seed=9)[0]
    linear = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    folded = fold_into_linear(norm, linear)
    offset = float(np.max(np.abs(norm.mean.get_value()) / norm.std))
    wanted, unfolded = folded(jnp.asarray(x)), linear(norm.normalize(x))
    limit = 1e-6 * (1 + offset) * float(np.abs(unfolded).max())
    y = converted(folded, x, opset)
    assert_close(y, wanted, limit, "folded layer")
    assert_close(y, unfolded, limit, "folded layer, against layer and normalizer")
    y = converted(lambda x: jnp.tanh(folded(x)), x, opset)
    assert_close(y, jnp.tanh(wanted), limit, "folded policy")
    assert_close(y, jnp.tanh(unfolded), limit, "folded policy, against both")
