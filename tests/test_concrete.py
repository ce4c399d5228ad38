# SPDX-License-Identifier: Apache-2.0
"""What needs numbers says so, inside jit and with shapes alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_norm import Normalizer, RunningMeanStd, interop, metrics, plot, summary
from nnx_norm.concrete import refuse_shapes, refuse_traced


def linear() -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


HOST: dict[str, Callable[[Any], Any]] = {
    "summary": summary,
    "Recorder.add": lambda n: plot.Recorder().add(n, 0),
    "fold_into_linear": lambda n: interop.fold_into_linear(n, linear()),
    "fold_denormalize_into_linear": lambda n: interop.fold_denormalize_into_linear(
        linear(), n
    ),
    "An export": interop.to_gymnasium,
}


@pytest.mark.parametrize("kind", [Normalizer, RunningMeanStd])
@pytest.mark.parametrize("what", HOST)
def test_what_works_on_the_host_says_so(what: str, kind: Any):
    with pytest.raises(ValueError, match=f"{what} needs numbers on the host.*outside"):
        nnx.eval_shape(lambda n: HOST[what](n) and None, kind(2))  # traces, as jit does
    with pytest.raises(ValueError, match=f"{what} needs numbers, and .*eval_shape"):
        HOST[what](nnx.eval_shape(lambda: kind(2)))


def test_a_traced_layer_is_no_reason_for_an_error_of_jax():
    norm = Normalizer(2)
    with pytest.raises(ValueError, match="fold_into_linear needs numbers on the host"):
        jax.eval_shape(lambda k: _folded(norm, k), jnp.ones((2, 2)))


def _folded(norm: Normalizer, kernel: Any) -> Any:
    layer = linear()
    layer.kernel = nnx.Param(kernel)
    return interop.fold_into_linear(norm, layer).kernel.get_value()


def test_metrics_work_inside_jit_but_not_on_shapes():
    with pytest.raises(ValueError, match="metrics needs numbers, and a model of nnx.e"):
        metrics(nnx.eval_shape(lambda: Normalizer(2)))
    assert "count" in jax.eval_shape(lambda: metrics(Normalizer(2)))


def test_numbers_pass():
    refuse_shapes({"a": jnp.ones(2), "b": None, "c": 1.0}, "it")
    refuse_traced({"a": jnp.ones(2), "b": None, "c": 1.0}, "it")
