# SPDX-License-Identifier: Apache-2.0
"""The loops over slices: the sums of float64 NumPy, and no row left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.extended import double
from nnx_norm.samples import align_leading
from nnx_norm.slices import LANES, SMALL, careful_in_slices, sums_in_slices

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


def nonsense_like(shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    wrong = jnp.full(shift.shape, jnp.nan, jnp.float64)
    return wrong, wrong


@jax.jit
def jitted(x, shift):
    with double():
        counts = jnp.asarray(-1.0, jnp.float64), jnp.asarray(-2.0, jnp.float64)
        last = ([nonsense_like(shift)], counts)
        out = careful_in_slices([x], [shift], None, 1, skip=True, last=last)
        return jax.tree.map(lambda v: v.astype(jnp.float32), out)


def careful(leaves, shifts, weight=None, lead=1, *, skip=False):
    """The careful read over accumulators of nonsense, which it must not look at."""
    with double():
        nonsense = [nonsense_like(shift) for shift in shifts]
        counts = jnp.asarray(-1.0, jnp.float64), jnp.asarray(-2.0, jnp.float64)
        out = careful_in_slices(
            leaves, shifts, weight, lead, skip=skip, last=(nonsense, counts)
        )
        return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("kind", ["none", "mask", "weights", "prefix"])
@pytest.mark.parametrize("skip", [False, True])
def test_careful_sums_of_all_leaves_are_those_of_numpy(skip, kind):
    rng = np.random.default_rng(1)
    lead = (41, 110)  # several slices of both leaves, and a last one that overlaps
    x = rng.normal(3, 9, (*lead, 3)).astype(np.float32)
    y = rng.integers(0, 255, (*lead, 2, 2)).astype(np.uint8)
    weight = {
        "none": None,
        "mask": rng.random(lead) < 0.6,
        "weights": rng.choice([0, 0.5, 2], lead).astype(np.float32),
        "prefix": rng.random((lead[0], 1)) < 0.5,
    }[kind]
    used = np.ones(lead) if weight is None else np.broadcast_to(weight, lead) * 1.0
    if skip:
        x[3, 5, 1], x[40, 109, 2] = np.nan, -np.inf
        used = np.where(np.isfinite(x).all(-1), used, 0.0)
    given = None if weight is None else jnp.asarray(weight)
    shifts = [jnp.asarray([0.0, 3.0, -1e3]), jnp.full((2, 2), 100.0)]
    sums, counts = careful(list(map(jnp.asarray, (x, y))), shifts, given, 2, skip=skip)
    clean = np.where(np.isfinite(x), x, 0)
    for (first, second), leaf, shift in zip(sums, (clean, y), shifts, strict=True):
        right = exact(leaf, shift, used, 2)
        assert np.all(np.abs(first - right[0]) <= 1e-14 * right[2])
        assert np.all(np.abs(second - right[1]) <= 1e-14 * right[1])
    untouched = [-1.0, -2.0]
    assert list(map(float, counts)) == (
        [used.sum(), np.sum(used > 0)] if skip else untouched
    )


@pytest.mark.parametrize("read", ["fast", "careful"])
def test_samples_of_weight_zero_are_not_looked_at(read):
    x = jnp.array([[1.0], [jnp.nan], [3.0], [jnp.inf]])
    weight = jnp.array([True, False, True, False])
    with double():
        out = sums_in_slices(x, jnp.zeros(1), weight, 1)
    if read == "careful":
        ((out,), _) = careful([x], [jnp.zeros(1)], weight)
    assert [v.tolist() for v in out] == [[4.0], [10.0]]


def test_careful_sums_do_not_overflow():
    x = jnp.full((4, 2), 1e30, jnp.float32)
    with double():
        fast = sums_in_slices(x, jnp.zeros(2), None, 1)[1]
    (((_, second),), _) = careful([x], [jnp.zeros(2)])
    assert np.all(np.isinf(fast))
    np.testing.assert_allclose(second, 4e60, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_nothing_sums_to_zero(shape):
    with double():
        out = sums_in_slices(jnp.zeros(shape), jnp.zeros(shape[1:]), None, 1)
    assert all(np.array_equal(v, np.zeros(shape[1:])) for v in out)


@pytest.mark.parametrize("features", [1, 3, 1000, 5000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_every_row_is_tested_for_being_finite(features, bad):
    rows = 2 * (4096 // features) + 5  # two slices and a rest, or rows one by one
    x = np.ones((rows, features), np.float32)
    for row in {0, rows // 2, rows - 2, rows - 1}:
        broken = x.copy()
        broken[row, features // 2] = bad
        sums, counts = jitted(jnp.asarray(broken), jnp.zeros(features))
        assert list(map(float, counts)) == [rows - 1, rows - 1]
        assert np.all(sums[0][0] == rows - 1)
