# SPDX-License-Identifier: Apache-2.0
"""Folding a history: any split of the same rows gives the same statistics."""

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import assert_moments, bits, moments64, statistics

from nnx_norm import Normalizer

T, B, F = 6, 4, 3
SCALE = np.array([1.0, 1e4, 1e-3])  # pooled over features, none of them is right


def history(*lead: int, seed: int = 0, offset: float = 3.0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(*(lead or (T, B)), F))
    return ((noise + offset) * SCALE).astype(np.float32)


def fold(*batches: Any, **settings: Any) -> Normalizer:
    """A normalizer of one feature that saw batches of rows, as [1, B, 1] each."""
    norm = Normalizer(1, **settings)
    for batch in batches:
        norm.update_statistics(one(batch))
    return norm


def one(batch: Any) -> jax.Array:
    return jnp.asarray(batch)[None, :, None].astype(jnp.float32)


seeds = st.integers(0, 2**32 - 1)

# Moments


def test_updates_accumulate():
    norm = Normalizer(F)
    seen = []
    for seed in range(4):
        seen.append(history(seed=seed))
        norm.update_statistics(seen[-1])
        assert_moments(norm, np.concatenate(seen).reshape(-1, F))
        assert norm.mean.get_value().shape == (F,)


@pytest.mark.parametrize(
    "batches, right",
    [
        ([[1, 3], [5, 7]], (4.0, 20.0, 4)),
        ([[0, 2], [0, 2]], (1.0, 4.0, 4)),
        ([[-1, 1]] * 4, (0.0, 8.0, 8)),
        ([[100, 102]], (101.0, 2.0, 2)),
        ([[0, 2], [5, 9]], (4.0, 46.0, 4)),
        ([[1e6 - 1, 1e6 + 1]] * 10, (1e6, 20.0, 20)),
        ([[10000, 10001], [10002, 10003]], (10001.5, 5.0, 4)),
    ],
)
def test_small_integers_are_exact(batches, right):
    mean, M2, count = statistics(fold(*batches))
    assert (mean, M2, count) == ([right[0]], [right[1]], right[2])
    assert type(count) is int


def test_one_row_is_enough():
    norm = Normalizer(1)
    norm.update_statistics(jnp.full((1, 1, 1), 5.0))
    assert statistics(norm) == ([5.0], [0.0], 1)
    assert norm.normalize(jnp.array([5.0])).tolist() == [0.0]


@hypothesis.given(seeds, st.sampled_from([0.0, 30.0, 1e3]))
def test_any_split_in_time_gives_the_moments_of_the_whole(seed, offset):
    whole = history(seed=seed, offset=offset)
    norm = Normalizer(F)
    order = np.random.default_rng(seed).permutation(T)
    for part in np.split(whole[order], 3):
        norm.update_statistics(part)
    assert_moments(norm, whole.reshape(-1, F))


@hypothesis.given(seeds)
def test_order_of_rows_and_of_updates_does_not_matter(seed):
    parts = [np.round(history(seed=seed + i) * 8) for i in range(2)]
    shuffle = np.random.default_rng(seed).permutation(T)
    a, b = Normalizer(F), Normalizer(F)
    for part in parts:
        a.update_statistics(part)
    for part in reversed(parts):
        b.update_statistics(part[shuffle])
    for name in ("mean", "M2"):
        x, y = a.to_dict()[name], b.to_dict()[name]
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    assert a.count == b.count


def test_a_constant_is_normalized_to_zero():
    for constant in (14.62, math.log(1e-5), 12345.678, 1e6 + 0.1, -3e-7, 1e30):
        norm = Normalizer(F)
        for _ in range(4):
            norm.update_statistics(jnp.full((T, B, F), constant, jnp.float32))
        value = jnp.full((F,), constant, jnp.float32)
        assert norm.normalize(value).tolist() == [0.0] * F
        assert norm.variance.tolist() == [0.0] * F


@pytest.mark.parametrize(
    "dtype, rows, right, count",
    [
        ("float16", [-200, 200], (0.0, 80000.0), 2),
        ("uint8", [0, 255], (127.5, 32512.5), 2),
        ("uint8", [10, 20], (15.0, 50.0), 2),
        ("int32", [2**30, 2**30 + 2], (2.0**30 + 1, 2.0), 2),
        ("bool", [0, 1], (0.5, 0.5), 2),
        ("bfloat16", [1, 1.0078125], (1.00390625, 2 * 0.00390625**2), 2),
    ],
)
def test_moments_of_other_dtypes_are_those_of_their_values(dtype, rows, right, count):
    x = jnp.array(rows, dtype)[None, :, None]
    norm = Normalizer(1)
    norm.update_statistics(x)
    assert statistics(norm) == ([right[0]], [right[1]], count)
    norm.update_statistics(x)
    assert statistics(norm) == ([right[0]], [2 * right[1]], 2 * count)
    assert {dtype for dtype, *_ in bits(norm).values()} == {"float32"}


