# SPDX-License-Identifier: Apache-2.0
"""Laws of two-float storage: 48 bits survive, and a residual serves its value only."""

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from nnx_norm.extended import double, join, residual_of, spacing, split

N = 16  # numbers per example: one shape, one compilation
TINY = 2.0**-66  # from here on no residual is a subnormal number, which XLA flushes

HUGE = 2.0**126
normal = st.floats(TINY, HUGE) | st.floats(-HUGE, -TINY) | st.just(0.0)
wild = st.floats(width=64)  # every float64: subnormal, infinite and NaN too
float32 = st.floats(TINY, HUGE, width=32) | st.floats(-HUGE, -TINY, width=32)


def arrays(elements: st.SearchStrategy[float], dtype: Any = np.float64) -> Any:
    return hnp.arrays(dtype, N, elements=elements)


def to_pair(x: Any) -> tuple[np.ndarray, np.ndarray]:
    with double():
        value, residual = split(jnp.asarray(x, jnp.float64))
    return np.asarray(value), np.asarray(residual)


def to_double(value: Any, residual: Any) -> np.ndarray:
    with double():
        return np.asarray(join(jnp.asarray(value), jnp.asarray(residual)))


def bits(x: Any) -> list[int]:
    return np.asarray(x).view(np.uint32).tolist()


@hypothesis.given(arrays(normal))
def test_a_pair_keeps_48_bits(x):
    value, residual = to_pair(x)
    assert value.dtype == residual.dtype == np.float32
    error = np.abs(to_double(value, residual) - x)
    assert np.all(error <= 2.0**-49 * np.abs(x))
    if np.any(x):  # teeth: float32 alone is far from it
        assert np.all(np.abs(residual) <= 2.0**-24 * np.abs(value))


@hypothesis.given(hnp.arrays(np.int64, N, elements=st.integers(-(2**48), 2**48)))
def test_integers_are_exact_up_to_two_to_the_48(n):
    assert to_double(*to_pair(n)).tolist() == n.tolist()


@hypothesis.given(arrays(float32, np.float32))
def test_float32_numbers_need_no_residual(x):
    value, residual = to_pair(x)
    assert bits(value) == bits(x) and not residual.any()


@hypothesis.given(arrays(normal))
def test_numpy_arrays_give_the_same_bits_on_the_host(x):
    pair, expected = split(x), to_pair(x)
    assert [type(side) for side in pair] == [np.ndarray] * 2
    assert [bits(side + 0) for side in pair] == [bits(side + 0) for side in expected]
    whole = join(*pair)
    assert type(whole) is np.ndarray and whole.dtype == np.float64
    np.testing.assert_array_equal(whole, to_double(*expected))
    foreign = np.ones(N, np.float32)  # belongs to values of 2^23 and more
    np.testing.assert_array_equal(
        join(pair[0], foreign), to_double(expected[0], foreign)
    )


@hypothesis.given(arrays(wild))
def test_split_after_join_changes_no_bit(x):
    pair = to_pair(x)
    again = to_pair(to_double(*pair))
    # Adding zero loses the sign of a zero, and nothing else.
    assert [bits(side + 0) for side in pair] == [bits(side) for side in again]


@hypothesis.given(arrays(wild))
def test_the_value_is_the_float32_nearest_to_the_pair(x):
    value, residual = to_pair(x)
    whole = value.astype(np.float64) + residual.astype(np.float64)
    large = np.abs(whole) > TINY
    with np.errstate(over="ignore"):
        assert np.array_equal(whole.astype(np.float32)[large], value[large])


def test_a_residual_that_rounds_up_to_a_tie_is_carried_into_the_value():
    x = 1 + 2.0**-23 + 2.0**-24 - 2.0**-52  # its residual rounds to half a spacing
    value = float(np.float32(x))
    assert float(np.float32(value + float(np.float32(x - value)))) != value  # teeth
    assert to_pair(x) == (np.float32(1 + 2.0**-22), np.float32(-(2.0**-24)))


@pytest.mark.parametrize("x", [1e39, -1e39, np.inf, -np.inf, np.nan])
def test_what_float32_cannot_hold_is_not_finite_and_has_no_residual(x):
    value, residual = to_pair(x)
    expected = np.float32(np.nan if np.isnan(x) else np.copysign(np.inf, x))
    assert np.array_equal(value, expected, equal_nan=True) and bits(residual) == 0
    assert np.array_equal(to_double(value, residual), value, equal_nan=True)


@hypothesis.given(arrays(float32, np.float32), arrays(st.floats(-1, 1)))
def test_a_residual_within_one_spacing_belongs_to_its_value(value, share):
    residual = (np.spacing(np.abs(value)) * share).astype(np.float32)
    expected = value.astype(np.float64) + residual.astype(np.float64)
    assert np.array_equal(to_double(value, residual), expected)
    assert np.array_equal(residual_of(jnp.asarray(value), residual), residual)


