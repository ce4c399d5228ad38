# SPDX-License-Identifier: Apache-2.0
"""Divisors and scaling against float64 NumPy; a tree is one compiled program."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import programs

from nnx_norm import Normalizer, RewardNormalizer, RunningMeanStd
from nnx_norm.scaling import (
    AddedStd,
    FlooredStd,
    ReturnStd,
    Scale,
    Unscale,
    leafwise,
    variance_of,
)

F = 4
numbers = st.floats(-1e6, 1e6, width=32)
# No subnormal numbers: XLA's CPU code takes them for zero, NumPy doesn't.
normal = st.floats(0.0, 2.0**40, width=32, allow_subnormal=False)
spreads = hnp.arrays(np.float32, F, elements=normal)
rows = hnp.arrays(np.float32, (3, F), elements=numbers)
counts = st.integers(0, 2**24)


def floored(M2: np.ndarray, n: int) -> np.ndarray:
    if n == 0:
        return np.full(F, 10.0)
    return np.sqrt(np.maximum(M2.astype(np.float64) / n, 1e-6))


def of_returns(M2: np.ndarray, n: int) -> np.ndarray:
    if n < 2:
        return np.ones(F)
    std = np.sqrt(np.maximum(M2.astype(np.float64) / n, 1e-6))
    return np.where(M2 == 0, 1.0, std)


def added(var: np.ndarray, n: int) -> np.ndarray:
    return np.sqrt(var.astype(np.float64) + 1e-6)


DIVISORS = [
    (FlooredStd(1e-6, 10.0), floored),
    (ReturnStd(1e-6), of_returns),
    (AddedStd(1e-6), added),
]
each = pytest.mark.parametrize("divisor, expected", DIVISORS)


@each
@hypothesis.given(spread=spreads, n=counts)
def test_a_divisor_is_that_of_float64_with_numpy_and_with_jax(
    divisor, expected, spread, n
):
    count = np.float32(n)
    host, device = divisor(spread, count), divisor(*map(jnp.asarray, (spread, count)))
    assert type(host) is np.ndarray and isinstance(device, jax.Array)
    assert host.dtype == device.dtype == np.float32
    for found in (host, np.asarray(device)):
        np.testing.assert_allclose(found, expected(spread, n), rtol=3e-7)
    wide = divisor(spread.astype(np.float64), np.float64(n))
    np.testing.assert_allclose(wide, expected(spread, n), rtol=1e-15)


def test_there_is_no_variance_before_any_sample():
    assert variance_of(np.array([0.0]), np.array(0)).tolist() == [0.0]
    assert variance_of(np.array([0.0, 8.0]), np.array(4)).tolist() == [0.0, 2.0]


@each
@pytest.mark.parametrize("centred", [True, False])
@hypothesis.given(x=rows, mean=hnp.arrays(np.float32, F, elements=numbers), n=counts)
def test_leaves_are_scaled_as_in_float64_and_back(
    divisor, expected, centred, x, mean, n
):
    spread = np.array([0.0, 1.0, 8.0, 2.0**30], np.float32)
    rest = mean * np.float32(2.0**-26)
    stats = [[jnp.asarray(v)] for v in (mean, rest, spread)] + [jnp.float32(n)]
    one, back = Scale(centred, None), Unscale(centred, None)
    (y,) = leafwise(one, divisor, [jnp.asarray(x)], *stats)
    exact = x.astype(np.float64)
    if centred:
        exact = exact - (mean.astype(np.float64) + rest)
    std = expected(spread, n)
    # Of the difference float32 keeps its own digits and those of the residual.
    np.testing.assert_allclose(np.asarray(y) * std, exact, rtol=1e-6, atol=1e-8 * 1e6)
    (again,) = leafwise(back, divisor, [y], *stats)
    np.testing.assert_allclose(again, x, rtol=1e-6, atol=1.0)
    (bounded,) = leafwise(Scale(centred, 2.0), divisor, [jnp.asarray(x)], *stats)
    np.testing.assert_array_equal(bounded, np.clip(y, -2, 2))
    (inside,) = leafwise(Unscale(centred, 2.0), divisor, [y], *stats)
    (clipped,) = leafwise(back, divisor, [jnp.clip(y, -2, 2)], *stats)
    np.testing.assert_array_equal(inside, clipped)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_float_dtypes_are_kept_and_others_become_float32(dtype):
    zero, one = jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)
    stats = [[zero], [zero], [one], jnp.float32(1)]
    xs = [jnp.ones(2, dtype), jnp.ones(2, jnp.int8), jnp.ones(2, bool)]
    for x, kept in zip(xs, (dtype, jnp.float32, jnp.float32), strict=True):
        (y,) = leafwise(Scale(True, None), AddedStd(0.0), [x], *stats)
        assert y.dtype == kept and y.tolist() == [1.0, 1.0]


# Shapes that no other test has: what is compiled once isn't compiled again.
TREE = {"a": (3, 23), "b": 29, "c": ()}
CALLS = {
    "Normalizer": lambda: Normalizer(TREE, clip=5.0),
    "RewardNormalizer": lambda: RewardNormalizer(0.9, shape=TREE, clip=5.0),
    "RunningMeanStd": lambda: RunningMeanStd(TREE, clamp_value=5.0),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS.keys())
def test_a_first_eager_call_compiles_one_program(make):
    x = {
        "a": jax.device_put(np.ones((2, 3, 23), np.float32)),
        "b": jax.device_put(np.ones((2, 29), np.float32)),
        "c": jax.device_put(np.ones(2, np.float32)),
    }
    module = make()
    with programs() as compiled:
        first = module.normalize(x)
    assert len(compiled) == 1
    with programs() as compiled:  # equal settings share it
        second = make().normalize(x)
    assert compiled == []
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS.keys())
def test_in_a_program_around_it_it_is_as_if_written_there(make):
    x = {"a": jnp.ones((2, 3, 23)), "b": jnp.ones((2, 29)), "c": jnp.ones(2)}
    module = make()
    equations = jax.make_jaxpr(module.normalize)(x).jaxpr.eqns
    names = {eqn.params.get("name") for eqn in equations}
    assert "leafwise" not in names
    assert sum(eqn.primitive.name == "mul" for eqn in equations) >= 3  # one a leaf
