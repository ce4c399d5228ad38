# SPDX-License-Identifier: Apache-2.0
"""Laws of samples: no dtype loses a digit that float32 could hold."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.extended import double
from nnx_norm.samples import (
    align_leading,
    all_pair,
    deviation,
    float_dtype,
    total_pair,
    zero_of,
)

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


@pytest.mark.parametrize("axes", [(), (0,), (1, 2), (0, 1, 2)])
def test_pairs_are_reduced_as_each_alone(axes):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 9, (3, 4, 0 if axes == (1, 2) else 5)).astype(np.float32)
    b = a.astype(np.int32) + 1
    first, second = total_pair(jnp.asarray(a), jnp.asarray(b), axes)
    assert (first.dtype, second.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(first, a.sum(axes))
    np.testing.assert_array_equal(second, b.sum(axes))


@pytest.mark.parametrize("a", [[], [True], [True, False], [False, False]])
@pytest.mark.parametrize("b", [True, False])
def test_all_of_two_is_all_of_both(a, b):
    x, y = jnp.asarray(a, jnp.bool_), jnp.full(len(a), b)
    assert bool(all_pair(x, y)) == (all(a) and (b or not a))


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: jnp.dtype(d).name)
def test_zero_has_the_dtype_of_its_array(dtype):
    zero = zero_of(jnp.ones(2, dtype))
    assert zero.dtype == dtype and zero.shape == () and not zero.weak_type
    assert not zero