@hypothesis.given(
    arrays(float32, np.float32),
    arrays(st.floats(1.001, 1e6) | st.just(np.inf) | st.just(np.nan)),
    st.sampled_from([-1, 1]),
)
def test_a_larger_residual_counts_as_zero(value, times, sign):
    foreign = (sign * np.spacing(np.abs(value)) * times).astype(np.float32)
    assert np.array_equal(to_double(value, foreign), value.astype(np.float64))
    assert not np.any(residual_of(jnp.asarray(value), foreign))


def test_a_zero_value_owns_no_residual():
    assert to_double(np.float32(0), np.float32(1e-30)) == 0


@hypothesis.given(arrays(float32, np.float32))
def test_spacing_is_the_distance_to_the_next_float32(value):
    assert np.array_equal(spacing(jnp.asarray(value)), np.spacing(np.abs(value)))


def test_double_is_on_inside_only():
    outside = jax.dtypes.canonicalize_dtype(jnp.float64)  # float32, unless x64 is on
    assert jnp.asarray(1.0).dtype == outside
    with double(), double():
        assert jnp.asarray(1.0).dtype == jnp.float64
    with pytest.raises(KeyError), double():
        raise KeyError
    assert jnp.asarray(1.0).dtype == outside


def add_one(value: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    with double():
        return split(join(value, residual) + 1)


def in_scan(value: jax.Array, residual: jax.Array) -> Any:
    return jax.lax.scan(lambda c, _: (add_one(*c), None), (value, residual), None, 3)[0]


def in_nnx_scan(value: jax.Array, residual: jax.Array) -> Any:
    @nnx.scan(length=3, in_axes=nnx.Carry, out_axes=nnx.Carry)
    def step(carry):
        return add_one(*carry)

    return step((value, residual))


def in_while(value: jax.Array, residual: jax.Array) -> Any:
    def step(state):
        return state[0] + 1, add_one(*state[1])

    start = jnp.int32(0), (value, residual)
    return jax.lax.while_loop(lambda s: s[0] < 3, step, start)[1]


def in_cond(value: jax.Array, residual: jax.Array) -> Any:
    return jax.lax.cond(value > 0, add_one, lambda v, r: (v, r), value, residual)


def in_shard_map(value: jax.Array, residual: jax.Array) -> Any:
    mesh, all_of_it = Mesh(jax.devices(), "d"), PartitionSpec()

    def total(value, residual):
        with double():
            share = jax.lax.axis_index("d").astype(jnp.float64) / 28
            return split(join(value, residual) + jax.lax.psum(share, "d"))

    return jax.shard_map(
        total, mesh=mesh, in_specs=(all_of_it, all_of_it), out_specs=all_of_it
    )(value, residual)


def in_vmap(value: jax.Array, residual: jax.Array) -> Any:
    return jax.tree.map(lambda v: v[0], jax.vmap(add_one)(value[None], residual[None]))


def in_pmap(value: jax.Array, residual: jax.Array) -> Any:
    mapped = jax.pmap(add_one)(jnp.stack([value] * 2), jnp.stack([residual] * 2))
    return jax.tree.map(lambda v: v[1], mapped)


TRANSFORMS: dict[str, tuple[Callable[..., Any], int]] = {
    "eager": (add_one, 1),
    "jit": (jax.jit(add_one), 1),
    "nnx.jit": (nnx.jit(add_one), 1),
    "vmap": (in_vmap, 1),
    "scan": (in_scan, 3),
    "nnx.scan": (in_nnx_scan, 3),
    "while_loop": (jax.jit(in_while), 3),
    "cond": (jax.jit(in_cond), 1),
    "remat": (jax.checkpoint(add_one), 1),
    "shard_map": (jax.jit(in_shard_map), 1),
    "pmap": (in_pmap, 1),
}


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_counting_is_exact_under_every_transform(name, x64):
    function, steps = TRANSFORMS[name]
    with jax.enable_x64(x64):
        start = [jnp.asarray(side) for side in to_pair(2.0**40 + 1)]
        value, residual = function(*start)
        assert value.dtype == residual.dtype == jnp.float32
        assert to_double(value, residual) == 2.0**40 + 1 + steps
    assert np.float32(2.0**40) + np.float32(steps) == 2.0**40  # teeth


def test_no_float64_leaves_the_context_while_tracing():
    number = jax.ShapeDtypeStruct((3,), jnp.float32)
    for leaf in jax.tree.leaves(jax.eval_shape(add_one, number, number)):
        assert leaf.dtype == jnp.float32 and not leaf.weak_type


@pytest.mark.parametrize("read", [join, residual_of], ids=["join", "residual_of"])
def test_what_reads_a_residual_can_be_differentiated(read):
    """A step function has the derivative zero; nextafter alone has none at all."""

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(value, residual):
        with double():
            return read(value, residual).astype(jnp.float32)

    own = gradient(jnp.float32(1.0), jnp.float32(2.0**-25))
    assert [float(g) for g in own] == [float(read is join), 1.0]
    foreign = gradient(jnp.float32(1.0), jnp.float32(1.0))
    assert [float(g) for g in foreign] == [float(read is join), 0.0]
