# SPDX-License-Identifier: Apache-2.0
"""combine_moments: the moments of the union."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm import combine_moments


def sets_of(rng: np.random.Generator, number: int, shape: tuple[int, ...]) -> list:
    offset = rng.normal(size=shape) * 10 ** rng.uniform(-2, 3)
    return [rng.normal(offset, 2, (rng.integers(1, 9), *shape)) for _ in range(number)]


def moments_of(sets: list) -> tuple[list, list, list]:
    return [s.mean(0) for s in sets], [s.var(0) for s in sets], [len(s) for s in sets]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13])
def test_union_of_any_number_of_sets(number: int, shape: Any, stacked: bool):
    sets = sets_of(np.random.default_rng(number), number, shape)
    three = moments_of(sets)
    mean, var, count = combine_moments(*map(np.stack, three) if stacked else three)
    whole = np.concatenate(sets)
    assert mean.dtype == var.dtype == np.float64 and mean.shape == var.shape == shape
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-13)
    np.testing.assert_allclose(var, whole.var(0), rtol=1e-11)
    assert count == len(whole) and count.dtype == np.int64


def test_known_numbers():
    mean, var, count = combine_moments([0.0, 4.0], [1.0, 1.0], [2, 2])
    assert (float(mean), float(var), int(count)) == (2.0, 5.0, 4)
    mean, var, count = combine_moments([0.0, 4.0, 10.0], [1.0, 1.0, 0.0], [2, 2, 1])
    x = np.array([-1.0, 1.0, 3.0, 5.0, 10.0])
    assert float(mean) == pytest.approx(x.mean(), rel=1e-15)
    assert float(var) == pytest.approx(x.var(), rel=1e-15) and int(count) == 5


def test_devices_with_other_means():
    assert [float(v) for v in combine_moments([0.0, 2.0], [0.0, 0.0], [2, 2])[:2]] == [
        1.0,
        1.0,
    ]


def test_counts_beyond_float64_are_exact():
    mean, _, count = combine_moments([0.0, 1.0], [0.0, 0.0], [2**53, 1])
    assert int(count) == 2**53 + 1 and 0 < mean < 2e-16


def test_fractional_counts_are_not_truncated():
    mean, var, count = combine_moments([0.0, 3.0, 6.0], [0.0] * 3, [0.5] * 3)
    assert (float(mean), float(var), float(count)) == (3.0, 6.0, 1.5)


@pytest.mark.parametrize("xp", [np, jnp])
def test_no_sample_gives_zeros_and_empty_sets_have_no_influence(xp: Any):
    nan = xp.full(2, xp.nan)
    for out in combine_moments([nan, nan, nan], [nan, nan, nan], [0, 0, 0]):
        assert not np.any(out)
    mean, var, count = combine_moments(
        [nan, xp.ones(2), nan], [nan, xp.ones(2), nan], [0, 3, 0]
    )
    assert mean.tolist() == var.tolist() == [1.0, 1.0] and int(count) == 3


@pytest.mark.parametrize("xp", [np, jnp])
def test_variance_is_never_negative(xp: Any):
    var = combine_moments(xp.zeros(2), xp.array([-1e-9, 0.0]), [3, 3])[1]
    assert float(var) == 0.0
    rng = np.random.default_rng(0)
    for _ in range(50):
        mean = xp.asarray(rng.normal(size=3) * 1e-8 + 1e8)
        assert float(combine_moments(mean, xp.zeros(3), rng.integers(1, 9, 3))[1]) >= 0


def test_equal_means_stay_and_far_means_lose_nothing():
    mean, var, _ = combine_moments([0.1] * 7, [0.0] * 7, list(range(1, 8)))
    assert float(mean) == 0.1 and float(var) == 0.0
    tiny = combine_moments([0.0, 0.0], [1e20, 1e-6], [1, 10**16])[1]
    assert float(tiny) == pytest.approx((1e20 + 1e10) / (10**16 + 1), rel=1e-12)


def test_jax_in_jax_out_with_counts_of_every_kind():
    for counts in ([2, 2], jnp.array([2, 2]), [jnp.int32(2), jnp.int32(2)]):
        out = combine_moments(jnp.float32([0, 4]), jnp.float32([1, 1]), counts)
        assert all(isinstance(v, jax.Array) for v in out)
        assert [v.item() for v in out] == [2.0, 5.0, 4]
        assert jnp.issubdtype(out[2].dtype, jnp.integer)
    assert out[0].dtype == jnp.asarray(0.0).dtype  # float32 with x64 off


def test_counts_that_int32_cannot_hold_do_not_wrap():
    for counts in (jnp.array([2**31 - 1, 64]), [2**31 - 1, 64]):
        mean, _, count = combine_moments(jnp.array([0.0, 1.0]), jnp.zeros(2), counts)
        assert int(count) == 2147483711
        assert float(mean) == pytest.approx(64 / 2147483711, rel=1e-6)


def test_in_jit_and_under_vmap():
    sets = sets_of(np.random.default_rng(0), 3, (3,))
    mean, var, counts = (jnp.asarray(np.stack(v)) for v in moments_of(sets))
    eager = combine_moments(mean, var, counts)
    for a, b in zip(jax.jit(combine_moments)(mean, var, counts), eager, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    many = jax.vmap(combine_moments)(*(jnp.stack([v, v]) for v in (mean, var, counts)))
    np.testing.assert_allclose(many[0][1], eager[0], rtol=1e-6)


def test_nan_of_a_real_set_is_kept():
    assert np.isnan(combine_moments([np.nan, 1.0], [1.0, 1.0], [2, 2])[0])


@pytest.mark.parametrize(
    ("three", "message"),
    [
        (([0.0], [1.0, 1.0], [1, 1]), "1 means, 2 variances and 2 counts"),
        (([], [], []), "one or more"),
        (([0.0, 1.0], [1.0, 1.0], [1, -1]), ">= 0"),
        (([np.zeros(2), np.zeros(3)], [np.ones(2)] * 2, [1, 1]), r"\(2,\), \(3,\)"),
        (([np.zeros(2)] * 2, [np.ones(3)] * 2, [1, 1]), r"\(2, 2\).*\(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(three: Any, message: str):
    with pytest.raises(ValueError, match=message):
        combine_moments(*three)


def test_counts_beyond_the_integers_do_not_wrap_around():
    _, _, count = combine_moments([0.0, 0.0], [1.0, 1.0], [2**62, 2**62 + 1])
    assert count.dtype == np.float64 and count == 2.0**63
    _, _, count = combine_moments([0.0, 0.0], [1.0, 1.0], [2**62, 2**62 - 1])
    assert count.dtype == np.int64 and int(count) == 2**63 - 1