@pytest.mark.parametrize("lead", [(24,), (6, 4), (3, 2, 4)])
def test_history_has_one_or_more_leading_axes(lead):
    norm, data = Normalizer(F), history()
    norm.update_statistics(data.reshape(*lead, F))
    assert_moments(norm, data.reshape(-1, F))


def test_the_last_digit_of_the_count_survives():
    norm = Normalizer(1)
    norm.set_statistics(0.0, 1.0, 2**24)
    for right in (2**24 + 1, 2**24 + 2):
        norm.update_statistics(jnp.zeros((1, 1, 1)))
        assert norm.count == right
    norm.set_statistics(0.0, 1.0, 2**48 - 1)
    norm.update_statistics(jnp.zeros((1, 1, 1)))
    assert norm.count == 2**48


def test_int32_is_no_limit():
    norm = Normalizer(1)
    norm.set_statistics(0.0, 1.0, 2**31 - 1)
    norm.update_statistics(jnp.full((16, 4, 1), 2.0))
    assert norm.count == 2_147_483_711
    assert norm.to_dict()["mean"][0] == pytest.approx(128 / 2_147_483_711, rel=1e-12)


def test_warm_start_is_a_prior_of_that_many_samples():
    norm = Normalizer(1)
    norm.set_statistics(mean=0, variance=1, count=8)
    norm.update_statistics(jnp.full((2, 2, 1), 3.0))
    assert statistics(norm) == ([1.0], [32.0], 12)
    norm.set_statistics(mean=5, variance=1, count=10**6)
    norm.update_statistics(jnp.zeros((1, 1, 1)))
    mean, _, count = statistics(norm)
    assert count == 1_000_001 and mean[0] == pytest.approx(4.999995, abs=1e-7)


def test_the_same_history_twice_counts_twice():
    norm = fold([1, 3], [1, 3])
    assert statistics(norm) == ([2.0], [4.0], 4)


# Masks and weights


def masks(seed: int, *shape: int) -> np.ndarray:
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask.flat[seed % mask.size] = True
    return mask


def test_a_mask_leaves_rows_out_bit_for_bit():
    x = jnp.array([[[1.0, 10], [3, 30], [99, 99]]])
    norm, right = Normalizer(2), Normalizer(2)
    norm.update_statistics(x, mask=jnp.array([[True, True, False]]))
    right.update_statistics(x[:, :2])
    assert bits(norm) == bits(right)
    assert statistics(norm) == ([2.0, 20.0], [2.0, 200.0], 2)


@hypothesis.given(seeds)
def test_a_mask_is_feeding_only_the_rows_it_keeps(seed):
    norm, seen = Normalizer(F), []
    for i in range(2):
        data, mask = history(seed=seed + i), masks(seed + i, T, B)
        data[~mask] = [np.nan, np.inf, 1e30][seed % 3]  # what is masked doesn't leak
        norm.update_statistics(data, mask=mask)
        seen.append(data[mask])
    assert_moments(norm, np.concatenate(seen))
    assert norm.to_dict()["skipped"] == 0


@hypothesis.given(seeds)
def test_whole_weights_are_repeated_rows(seed):
    norm, seen = Normalizer(F), []
    for i in range(2):
        data = history(seed=seed + i)
        weights = np.random.default_rng(seed + i).integers(0, 4, (T, B))
        norm.update_statistics(data, weights=weights)
        seen.append(np.repeat(data.reshape(-1, F), weights.ravel(), axis=0))
    assert_moments(norm, np.concatenate(seen))


@hypothesis.given(seeds)
def test_mask_and_weights_multiply(seed):
    data, mask = history(seed=seed), masks(seed, T, B)
    weights = np.random.default_rng(seed).integers(1, 9, (T, B)).astype(np.float32) / 4
    norm = Normalizer(F)
    for _ in range(2):
        norm.update_statistics(data, mask=mask, weights=weights)
    rows, kept = data.reshape(-1, F), (mask * weights).ravel()
    assert_moments(norm, np.tile(rows, (2, 1)), np.tile(kept, 2))


