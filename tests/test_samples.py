# SPDX-License-Identifier: Apache-2.0
"""Laws of samples: no dtype loses a digit that float32 could hold."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.extended import double
from nnx_norm.samples import align_leading, deviation, float_dtype

NARROW = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.uint8, jnp.int8, jnp.int16]
NARROW += [jnp.int32, jnp.uint32, jnp.bool_]


@hypothesis.given(
    st.sampled_from([jnp.int32, jnp.uint32]),
    st.integers(-(2**30), 2**30),
    st.integers(-2000, 2000),
)
def test_deviations_of_large_integers_are_exact(dtype, base, step):
    base = abs(base) if dtype == jnp.uint32 else base
    shift = np.float32(base)
    x = int(shift) + step
    hypothesis.assume(x >= 0 or dtype == jnp.int32)
    assert deviation(jnp.asarray([x], dtype), jnp.asarray(shift)).tolist() == [step]


def test_a_large_integer_cast_to_float32_is_not_exact():
    assert np.float32(2**30 + 1) - np.float32(2**30) == 0  # teeth for the law above


@pytest.mark.parametrize("x", [-(2**31), 2**31 - 1, -1, 0, 4095, 4096])
def test_the_ends_of_int32_do_not_wrap(x):
    d = deviation(jnp.asarray([x], jnp.int32), jnp.float32(0))
    assert d.tolist() == [np.float32(x)]


@hypothesis.given(st.integers(-4095, 4095), st.floats(-100, 100, width=32))
def test_small_integers_are_as_exact_as_one_rounding(x, shift):
    d = deviation(jnp.asarray([x], jnp.int32), jnp.float32(shift))
    assert d.tolist() == [np.float32(x - np.float64(np.float32(shift)))]


@hypothesis.given(
    st.integers(-(2**31), 2**31 - 1), st.floats(-(2.0**31), 2.0**31, width=32)
)
@hypothesis.example(-4098, -1.327502965927124)  # one rounding gives another number
def test_any_integer_is_as_exact_as_two_roundings(x, shift):
    d = deviation(jnp.asarray([x], jnp.int32), jnp.float32(shift))
    largest = np.float32(max(abs(x - shift), abs(x - x % 4096 - shift), 4096))
    assert abs(float(d[0]) - (x - shift)) <= np.spacing(largest)


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: jnp.dtype(d).name)
def test_samples_are_computed_in_float32(dtype):
    x = jnp.asarray([0, 1], dtype)
    assert float_dtype(dtype) == deviation(x, jnp.float32(0)).dtype == jnp.float32
    assert deviation(x, jnp.float32(0.5)).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bit_samples_are_computed_in_float64(dtype):
    with double():
        x = jnp.asarray([2**40, 2**40 + 1], dtype)
        d = deviation(x, jnp.asarray(2.0**40, jnp.float32))
        assert float_dtype(x.dtype) == d.dtype == jnp.float64
        assert d.tolist() == [0, 1]


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("leading", [(), (4,), (4, 3)])
def test_leading_axes_broadcast_against_a_leaf(leading, xp):
    leaf = xp.ones((4, 3, 2))
    values = xp.arange(np.prod(leading, dtype=int) + 0.0).reshape(leading)
    product = align_leading(values, leaf) * leaf
    for index in np.ndindex(*leading):
        assert np.all(product[index] == values[index])
