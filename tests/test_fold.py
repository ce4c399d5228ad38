# SPDX-License-Identifier: Apache-2.0
"""Laws of the step: float64-grade statistics of any stream, however it is cut."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nnx_norm.extended import double
from nnx_norm.fold import (
    Rule,
    Statistics,
    _fold_inputs,
    emit,
    fold_inputs,
    fold_moments,
    joined,
    separated,
)

T, B, F = 8, 64, 4
EPS = 2.0**-24

State = tuple[Statistics, Statistics]
PLAIN = Rule()


def empty(*feat: int) -> State:
    leaf, number = jnp.zeros(feat, jnp.float32), jnp.zeros((), jnp.float32)
    zero = Statistics([leaf], [leaf], number, number)
    return zero, zero


def preset(mean: float, variance: float, count: float) -> State:
    with double():
        M2 = jnp.full(F, variance * count, jnp.float64)
        known = Statistics([jnp.full(F, mean, jnp.float64)], [M2], *map(
            lambda v: jnp.asarray(v, jnp.float64), (count, 0.0)
        ))  # fmt: skip
        return separated(known)


class Numbers(NamedTuple):
    mean: np.ndarray
    M2: np.ndarray
    count: float
    skipped: float


def numbers(state: State) -> Numbers:
    """What is stored of one leaf, in full precision."""
    with double():
        s = jax.tree.map(np.asarray, joined(*state))
    return Numbers(s.mean[0], s.M2[0], float(s.counter), float(s.skipped))


def bits(state: State) -> list[Any]:
    return [np.asarray(v).view(np.uint32).tolist() for v in jax.tree.leaves(state)]


def eager(
    state: State, x: Any, mask: Any = None, weights: Any = None, rule: Rule = PLAIN
) -> State:
    """Concrete arrays are known to lie on one device."""
    x, mask, weights = jax.tree.map(jnp.asarray, (x, mask, weights))
    lead = x.ndim - state[0].mean[0].ndim
    return fold_inputs(*state, [x], mask, weights, lead=lead, rule=rule)


jitted = jax.jit(eager, static_argnames="rule")  # here they may lie on several
ways = pytest.mark.parametrize("fold", [eager, jitted], ids=["eager", "jit"])
precisions = pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])


def check(state: State, rows: Any, mean: float = 1e-7, variance: float = 2e-7) -> None:
    """The moments of rows `[n, F]`: errors in standard deviations, and of itself."""
    got, x = numbers(state), np.asarray(rows).astype(np.float64)
    std = np.std(x, axis=0)
    M2 = np.sum((x - x.mean(0)) ** 2, axis=0)
    assert got.count == len(x)
    assert np.all(np.abs(got.mean - x.mean(0)) <= mean * std)
    assert np.all(np.abs(got.M2 - M2) <= variance * M2)


def normal(seed: int, mean: Any, std: Any = 1.0, updates: int = 16) -> np.ndarray:
    """Histories `[updates, T, B, F]`."""
    x = np.random.default_rng(seed).normal(0, 1, (updates, T, B, F))
    return (mean + std * x).astype(np.float32)


def through(fold: Callable[..., State], histories: Iterable[Any], **how: Any) -> State:
    state = empty(F)
    for x in histories:
        state = fold(state, x, **how)
    return state


# Streams. The numbers are those that float64 inside the merge was measured to reach.

DRIFT = np.linspace(0, 1000, 16).reshape(16, 1, 1, 1)
STREAMS = {
    "S1 normal": normal(1, 0.0),
    "S2 at 1e4": normal(2, 1e4),
    "S3 at 1e6": normal(3, 1e6),
    "S5 drifting": normal(5, DRIFT),
    "S7 tiny": normal(7, 0.0, 1e-8),
    "S8 huge": normal(8, 0.0, 1e16),
    "jumps": normal(9, np.resize([0, 1e4, -1e4, 1e6, 0, 0], 16).reshape(16, 1, 1, 1)),
    "four scales": normal(10, np.asarray([0, 1e2, -1e4, 1e6]), [1e-3, 1, 10, 1e3]),
    "S12 pixels": (np.abs(normal(12, 0, 80)) % 256).astype(np.uint8),
    "integers at 2^30": (2**30 + normal(13, 0, 1000).astype(np.int64)).astype(np.int32),
}


@ways
@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_exact_to_seven_digits(name, fold):
    x = STREAMS[name]
    check(through(fold, x), x.reshape(-1, F))


@precisions
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["f16", "bf16"])
def test_half_precision_is_exact_to_seven_digits(dtype, wide):
    x = jnp.asarray(normal(11, 100.0)).astype(dtype)
    with jax.enable_x64(wide):
        check(through(jitted, x), np.asarray(x).reshape(-1, F))


@pytest.mark.parametrize("name", ["S3 at 1e6", "S5 drifting", "S12 pixels", "jumps"])
def test_streams_are_exact_with_x64_on(name):
    x = STREAMS[name]
    with jax.enable_x64(True):
        state = through(jitted, x)
        assert {v.dtype for v in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    check(state, x.reshape(-1, F))


def test_the_textbook_in_float32_is_not():
    x = STREAMS["S2 at 1e4"].reshape(-1, F)  # teeth for the laws above
    right = x.astype(np.float64).var(0)
    naive = np.mean(x**2, 0) - np.mean(x, 0) ** 2
    assert np.all(np.abs(naive - right) > 0.1 * right)
    count, mean = np.float32(2**24), np.float32(3)
    assert count + 1 == count and mean + (4 - mean) / (count + 1) == mean


@ways
def test_one_update_of_many_rows(fold):
    x = np.random.default_rng(14).normal(1e3, 1, (2**17, F)).astype(np.float32)
    check(fold(empty(F), x), x)


@precisions
def test_millions_of_one_row_updates_inside_one_jit(wide):
    """S4b: from 2^24 on a float32 counter stands still, and so does its mean."""
    updates, before = 4096, 2**24

    @jax.jit
    def run(state: State) -> State:
        def step(state: State, x: jax.Array) -> tuple[State, None]:
            return eager(state, x), None

        return jax.lax.scan(step, state, jnp.full((updates, 1, F), 4.0))[0]

    with jax.enable_x64(wide):
        got = numbers(run(preset(3.0, 0.0, before)))
    n = before + updates
    assert got.count == n
    assert got.mean == pytest.approx(np.full(F, 3 + updates / n), rel=1e-11)
    assert got.M2 == pytest.approx(np.full(F, before * updates / n), rel=1e-9)


@ways
def test_the_mean_moves_after_ten_billion_samples(fold):
    """S13: the share of the true move that is absorbed is one."""
    state, updates = preset(1.0, 1.0, 10**10), 50
    x = np.full((T, B, F), 1.5, np.float32)
    for _ in range(updates):
        state = fold(state, x)
    got, new = numbers(state), T * B * updates
    assert got.count == 10**10 + new
    moved = 0.5 * new / (10**10 + new)
    assert got.mean - 1 == pytest.approx(np.full(F, moved), rel=1e-6)


def test_counts_are_exact_beyond_two_to_the_40():
    state = preset(0.0, 1.0, 2.0**47 + 1)
    for i in range(3):
        state = eager(state, np.zeros((1, 1, F), np.float32))
        assert numbers(state).count == 2**47 + 2 + i


CONSTANTS = [3.3, 14.62, float(np.log(1e-5)), 12345.678, 1e6 + 0.1, -3e38, 1e-15]


@ways
@pytest.mark.parametrize("kind", ["all", "mask", "weights", "decay"])
def test_a_constant_stays_exact_for_ever(fold, kind):
    x = np.broadcast_to(np.asarray(CONSTANTS, np.float32), (7, 3, len(CONSTANTS)))
    how: dict[str, Any] = {
        "all": {},
        "mask": {"mask": np.arange(21).reshape(7, 3) % 4 > 0},
        "weights": {"weights": np.linspace(0.1, 3, 21, dtype=np.float32).reshape(7, 3)},
        "decay": {"rule": Rule(decay=0.9)},
    }[kind]
    state = empty(len(CONSTANTS))
    for _ in range(20):
        state = fold(state, x, **how)
        got = numbers(state)
        assert np.array_equal(got.mean.astype(np.float32), x[0, 0])
        assert np.array_equal(got.mean, x[0, 0].astype(np.float64))
        assert not np.any(got.M2)


# Any cut of one data set, in any order.


@ways
@hypothesis.given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([1, 4, 16]), min_size=3, max_size=12),
    st.sampled_from([0.0, 1e4, 1e6]),
    st.booleans(),
)
def test_any_split_in_any_order_gives_the_same(fold, seed, sizes, offset, ordered):
    rng = np.random.default_rng(seed)
    drift = rng.choice([0.0, 1.0, 100.0])
    rows = rng.normal(offset, 1, (sum(sizes), F))
    rows = (rows + drift * np.linspace(0, 1, len(rows))[:, None]).astype(np.float32)
    cut = np.split(rows if ordered else rng.permutation(rows), np.cumsum(sizes)[:-1])
    check(through(fold, cut), rows, mean=1e-7, variance=5e-7)


@ways
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e4]))
def test_a_mask_drops_rows_and_weights_repeat_them(fold, seed, offset):
    rng = np.random.default_rng(seed)
    state, rows = empty(F), []
    for _ in range(3):
        x = rng.normal(offset, 1, (4, 6, F)).astype(np.float32)
        mask, times = rng.random((4, 6)) < 0.6, rng.integers(0, 4, (4, 6))
        rows.append(np.repeat(x[mask], times[mask], axis=0))
        x[~mask] = rng.choice([np.nan, np.inf, 3e38, 1.0], (24 - mask.sum(), 1))
        state = fold(state, x, mask, times.astype(np.float32))
    check(state, np.concatenate(rows), mean=1e-7, variance=5e-7)
    assert numbers(state).skipped == 0


@ways
def test_a_prefix_weighs_all_agents(fold):
    rng = np.random.default_rng(15)
    x = rng.normal(50, 1, (4, 6, 5, F)).astype(np.float32)  # [T, B, agents, F]
    mask = rng.random((4, 6)) < 0.5
    state = fold(fold(empty(F), x, mask), x, mask[:, 0])
    rows = [x[mask].reshape(-1, F), x[mask[:, 0]].reshape(-1, F)]
    check(state, np.concatenate(rows))


# What is not folded.

NOTHING = {
    "masked": {"mask": np.zeros((T, B), bool)},
    "weightless": {"weights": np.zeros((T, B), np.float32)},
    "no step": {"x": np.zeros((0, B, F), np.float32)},
    "no environment": {"x": np.zeros((T, 0, F), np.float32)},
    "prefix": {"mask": np.zeros(T, bool)},
}


@ways
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_fold_changes_no_bit(name, fold):
    rule = Rule(decay=0.5, skip=name != "weightless")
    first = fold(empty(F), STREAMS["four scales"][0], rule=rule)
    bad = np.full((T, B, F), np.nan, np.float32)
    given = {"x": bad, "rule": rule} | NOTHING[name]
    assert bits(fold(first, **given)) == bits(first)
    assert bits(fold(empty(F), **given)) == bits(empty(F))


@ways
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6], ids=str)
def test_bad_samples_stay_out_and_are_counted(mean, fold):
    x = normal(16, mean, updates=4)
    for i, bad in enumerate([np.nan, np.inf, -np.inf, np.nan]):
        x[i, i, 3 * i, i] = x[i, 5, 5, 0] = bad
    good = np.isfinite(x).all(-1)
    state = through(fold, x)
    check(state, x[good])
    assert numbers(state).skipped == np.sum(~good) == 8


@ways
def test_all_bad_is_no_sample(fold):
    state = fold(empty(F), STREAMS["S1 normal"][0])
    after = fold(state, np.full((T, B, F), np.inf, np.float32), rule=Rule(decay=0.5))
    assert numbers(after)[2:] == (T * B, T * B)
    assert np.array_equal(numbers(after).mean, numbers(state).mean)


@ways
def test_propagate_lets_them_in_for_good(fold):
    x = normal(17, 1.0, updates=2)
    x[0, 0, 0, 1] = np.nan
    got = numbers(through(fold, x, rule=Rule(skip=False)))
    assert got.count == 2 * T * B and got.skipped == 0
    for v in (got.mean, got.M2):
        assert np.isfinite(v).tolist() == [True, False, True, True]


@ways
def test_what_float32_cannot_hold_is_refused_whole_and_counted(fold):
    good = STREAMS["S1 normal"][0]
    state = fold(empty(F), good)
    huge = normal(18, 0, [1.0, 1.0, 1e25, 1.0], updates=1)[0]
    after = fold(state, huge)
    assert numbers(after).skipped == T * B
    check(fold(after, good), np.concatenate([good, good]).reshape(-1, F))
    spoiled = numbers(fold(state, huge, rule=Rule(skip=False)))
    assert np.isfinite(spoiled.M2).tolist() == [True, True, False, True]
    # The counter of rows, not of weights; and the decay waits for a valid update.
    refused = fold(
        state, huge, None, np.full((T, B), 0.5, np.float32), rule=Rule(decay=0.5)
    )
    assert numbers(refused)[2:] == (T * B, T * B)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, -np.inf])
def test_bad_weights_inside_jit_are_counted_as_skipped(bad):
    x = normal(19, 10.0, updates=2)
    weights = np.ones((T, B), np.float32)
    weights[3, 4] = weights[5, 6] = bad
    state = jitted(jitted(empty(F), x[0], None, weights), x[1])
    check(state, np.concatenate([x[0][weights == 1], x[1].reshape(-1, F)]))
    assert numbers(state).skipped == 2


# Settings.


@ways
@hypothesis.given(st.sampled_from([0.5, 0.99]), st.integers(0, 2**32 - 1))
def test_decay_weighs_every_earlier_sample_once_more(fold, decay, seed):
    rng = np.random.default_rng(seed)
    x = (rng.normal(0, 1, (6, 4, 3, F)) + 10 * rng.normal(0, 1, (6, 1, 1, 1))).astype(
        np.float32
    )
    got = numbers(through(fold, x, rule=Rule(decay=decay)))
    w = np.repeat(decay ** np.arange(5.0, -1, -1), 12)[:, None]
    rows = x.reshape(-1, F).astype(np.float64)
    mean = np.sum(w * rows, 0) / w.sum()
    M2 = np.sum(w * (rows - mean) ** 2, 0)
    assert got.count == pytest.approx(w.sum(), rel=1e-12)
    assert np.all(np.abs(got.mean - mean) <= 1e-7 * np.sqrt(M2 / w.sum()))
    assert np.all(np.abs(got.M2 - M2) <= 5e-7 * M2)


@ways
def test_the_batch_that_crosses_max_count_is_the_last(fold):
    state, rule = empty(F), Rule(max_count=10)
    for value in (1, 2, 3, 9, np.nan):
        before, x = state, np.full((2, 2, F), value, np.float32)
        state = fold(state, x, rule=rule)
    check(state, np.repeat([[1.0] * F, [2.0] * F, [3.0] * F], 4, axis=0))
    assert bits(state) == bits(before) and numbers(state).skipped == 0


# Residuals.


def test_a_value_written_directly_does_not_inherit_the_residual():
    state = eager(eager(empty(F), normal(20, 1e4)[0]), normal(21, 1e4)[0])
    value, residual = state
    assert np.any(np.asarray(residual.mean[0]))
    written = value._replace(
        mean=[np.zeros(F, np.float32)], M2=[np.zeros(F, np.float32)]
    )
    got = numbers((written, residual))
    assert not np.any(got.mean) and not np.any(got.M2)


def test_without_residuals_digits_would_be_lost():
    x, state = STREAMS["S3 at 1e6"], empty(F)
    for history in x:
        value, _ = eager(state, history)
        state = value, empty(F)[1]
    rows = x.reshape(-1, F).astype(np.float64)
    error = np.abs(numbers(state).mean - rows.mean(0))
    assert np.any(error > 1e-4 * rows.std(0))  # teeth: 1e-7 is reached with them


# Emitted moments.


def emitted(state: State, x: Any, skip: bool = True) -> Any:
    running = state[0].moments
    return jax.vmap(lambda x: emit([x], running, lead=1, skip=skip))(jnp.asarray(x))


def fold_emitted(state: State, x: Any, rule: Rule = PLAIN) -> State:
    return fold_moments(*state, emitted(state, x, rule.skip), rule=rule)


@pytest.mark.parametrize("name", ["S1 normal", "S3 at 1e6", "jumps", "S12 pixels"])
def test_moments_of_the_steps_make_those_of_the_history(name):
    x = STREAMS[name][:6]
    check(through(fold_emitted, x), x.reshape(-1, F), mean=1e-7, variance=5e-7)


def test_emitted_moments_are_float32_and_skip_like_inputs():
    x = normal(22, 1e4, updates=2)
    x[0, 2, 3, 1], x[1, 4, 4, 0] = np.nan, np.inf
    extras = emitted(empty(F), x[0])
    assert {v.dtype for v in jax.tree.leaves(extras)} == {jnp.dtype(jnp.float32)}
    assert extras.count.shape == (T,) and extras.skipped.sum() == 1
    state = through(fold_emitted, x)
    check(state, x[np.isfinite(x).all(-1)], mean=1e-7, variance=5e-7)
    assert numbers(state).skipped == 2
    propagated = numbers(through(fold_emitted, x, rule=Rule(skip=False)))
    assert propagated.count == 2 * T * B
    assert np.isfinite(propagated.mean).tolist() == [False, False, True, True]


def test_a_step_that_float32_cannot_hold_is_skipped_alone():
    x = normal(23, 0.0, updates=1)[0]
    x[5] *= 1e25
    state = fold_emitted(empty(F), x)
    check(state, np.delete(x, 5, axis=0).reshape(-1, F), mean=1e-7, variance=5e-7)
    assert numbers(state).skipped == B


def test_no_emitted_sample_changes_no_bit():
    state = eager(empty(F), STREAMS["S1 normal"][0])
    none = emitted(state, np.zeros((0, B, F), np.float32))
    assert bits(fold_moments(*state, none, rule=Rule(decay=0.5))) == bits(state)


# Transforms.


def test_seeds_are_independent():
    x = np.stack([normal(24 + i, m, updates=3) for i, m in enumerate([0, 1e4, 1e6])])
    x[2, 1, 1, 1, 1] = np.nan
    fold = jax.jit(jax.vmap(lambda state, x: eager(state, x)))
    states = jax.tree.map(lambda v: jnp.stack([v] * 3), empty(F))
    for i in range(3):
        states = fold(states, x[:, i])
    for i in range(3):
        own = jax.tree.map(lambda v, i=i: v[i], states)
        check(own, x[i][np.isfinite(x[i]).all(-1)])
        assert numbers(own).skipped == (i == 2)


@precisions
@pytest.mark.parametrize("name", ["scan", "cond", "while"])
def test_control_flow_changes_nothing(name, wide):
    x = normal(27, 1e4, updates=4)

    def scan(x: jax.Array) -> State:
        return jax.lax.scan(lambda s, x: (eager(s, x), None), empty(F), x)[0]

    def cond(x: jax.Array) -> State:
        def step(state: State, x: jax.Array) -> tuple[State, None]:
            positive = x[0, 0, 0] > 0  # all but those put in between
            return jax.lax.cond(positive, eager, lambda s, _: s, state, x), None

        between = jnp.stack([x, -x], axis=1).reshape(-1, *x.shape[1:])
        return jax.lax.scan(step, empty(F), between)[0]

    def loop(x: jax.Array) -> State:
        return jax.lax.fori_loop(0, 4, lambda i, s: eager(s, x[i]), empty(F))

    run = {"scan": scan, "cond": cond, "while": loop}[name]
    with jax.enable_x64(wide):
        check(jax.jit(run)(jnp.asarray(x)), x.reshape(-1, F))


def test_shapes_and_types_are_kept():
    history = jax.ShapeDtypeStruct((T, B, F), jnp.uint8)
    after = jax.eval_shape(jitted, empty(F), history)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(empty(F)), strict=True):
        assert (new.shape, new.dtype) == (old.shape, jnp.float32)
        assert not new.weak_type


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8], ids=["f32", "uint8"])
@pytest.mark.parametrize("kind", ["all", "mask", "weights"])
def test_nothing_of_the_size_of_a_history_is_made(dtype, kind):
    x = jnp.ones((16, 128, 348), dtype)
    w = jnp.ones((16, 128), jnp.bool_ if kind == "mask" else jnp.float32)
    options = {} if kind == "all" else {kind: w}
    compiled = jitted.lower(empty(348), x, **options).compile()
    memory: Any = compiled.memory_analysis()
    # A few bytes of each sample, none of a feature.
    assert memory.temp_size_in_bytes <= 0.02 * x.size * 4


def test_equal_shapes_are_traced_once():
    traces = []

    @jax.jit
    def fold(state: State, x: jax.Array) -> State:
        traces.append(None)
        return eager(state, x)

    state = empty(F)
    for x in STREAMS["jumps"][:4]:  # the careful read comes and goes
        state = fold(state, jnp.asarray(x))
    assert len(traces) == 1


# A jump early in a run.


@pytest.mark.parametrize("rows", [(4, 6), (2, 30), (7, 8)])
def test_a_jump_leaves_the_mean_within_its_bound(rows):
    """A shift off the grid of far samples rounds all their deviations the same way."""
    fold = partial(fold_inputs, mask=None, weights=None, lead=1, rule=PLAIN)
    worst = 0.0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        state, parts = empty(F), []
        for at, n in zip((0, -1e4), rows, strict=True):
            parts.append(rng.normal(at, 1.0, (n, F)).astype(np.float32))
            state = fold(*state, [jnp.asarray(parts[-1])])
        every = np.concatenate(parts).astype(np.float64)
        error = np.abs(numbers(state).mean - every.mean(0)) / every.std(0)
        worst = max(worst, error.max())
    assert worst <= 1e-7


def test_small_updates_run_on_the_calling_thread():
    """XLA's CPU client does so with less than 1000 operations, loops taken once."""
    small, x = empty(8), jnp.zeros((1000, 1, 8), jnp.float32)
    update = partial(_fold_inputs, lead=2, rule=PLAIN, local=True)
    compiled: Any = jax.jit(update).lower(*small, [x], None, None).compile()
    assert compiled.cost_analysis()["flops"] < 1000