@pytest.mark.parametrize(
    "rows, weights, right",
    [
        ([0, 3, 6], [0.5] * 3, (3.0, 9.0, 1.5)),
        ([2, 4], [0.5] * 2, (3.0, 1.0, 1)),
        ([1, 4], [1, 2], (3.0, 6.0, 3)),
    ],
)
def test_weights_are_not_rounded(rows, weights, right):
    norm = Normalizer(1)
    norm.update_statistics(one(rows), weights=jnp.array([weights]))
    assert statistics(norm) == ([right[0]], [right[1]], right[2])
    assert type(norm.count) is type(right[2])


@pytest.mark.parametrize("name", ["mask", "weights"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_prefix_of_the_leading_axes_stands_for_all_agents(name, axes):
    data = history(2, 3, 4)  # [T, B, agents, F]
    given = masks(1, *(2, 3, 4)[:axes])
    given = given if name == "mask" else given * np.float32(0.5)
    norm = Normalizer(F)
    norm.update_statistics(data, **{name: given})
    whole = np.broadcast_to(given.reshape(given.shape + (1,) * (3 - axes)), (2, 3, 4))
    assert_moments(norm, data.reshape(-1, F), whole.ravel())


@pytest.mark.parametrize(
    "setting",
    [
        {"mask": np.zeros((T, B), bool)},
        {"mask": np.zeros(T, bool)},
        {"weights": np.zeros((T, B), np.float32)},
        {"mask": np.ones((T, B), bool), "weights": np.zeros((T, B), np.int32)},
    ],
)
@pytest.mark.parametrize("decay", [None, 0.5])
def test_no_valid_row_is_a_bit_exact_no_op(setting, decay):
    norm = Normalizer(F, decay=decay)
    for _ in range(2):  # of fresh statistics, and of some
        before = bits(norm)
        norm.update_statistics(np.full((T, B, F), np.nan, np.float32), **setting)
        assert bits(norm) == before
        norm.update_statistics(history())


@pytest.mark.parametrize("lead", [(0, B), (T, 0), (0,)])
def test_no_row_is_a_bit_exact_no_op(lead):
    norm = Normalizer(F)
    norm.update_statistics(history())
    before = bits(norm)
    norm.update_statistics(jnp.zeros((*lead, F)))
    assert bits(norm) == before
    np.testing.assert_array_equal(Normalizer(F).normalize(jnp.zeros(F)), np.zeros(F))


def test_weights_behind_the_mask_are_not_looked_at():
    mask, weights = np.array([[True, False]]), np.array([[1.0, np.nan]], np.float32)
    for m, w in ((mask, weights), (mask[0][:1], weights)):
        norm = Normalizer(1)
        if m.ndim == 1:  # over time only, and true: now the NaN is looked at
            with pytest.raises(ValueError, match="weights"):
                norm.update_statistics(one([1, 3]), mask=m, weights=w)
            continue
        norm.update_statistics(one([1, 3]), mask=m, weights=w)
        assert statistics(norm) == ([1.0], [0.0], 1)


def test_bad_weights_are_refused_outside_jit_and_skipped_inside():
    weights = jnp.array([[1.0, -1.0], [jnp.nan, jnp.inf]])
    data = jnp.array([[[5.0], [1.0]], [[2.0], [3.0]]])
    norm = Normalizer(1)
    with pytest.raises(ValueError, match="weights holds negative or non-finite"):
        norm.update_statistics(data, weights=weights)
    assert bits(norm) == bits(Normalizer(1))
    nnx.jit(lambda n, h, w: n.update_statistics(h, weights=w))(norm, data, weights)
    assert statistics(norm) == ([5.0], [0.0], 1)
    assert norm.to_dict()["skipped"] == 3


# NaN and infinity


@pytest.mark.parametrize("emit", ["inputs", "moments"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_stays_out_of_all_leaves(bad, emit):
    norm = Normalizer({"a": 1, "b": 2}, emit=emit)
    a = jnp.array([[[1.0], [bad], [3.0]], [[5.0], [7.0], [7.0]]])
    b = jnp.ones((2, 3, 2)).at[1, 1, 0].set(bad)
    for right in (1, 2):
        steps = [norm((), {"a": a[t], "b": b[t]}).rollout_extras for t in range(2)]
        norm.update_statistics(jax.tree.map(lambda *xs: jnp.stack(xs), *steps))
        d = norm.to_dict()
        assert (d["count"], d["skipped"]) == (4 * right, 2 * right)
        assert (d["mean"]["a"].tolist(), d["mean"]["b"].tolist()) == ([4.0], [1.0, 1.0])
        assert d["M2"]["a"].tolist() == [pytest.approx(20.0 * right, rel=1e-7)]


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_propagate_lets_them_in(emit):
    norm = Normalizer(1, nonfinite="propagate", emit=emit)
    extras = norm((), jnp.array([[1.0], [jnp.nan], [3.0]])).rollout_extras
    norm.update_statistics(jax.tree.map(lambda v: v[None], extras))
    assert np.isnan(norm.mean.get_value()[0]) and norm.count == 3
    assert norm.to_dict()["skipped"] == 0


def test_an_update_that_float32_cannot_hold_is_skipped_whole():
    norm = fold([1, 3])
    before = norm.to_dict()
    norm.update_statistics(one([3e38, -3e38]))
    after = norm.to_dict()
    assert after["skipped"] == 2 and after["count"] == 2
    assert after["mean"] == before["mean"] and after["M2"] == before["M2"]
    norm.update_statistics(one([1, 3]))
    assert statistics(norm) == ([2.0], [4.0], 4)


# max_count and decay


def test_max_count_folds_the_batch_that_crosses_it_and_then_stops():
    batches = [[1] * 4, [2] * 4, [3] * 4, [9] * 4]
    norm = fold(*batches, max_count=10)
    jitted = Normalizer(1, max_count=10)
    step = nnx.jit(lambda n, h: n.update_statistics(h))
    for batch in batches[:3]:
        step(jitted, one(batch))
    restored = Normalizer(1, max_count=10)
    restored.load_dict(jitted.to_dict())
    step(restored, one([9] * 4))
    for n in (norm, jitted, restored):
        assert statistics(n) == ([2.0], [8.0], 12)
    before = bits(norm)
    norm.update_statistics(one([np.nan] * 4))  # skipped has stopped too
    assert bits(norm) == before


def test_decay_sees_the_movement_of_the_mean():
    mean, M2, count = statistics(fold([0, 0], [2, 2], decay=0.5))
    assert (count, mean) == (3, [pytest.approx(4 / 3)])
    assert M2[0] / 3 == pytest.approx(8 / 9)
    assert statistics(fold([9, 11], decay=0.99)) == ([10.0], [2.0], 2)


@hypothesis.given(seeds, st.sampled_from([0.25, 0.5, 0.99, 1.0]))
@hypothesis.settings(max_examples=10)
def test_decay_is_a_weight_per_update(seed, decay):
    norm, updates = Normalizer(F, decay=decay), 3
    data = np.stack([history(seed=seed + i) for i in range(updates)])
    for part in data:
        norm.update_statistics(part)
    age = np.arange(updates)[::-1]
    right = moments64(data.reshape(-1, F), np.repeat(decay**age, T * B))
    d = norm.to_dict()
    assert float(d["count"]) == pytest.approx(right.count, rel=1e-12)
    np.testing.assert_allclose(d["M2"], right.M2, rtol=4e-6)
    np.testing.assert_allclose(d["mean"], right.mean, rtol=4e-6)


# Extras of moments


@pytest.mark.parametrize("decay", [None, 0.5])
def test_moments_as_extras_give_the_statistics_of_inputs(decay):
    tree = {"a": F, "b": {"c": (), "off": 2}}
    settings: dict[str, Any] = {"exclude": ["b/off"], "decay": decay}
    inputs = Normalizer(tree, **settings)
    emitted = Normalizer(tree, **settings, emit="moments")

    def rollout(norm: Normalizer, data: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            out = norm(state, x)
            return out.next_state, out.rollout_extras

        return jax.lax.scan(step, (), data)[1]

    for seed in range(3):
        data = {
            "a": history(seed=seed, offset=100.0),
            "b": {"c": history(seed=seed)[..., 0], "off": np.zeros((T, B, 2))},
        }
        data["a"][seed, 1, 2] = np.nan
        data = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), data)
        inputs.update_statistics(rollout(inputs, data))
        extras = rollout(emitted, data)
        assert {v.shape for v in jax.tree.leaves(extras)} == {(T,), (T, F)}
        emitted.update_statistics(extras)
    x, y = inputs.to_dict(flat=True), emitted.to_dict(flat=True)
    assert x["count"] == y["count"] and x["skipped"] == y["skipped"] == 3
    for name in ("mean/a", "mean/b/c", "M2/a", "M2/b/c"):
        np.testing.assert_allclose(y[name], x[name], rtol=1e-6)


def test_moments_as_extras_have_no_environments_to_mask():
    norm = Normalizer(1, emit="moments")
    extras = jax.tree.map(lambda v: v[None], norm((), jnp.ones((2, 1))).rollout_extras)
    for given in ({"mask": jnp.ones((1, 2), bool)}, {"weights": jnp.ones((1, 2))}):
        with pytest.raises(ValueError, match='emit="moments".*emit="inputs"'):
            norm.update_statistics(extras, **given)
    with pytest.raises(TypeError, match='history is a .*emit="moments"'):
        norm.update_statistics(jnp.ones((1, 2, 1)))
    with pytest.raises(ValueError, match=r"history.count has shape \(\).*\(T,\)"):
        norm.update_statistics(norm((), jnp.ones((2, 1))).rollout_extras)
    assert bits(norm) == bits(Normalizer(1))


# All or nothing

TREE = {"a": 1, "b": 2}
GOOD = {"a": jnp.ones((1, 2, 1)), "b": jnp.ones((1, 2, 2))}
BAD = {
    "features": ({**GOOD, "b": jnp.ones((1, 2, 5))}, {}, "history['b']"),
    "broadcast": ({**GOOD, "b": jnp.ones((1, 2, 1))}, {}, "Features are never"),
    "missing": ({"a": GOOD["a"]}, {}, "history['b'] is missing"),
    "none": ({**GOOD, "b": None}, {}, "history['b'] is missing"),
    "extra": ({**GOOD, "c": GOOD["a"]}, {}, "history['c'] is not in"),
    "lead": ({**GOOD, "b": jnp.ones((3, 2, 2))}, {}, "leading axes (3, 2)"),
    "no lead": ({"a": jnp.ones(1), "b": jnp.ones(2)}, {}, "x[None]"),
    "text": ({**GOOD, "b": "text"}, {}, "history['b'] is 'text'"),
    "complex": (
        {**GOOD, "b": jnp.ones((1, 2, 2), jnp.complex64)},
        {},
        "history['b'] has dtype complex64",
    ),
    "mask shape": (GOOD, {"mask": jnp.ones((2, 1), bool)}, "mask has shape (2, 1)"),
    "mask too long": (GOOD, {"mask": jnp.ones((1, 2, 1), bool)}, "mask has shape"),
    "mask scalar": (GOOD, {"mask": True}, "mask has shape ()"),
    "mask dtype": (GOOD, {"mask": jnp.ones((1, 2))}, "mask has dtype float"),
    "weights shape": (GOOD, {"weights": jnp.ones((1, 3))}, "weights has shape (1, 3)"),
    "weights dtype": (GOOD, {"weights": jnp.ones((1, 2), bool)}, "Pass it as mask="),
    "negative": (GOOD, {"weights": -jnp.ones((1, 2))}, "weights >= 0"),
}


@pytest.mark.parametrize("data, given, words", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("frozen", [False, True])
def test_a_refused_call_changes_nothing(data, given, words, frozen):
    norm = Normalizer(TREE)
    norm.set_statistics(0.1, 2.3, 7)
    if frozen:
        norm.freeze()
    before = bits(norm)
    with pytest.raises((ValueError, TypeError)) as error:
        norm.update_statistics(data, **given)
    assert words in str(error.value)
    assert bits(norm) == before


def test_an_axis_that_is_not_bound_is_named_and_changes_nothing():
    norm = Normalizer(TREE, axis_name="devcies")
    before = bits(norm)
    assert norm.normalize(jax.tree.map(lambda v: v[0], GOOD))["a"].shape == (2, 1)
    with pytest.raises(ValueError, match="axis_name 'devcies' is not bound"):
        norm.update_statistics(GOOD)
    assert bits(norm) == before


# Freezing


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_frozen_folds_nothing_on_any_path(emit):
    norm = Normalizer(1, emit=emit)
    norm.set_statistics(2.0, 3.0, 2)
    norm.freeze()
    before = bits(norm)
    x = jnp.array([[100.0], [jnp.nan]])
    out = norm((), x)
    history = jax.tree.map(lambda v: v[None], out.rollout_extras)
    norm.update_statistics(history)
    for call in (norm.normalize, norm.denormalize, lambda x: norm((), x, history)):
        call(x)
    if emit == "inputs":
        norm.update_statistics(history, mask=jnp.ones((1, 2), bool))
        norm.update_statistics(history, weights=jnp.ones((1, 2)))
    nnx.jit(lambda n, h: n.update_statistics(h))(norm, history)
    assert bits(norm) == before
    assert nnx.clone(norm).frozen
    norm.unfreeze()
    structure = jax.tree.structure(norm((), x).rollout_extras)
    assert jax.tree.structure(out.rollout_extras) == structure
    norm.update_statistics(history)
    assert norm.count == 3 and norm.to_dict()["skipped"] == 1
