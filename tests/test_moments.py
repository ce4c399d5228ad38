# SPDX-License-Identifier: Apache-2.0
"""Laws of the monoid: lift, merge, reduce, and what they have to do with each other."""

from fractions import Fraction
from functools import reduce as fold_left
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import moments
from nnx_norm.extended import double
from nnx_norm.moments import Moments, from_batch, merge, reduce, std, variance, zeros

EPS = 2.0**-24
ROWS = 12
F = 3

# Any finite set of numbers, exactly representable, with large offsets among them.
number = st.integers(-(2**20), 2**20) | st.integers(2**23 - 4, 2**23)
rows = st.lists(number, min_size=ROWS, max_size=ROWS)
weight = st.sampled_from([0, 1, 2, 5, 0.5, 0.125])
weight_lists = st.lists(weight, min_size=ROWS, max_size=ROWS)


def exact(x: Any, weights: Any = None) -> tuple[Fraction, Fraction, Fraction]:
    """Mean, M2 and count of numbers, in fractions."""
    w = [Fraction(v) for v in ([1] * len(x) if weights is None else weights)]
    x = [Fraction(float(v)) for v in x]
    count = sum(w, Fraction(0))
    mean = sum((a * b for a, b in zip(w, x, strict=True)), Fraction(0)) / (count or 1)
    M2 = sum((a * (b - mean) ** 2 for a, b in zip(w, x, strict=True)), Fraction(0))
    return mean, M2, count


def numbers(m: Moments) -> list[float]:
    return [float(v) for v in (m.mean, m.M2, m.count)]


def of(x: Any, weights: Any = None) -> Moments:
    """Moments of numbers in float64, without `from_batch`; inside `double()`."""
    return Moments(*(jnp.asarray(float(v), jnp.float64) for v in exact(x, weights)))


def close(a: Any, b: Any, tolerance: float) -> bool:
    """M2 to `tolerance` of itself, the mean to that of a standard deviation.

    And to the digits of float64, which a mean far from zero has few to spare of.
    """
    (mean, M2, count), (mean_, M2_, count_) = ([float(v) for v in m] for m in (a, b))
    std = (M2 / count) ** 0.5 if count else 0.0
    ulp = 2.0**-50 * abs(mean)
    return (
        count == count_
        and abs(M2 - M2_) <= tolerance * M2 + count * ulp * (std + ulp)
        and abs(mean - mean_) <= tolerance * std + ulp
    )


# Merge and reduce.


@hypothesis.given(rows, st.integers(0, ROWS))
def test_merge_of_a_split_is_the_whole(x, at):
    with double():
        assert close(of(x), merge(of(x[:at]), of(x[at:])), 1e-12)


@hypothesis.given(rows, rows)
def test_merge_commutes(x, y):
    with double():
        assert close(merge(of(x), of(y)), merge(of(y), of(x)), 1e-12)


@hypothesis.given(rows, weight_lists)
def test_merge_associates(x, w):
    a, b, c = ((x[i::3], w[i::3]) for i in range(3))
    with double():
        left = merge(merge(of(*a), of(*b)), of(*c))
        right = merge(of(*a), merge(of(*b), of(*c)))
        assert close(left, right, 1e-12) and close(of(x, w), left, 1e-12)


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@hypothesis.given(x=rows)
def test_zeros_is_the_identity_bit_for_bit(wide, x):
    with double():
        m = of(x)
    with jax.enable_x64(wide):
        m = jax.tree.map(lambda v: jnp.asarray(np.asarray(v)), m)
        for same in (merge(m, zeros(())), merge(zeros(()), m), merge(m, zeros(m))):
            assert numbers(same) == numbers(m)


@hypothesis.given(rows, weight_lists)
def test_reduce_is_the_merge_of_all(x, w):
    parts = [(x[i::4], w[i::4]) for i in range(4)]
    with double():
        sets = [of(*part) for part in parts]
        stacked = jax.tree.map(lambda *v: jnp.stack(v), *sets)
        assert close(fold_left(merge, sets), reduce(stacked), 1e-12)
        assert close(of(x, w), reduce(stacked), 1e-12)


def test_reduce_of_nothing_is_zeros():
    nothing = Moments(jnp.zeros((0, F)), jnp.zeros((0, F)), jnp.zeros(0))
    for got, right in zip(reduce(nothing), zeros(F), strict=True):
        np.testing.assert_array_equal(got, right)
    empty = Moments(jnp.zeros((5, F)), jnp.zeros((5, F)), jnp.zeros(5))
    assert not any(np.any(v) for v in reduce(empty))


