# SPDX-License-Identifier: Apache-2.0
"""The loop over slices: the sums of float64 NumPy, and no row left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.extended import double
from nnx_norm.samples import align_leading
from nnx_norm.slices import LANES, SMALL, finite_in_slices, sums_in_slices

# Rows that fill no slice, some slices and a rest, and more than a small batch.
SIZES = [((1,), 3), ((7, 1), 5), ((13, 11), 17), ((50, 41), 64), ((3, LANES), 2)]


def exact(x, shift, weight, lead):
    d = np.asarray(x).astype(np.float64) - np.asarray(shift, np.float64)
    w = align_leading(np.broadcast_to(np.asarray(weight), d.shape[:lead]), d)
    d = np.where(w == 0, 0, d)
    axes = tuple(range(lead))
    return [np.sum(w * v, axis=axes) for v in (d, d**2, np.abs(d))]


@pytest.mark.parametrize("kind", ["none", "mask", "weights"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int32"])
@pytest.mark.parametrize(("lead", "features"), SIZES)
def test_sums_are_those_of_numpy(lead, features, dtype, kind):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 200, (*lead, features))).astype(dtype)
    shift = jnp.asarray(rng.normal(100, 9, features), jnp.float32)
    weight = {
        "none": None,
        "mask": jnp.asarray(rng.random(lead) < 0.6),
        "weights": jnp.asarray(rng.choice([0, 0.5, 2], lead), jnp.float32),
    }[kind]
    with double():
        out = sums_in_slices(x, shift, weight, len(lead))
    first, second = (np.asarray(v) for v in out)
    ones = 1.0 if weight is None else weight
    right = exact(x, shift, ones, len(lead))
    assert first.dtype == second.dtype == np.float64
    # Three additions in float32 and the rounding of each deviation and square.
    assert np.all(np.abs(first - right[0]) <= 6 * 2.0**-24 * right[2])
    assert np.all(np.abs(second - right[1]) <= 6 * 2.0**-24 * right[1])


def test_long_batches_lose_nothing_where_a_float32_chain_does():
    x = np.full((SMALL * 4, 1), np.float32(0.1))
    with double():
        first, _ = sums_in_slices(jnp.asarray(x), jnp.zeros(1, jnp.float32), None, 1)
    total = float(np.sum(x, dtype=np.float64))
    chain = np.cumsum(x, dtype=np.float32)[-1]
    assert abs(float(first[0]) / total - 1) < 1e-8
    assert abs(float(chain) / total - 1) > 1e-4  # teeth


@pytest.mark.parametrize("careful", [False, True])
def test_samples_of_weight_zero_are_not_looked_at(careful):
    x = jnp.array([[1.0], [jnp.nan], [3.0], [jnp.inf]])
    weight = jnp.array([True, False, True, False])
    with double():
        out = sums_in_slices(x, jnp.zeros(1), weight, 1, careful=careful)
    assert [v.tolist() for v in out] == [[4.0], [10.0]]


def test_careful_sums_do_not_overflow():
    x = jnp.full((4, 2), 1e30, jnp.float32)
    with double():
        fast = sums_in_slices(x, jnp.zeros(2), None, 1)[1]
        careful = sums_in_slices(x, jnp.zeros(2), None, 1, careful=True)[1]
    assert np.all(np.isinf(fast))
    np.testing.assert_allclose(careful, 4e60, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_nothing_sums_to_zero(shape):
    x = jnp.zeros(shape)
    with double():
        out = sums_in_slices(x, jnp.zeros(shape[1:]), None, 1)
    assert all(np.array_equal(v, np.zeros(shape[1:])) for v in out)
    assert finite_in_slices(x, 1).tolist() == [True] * shape[0]


@pytest.mark.parametrize("features", [1, 3, 1000, LANES + 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_every_row_is_tested_for_being_finite(features, bad):
    rows = 2 * (LANES // features) + 5  # two slices and a rest, or rows one by one
    x = np.ones((rows, features), np.float32)
    with double():
        find = jax.jit(lambda x: finite_in_slices(x, 1))
        for row in {0, rows // 2, rows - 2, rows - 1}:
            broken = x.copy()
            broken[row, features // 2] = bad
            assert np.flatnonzero(~np.asarray(find(broken))).tolist() == [row]