@pytest.mark.parametrize("kind", ["all", "mask", "weights"])
def test_large_batches_of_one_feature_are_read_again_around_a_nan(kind):
    """XLA hands large sums of one operand to a library."""
    x = np.random.default_rng(5).normal(3, 2, (70, 1024)).astype(np.float32)
    x[3, 3] = np.nan
    flags = (np.arange(x.size).reshape(x.shape) % 3 > 0) | (kind == "all")
    mask = flags if kind == "mask" else None
    weights = flags.astype(np.float32) if kind == "weights" else None
    got = numbers(eager(empty(), x, mask, weights))
    rows = x[np.isfinite(x) & flags].astype(np.float64)
    assert got.count == rows.size and got.skipped == flags[3, 3]
    np.testing.assert_allclose(got.mean, rows.mean(), rtol=1e-9)
    np.testing.assert_allclose(got.M2, rows.size * rows.var(), rtol=1e-9)


def test_statistics_split_over_devices_take_a_history_of_one():
    """The history goes where they are."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    x = np.tile(normal(3, 2.0, updates=1)[0], jax.device_count())
    state = empty(x.shape[-1])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["d"], []))
    placed = jax.tree.map(
        lambda v: jax.device_put(v, split if v.ndim else whole), state
    )
    got, one = numbers(eager(placed, x)), numbers(eager(state, x))
    assert got.count == one.count
    np.testing.assert_allclose(got.mean, one.mean, rtol=1e-9)