@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
def test_empty_sets_have_no_influence_whatever_they_hold(junk):
    means = jnp.asarray([junk, 1.0, junk, 3.0])
    M2s, counts = jnp.asarray([junk, 2.0, 0.0, 2.0]), jnp.asarray([0.0, 2.0, 0.0, 2.0])
    assert numbers(reduce(Moments(means, M2s, counts))) == [2.0, 8.0, 4.0]
    nothing = reduce(Moments(means[:1], M2s[:1], counts[:1]))
    assert numbers(nothing) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("constant", [3.3, -1e6 - 0.1, 1e-30, 3e38])
@hypothesis.given(st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_equal_means_stay_exact(constant, counts):
    means, n = jnp.full(4, constant, jnp.float32), jnp.asarray(counts, jnp.float32)
    m = reduce(Moments(means, jnp.zeros(4), n))
    assert (float(m.mean), m.M2) == (np.float32(constant), 0)
    two = merge(*(Moments(means[i], jnp.float32(0), n[i]) for i in range(2)))
    assert (float(two.mean), two.M2) == (np.float32(constant), 0)


def test_sets_far_from_zero_lose_nothing():
    means, n = np.asarray([1e8, 1e8 + 2, 1e8 + 4]), np.asarray([1e6, 1.0, 1.0])
    step = 6 / n.sum()
    M2 = 3 + np.sum(n * (means - 1e8 - step) ** 2)
    with double():
        m = reduce(Moments(jnp.asarray(means), jnp.ones(3), jnp.asarray(n)))
        assert numbers(m) == pytest.approx([1e8 + step, M2, n.sum()], rel=1e-12)
    naive = 3 + np.sum(n * means**2) - np.sum(n * means) ** 2 / n.sum()
    assert abs(naive - M2) > 0.1 * M2  # teeth


# Lift.


@hypothesis.given(rows)
def test_from_batch_is_right_about_any_numbers(x):
    m = from_batch(jnp.asarray(x, jnp.float32))
    mean, M2, count = (float(v) for v in exact(x))
    assert float(m.count) == count
    assert abs(float(m.mean) - mean) <= EPS * abs(mean) + 1e-6 * (M2 / count) ** 0.5
    assert abs(float(m.M2) - M2) <= 1e-6 * M2


@hypothesis.given(rows, st.sampled_from([1, 4, 6, 11]))
def test_from_batch_of_any_split_merges_to_the_whole(x, at):
    with double():
        part = [from_batch(jnp.asarray(v, jnp.float32)) for v in (x[:at], x[at:])]
        assert close(of(x), merge(*part), 1e-6)


@hypothesis.given(rows, st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_a_mask_drops_rows(x, mask):
    kept = [v for v, keep in zip(x, mask, strict=True) if keep]
    junk = [v if keep else np.nan for v, keep in zip(x, mask, strict=True)]
    with double():
        m = from_batch(jnp.asarray(junk, jnp.float32), mask=jnp.asarray(mask))
        assert close(of(kept), m, 1e-6)


@hypothesis.given(rows, weight_lists, st.booleans())
def test_weights_count_as_often_as_they_say(x, w, masked):
    mask = np.arange(ROWS) % 3 > 0
    options: dict[str, Any] = {"mask": jnp.asarray(mask)} if masked else {}
    with double():
        options["weights"] = jnp.asarray(w, jnp.float32)
        m = from_batch(jnp.asarray(x, jnp.float32), **options)
        assert close(of(x, np.asarray(w) * mask if masked else w), m, 1e-6)


@pytest.mark.parametrize(
    ("axes", "order"),
    [(0, (0, 1, 2)), (1, (1, 0, 2)), (-1, (2, 0, 1)), ((0, 1), (0, 1, 2)),
     ((1, 0), (1, 0, 2)), ((2, 0), (2, 0, 1)), ((0, 1, 2), (0, 1, 2)), ((), (0, 1, 2))],
)  # fmt: skip
def test_any_axes_run_over_samples(axes, order):
    x = np.random.default_rng(0).normal(5, 2, (4, 5, 6)).astype(np.float32)
    moved, lead = np.transpose(x, order), np.size(axes)
    weights = np.random.default_rng(1).integers(0, 3, moved.shape[:lead])
    spread = weights.reshape(weights.shape + (1,) * (3 - lead))
    over = tuple(range(lead))
    mean = np.sum(spread * moved.astype(np.float64), over) / weights.sum()
    M2 = np.sum(spread * (moved - mean) ** 2, over)
    m = from_batch(jnp.asarray(x), axes, weights=jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(m.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(m.M2, M2, rtol=1e-5, atol=1e-10)


def test_trees_are_lifted_leaf_by_leaf():
    x = np.random.default_rng(2).normal(5, 2, (6, 4, 3)).astype(np.float32)
    tree = {"a": (x, None), "b": [x[..., 0], np.zeros((6, 4, 0))], "c": {}}
    m = from_batch(jax.tree.map(jnp.asarray, tree), (0, 1))
    assert jax.tree.structure(m.mean) == jax.tree.structure(tree)
    assert jax.tree.structure(m.M2) == jax.tree.structure(tree)
    alone = from_batch(jnp.asarray(x), (0, 1))
    np.testing.assert_array_equal(m.mean["a"][0], alone.mean)
    np.testing.assert_array_equal(m.M2["b"][0], alone.M2[0])
    twice = merge(m, m)
    np.testing.assert_allclose(twice.M2["a"][0], 2 * alone.M2, rtol=1e-6)
    assert std(m)["c"] == {} and variance(m)["b"][1].shape == (0,)


def test_a_tree_without_leaves_has_moments_of_nothing():
    m = from_batch({"a": None})
    assert m.mean == m.M2 == {"a": None} and float(m.count) == 0


@pytest.mark.parametrize(
    ("x", "options"),
    [
        ({"a": jnp.zeros((4, 3)), "b": jnp.zeros((5, 3))}, {}),
        (jnp.zeros((4, 3)), {"mask": jnp.ones(3, bool)}),
        (jnp.zeros((4, 3)), {"weights": jnp.ones((4, 3))}),
    ],
    ids=["leaves", "mask", "weights"],
)
def test_unequal_sizes_are_refused(x, options):
    with pytest.raises(ValueError, match=r"sizes along the axes \(0,\).*must be equal"):
        from_batch(x, **options)


@pytest.mark.parametrize(
    ("dtype", "x"),
    [
        (jnp.float16, [-200.0, 200.0] * 6),
        (jnp.bfloat16, [1.0, 1.0078125] * 10),
        (jnp.float16, [10.0] * 10000),
        (jnp.uint8, [0, 255]),
        (jnp.uint8, [10, 20]),
        (jnp.int8, [-128, 127, -128]),
        (jnp.int32, [2**30 + 1, 2**30 + 3, 2**30 + 8]),
        (jnp.int32, [-(2**31), -(2**31) + 2]),
        (jnp.uint32, [2**32 - 1, 2**32 - 4]),
        (jnp.bool_, [True, False, True]),
    ],
    ids=str,
)
def test_narrow_dtypes_are_accumulated_in_float32_or_better(dtype, x):
    mean, M2, count = exact(x)
    with double():
        m = from_batch(jnp.asarray(x, dtype))
    assert numbers(m) == pytest.approx([mean, float(M2), count], rel=1e-6)
    assert abs(float(m.mean) - mean) <= 1e-6 * float(M2 / count) ** 0.5


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4, 1e6], ids=str)
def test_an_offset_costs_nothing_but_the_digits_of_the_mean(mean):
    x = np.random.default_rng(3).normal(mean, 1, (48, F)).astype(np.float32)
    right = np.var(x.astype(np.float64), axis=0)
    ours = variance(from_batch(jnp.asarray(x)))
    tolerance = 8 * EPS
    assert np.all(np.abs(ours - right) <= tolerance * right)
    two_pass = np.mean((x - np.mean(x, 0)) ** 2, 0)
    naive = np.mean(x**2, 0) - np.mean(x, 0) ** 2
    if mean >= 1e4:  # teeth: the textbook one-pass formula loses it all
        assert np.all(np.abs(naive - right) > 0.1 * right)
        assert np.max(np.abs(ours - right)) <= 0.1 * np.max(np.abs(two_pass - right))


# Precision and transforms.


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_results_have_the_precision_of_the_caller(wide):
    with jax.enable_x64(wide):
        x = jnp.asarray(np.arange(12).reshape(4, 3), jnp.float32)
        m = from_batch(x)
        dtype = jnp.float64 if wide else jnp.float32
        trees = (m, zeros(3), zeros(m), merge(m, m), variance(m), std(m))
        trees += (from_batch({}), reduce(jax.tree.map(lambda v: v[None], m)))
        for tree in trees:
            for v in jax.tree.leaves(tree):
                assert v.dtype == dtype and not v.weak_type


def test_float64_numpy_keeps_its_digits():
    x = 1e6 + np.random.default_rng(4).normal(0, 1e-6, (100, 2))
    with double():
        m = from_batch(x)
    np.testing.assert_allclose(m.M2, np.var(x, axis=0) * 100, rtol=1e-6)
    assert np.all(np.std(x.astype(np.float32), axis=0) == 0)  # teeth


def lift_and_merge(x: jax.Array, y: jax.Array) -> Moments:
    return merge(from_batch(x), from_batch(y, mask=y[:, 0] > 0))


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", ["jit", "nnx.jit", "vmap", "scan", "cond", "remat"])
def test_transforms_change_nothing(name, wide):
    x, y = np.random.default_rng(5).normal(1e3, 1, (2, ROWS, F)).astype(np.float32)
    y[:4] = -1

    def scan(x: jax.Array, y: jax.Array) -> Moments:
        def step(m: Moments, rows: Any) -> tuple[Moments, None]:
            x, y = (v[None] for v in rows)
            part = from_batch(x), from_batch(y, mask=y[:, 0] > 0)
            return merge(m, merge(*part)), None

        return jax.lax.scan(step, zeros(F), (x, y))[0]

    def mapped(x: jax.Array, y: jax.Array) -> Moments:
        both = jax.vmap(lift_and_merge)(jnp.stack([y, x]), jnp.stack([x, y]))
        return jax.tree.map(lambda v: v[1], both)

    def cond(x: jax.Array, y: jax.Array) -> Moments:
        return jax.lax.cond(x[0, 0] > 0, lift_and_merge, lift_and_merge, x, y)

    function = {
        "jit": jax.jit(lift_and_merge),
        "nnx.jit": nnx.jit(lift_and_merge),
        "vmap": mapped,
        "scan": scan,
        "cond": cond,
        "remat": jax.checkpoint(lift_and_merge),
    }[name]
    with jax.enable_x64(wide):
        run = jax.tree.map(np.asarray, function(jnp.asarray(x), jnp.asarray(y)))
    rows = np.concatenate([x, y[4:]]).astype(np.float64)
    assert run.count == len(rows)
    # Moments in float32 round the mean, 1000, each time that they are made.
    eps = 8 * EPS if wide else 2e3 * EPS
    error = np.abs(run.mean - rows.mean(0))
    assert np.all(error <= eps * np.std(rows, axis=0))
    M2 = np.var(rows, axis=0) * len(rows)
    assert np.all(np.abs(run.M2 - M2) <= eps * M2)


def test_shapes_are_known_without_values():
    x = jax.ShapeDtypeStruct((5, 4, F), jnp.uint8)
    m = jax.eval_shape(lambda x: from_batch({"a": x}, (0, 1)), x)
    assert m.mean["a"].shape == m.M2["a"].shape == (F,) and m.count.shape == ()


# Variance and std.


def test_variance_is_that_of_the_population_and_std_has_a_floor():
    m = from_batch(jnp.asarray([[0.0, 3.0], [2.0, 3.0]]))
    assert variance(m).tolist() == [1.0, 0.0]
    assert std(m).tolist() == [1.0, 0.0]
    floored = std(m, epsilon=1e-4)  # of the variance, so 0.01 and not 0.0001
    assert floored.tolist() == pytest.approx([1.0, 1e-2])


def test_without_samples_the_variance_is_zero():
    assert variance(zeros({"a": 2}))["a"].tolist() == [0.0, 0.0]
    assert std(zeros(1), epsilon=4.0).tolist() == [2.0]


def test_zeros_of_every_kind():
    tree = {"a": (2, 3), "b": jax.ShapeDtypeStruct((4,), jnp.uint8), "c": None}
    shapes = jax.tree.map(jnp.shape, zeros(tree))
    assert shapes == Moments({"a": (2, 3), "b": (4,), "c": None}, *shapes[1:])
    assert jax.tree.structure(zeros(zeros(tree))) == jax.tree.structure(zeros(tree))
    m = zeros(2)
    assert m.mean is not m.M2 and float(m.count) == 0
    with pytest.raises(TypeError, match="shape"):
        zeros("abc")


def test_the_module_says_what_it_exports():
    assert moments.Moments is Moments and Moments._fields == ("mean", "M2", "count")
