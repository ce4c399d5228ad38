# SPDX-License-Identifier: Apache-2.0
"""Laws of the careful read: it comes when it is needed, only then, and it helps."""

import re
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from nnx_norm.extended import double
from nnx_norm.reread import BatchSums, batch_sums
from nnx_norm.samples import align_leading
from nnx_norm.sums import sums

T, B, F = 6, 5, 3
EPS = 2.0**-24


def read(leaves: Any, lead: int = 2, **options: Any) -> BatchSums:
    """Sums on the host; the shift tells whether the batch was read again."""
    with double():
        out = batch_sums([jnp.asarray(x) for x in leaves], lead, **options)
    return jax.tree.map(np.asarray, out)


# In slices, on the one device where the batch is known to lie, and in reductions.
places = pytest.mark.parametrize("local", [True, False], ids=["local", "spread"])


def normals(seed: int, mean: Any = 0.0, std: Any = 1.0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(mean, std, (T, B, F))
    return x.astype(np.float32)


def batch_mean(s: BatchSums, leaf: int = 0) -> np.ndarray:
    return np.asarray(s.shift[leaf], np.float64) + s.sums[leaf].first / s.count


def batch_M2(s: BatchSums, leaf: int = 0) -> np.ndarray:
    first, second = map(np.asarray, s.sums[leaf])
    with np.errstate(invalid="ignore"):
        return second - first**2 / s.count


def read_again(s: BatchSums, *shifts: Any) -> bool:
    return any(not np.array_equal(a, b) for a, b in zip(s.shift, shifts, strict=True))


class Counted(NamedTuple):
    """The samples that count, by definition, with their weights, `[T, B]`."""

    weight: np.ndarray
    skipped: int


def expected(leaves: Any, mask: Any, weights: Any, skip: bool) -> Counted:
    def fill(w: Any) -> np.ndarray:
        w = np.asarray(w)
        return np.broadcast_to(w.reshape(w.shape + (1,) * (2 - w.ndim)), (T, B))

    weight = np.ones((T, B)) if weights is None else fill(weights).astype(np.float64)
    offered = np.ones((T, B), bool) if mask is None else fill(mask)
    real = np.isfinite(weight) & (weight >= 0)
    finite = np.ones((T, B), bool)
    if skip:
        for x in leaves:
            finite &= np.isfinite(x.astype(np.float64)).reshape(T, B, -1).all(-1)
    refused = offered & (~real | ((weight != 0) & ~finite))
    return Counted(np.where(offered & real & finite, weight, 0.0), refused.sum())


def check(s: BatchSums, leaves: Any, counted: Counted, tolerance: float) -> None:
    """Moments of the samples that count, to `tolerance` of a standard deviation."""
    w = counted.weight
    assert s.count == w.sum() and s.rows == np.sum(w > 0)
    assert s.skipped == counted.skipped
    for i, x in enumerate(leaves):
        x = np.where(align_leading(w, x) > 0, x.astype(np.float64), 0.0)
        w_x, n = align_leading(w, x), max(w.sum(), 1e-300)
        mean = (w_x * x).sum((0, 1)) / n
        M2 = (w_x * (x - mean) ** 2).sum((0, 1))
        if s.count > 0:
            error = np.abs(batch_mean(s, i) - mean)
            assert np.all(error <= tolerance * np.sqrt(M2 / n) + 1e-30)
            assert np.all(np.abs(batch_M2(s, i) - M2) <= tolerance * M2)


# When it comes.


@pytest.mark.parametrize("near", [0.0, 0.45, -0.45, 0.55, -0.55], ids=str)
@pytest.mark.parametrize("std", [1e-8, 1.0, 1e8])
def test_a_shift_within_half_a_standard_deviation_is_good_enough(std, near):
    x = normals(0, 0.0, std)
    mean, spread = (v(x.astype(np.float64), axis=(0, 1)) for v in (np.mean, np.std))
    shift = (mean + near * spread).astype(np.float32)
    assert read_again(read([x], shift=[jnp.asarray(shift)]), shift) == (abs(near) > 0.5)


@pytest.mark.parametrize("times", [2.0, 10.0, 1e4, 1e6])
def test_a_shift_of_some_standard_deviations_is_not(times):
    x = normals(1, times)
    s = read([x])
    assert read_again(s, np.zeros(F, np.float32))
    check(s, [x], expected([x], None, None, False), 8 * EPS * (1 + times * EPS))


def test_one_feature_in_need_is_enough():
    x = normals(2, [0.0, 0.0, 1e4])
    assert read_again(read([x]), np.zeros(F, np.float32))
    other = normals(3)
    s = read([other, x])
    check(s, [other, x], expected([other, x], None, None, False), 1e-6)


@pytest.mark.parametrize("prior", [1, 100, 150, 1e3, 1e9])
def test_a_jump_that_the_merge_adds_to_M2_needs_no_second_read(prior):
    """n rows at distance d of N others add d^2 nN/(n+N), whose digits are enough."""
    x, zero = normals(4, 1e4), np.zeros(F, np.float32)
    alone = T * B / (T * B + prior)  # share of the squares that cancels in the merge
    for local in (True, False):
        s = read([x], shift=[jnp.asarray(zero)], prior=prior, local=local)
        assert read_again(s, zero) == (alone > 0.2)


def test_lost_digits_are_worth_the_second_read():
    x = normals(5, 1e4)
    right = np.var(x.astype(np.float64), axis=(0, 1)) * T * B
    naive = np.sum(x**2, axis=(0, 1)) - np.sum(x, axis=(0, 1)) ** 2 / (T * B)
    assert np.all(np.abs(naive - right) > 0.1 * right)  # teeth
    assert np.all(np.abs(batch_M2(read([x])) - right) <= 8 * EPS * right)


# Constants.

CONSTANTS = [3.3, 14.62, float(np.log(1e-5)), 12345.678, 1e6 + 0.1, 1e-15, -3e38]


@places
@pytest.mark.parametrize("shift", [0.0, 1e3, -1e7])
@pytest.mark.parametrize("kind", ["all", "mask", "weights"])
def test_a_feature_that_does_not_move_has_that_mean_and_no_M2(shift, kind, local):
    x = np.full((T, B, len(CONSTANTS)), CONSTANTS, np.float32)
    options: dict[str, Any] = {}
    if kind == "mask":
        options["mask"] = jnp.asarray(np.arange(T) % 2 == 0)
    if kind == "weights":
        options["weights"] = jnp.linspace(0.1, 3, T * B).reshape(T, B)
    start = jnp.full(len(CONSTANTS), shift, jnp.float32)
    s = read([x], shift=[start], local=local, **options)
    assert np.array_equal(batch_mean(s), x[0, 0].astype(np.float64))
    first, second = s.sums[0]
    assert np.all(np.maximum(second - first * (first / s.count), 0) == 0)


# Samples that are not finite.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e4, -1e6], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@places
def test_samples_that_are_not_finite_stay_out(bad, mean, dtype, local):
    mean = np.clip(mean, -3e4, 3e4) if dtype == jnp.float16 else mean
    spread = max(1.0, abs(mean) / 10)  # in these dtypes something must be left of it
    x = np.array(jnp.asarray(normals(6, mean, spread)).astype(dtype))
    x[1, 2, 0] = x[4, 0, 2] = x[4, 1, 1] = bad
    s = read([x], skip=True, local=local)
    assert s.skipped == 3
    check(s, [x], expected([x], None, None, True), 1e-6)


@places
def test_a_sample_is_out_in_all_its_leaves(local):
    x, y = normals(7), normals(8, 1e3)[..., 0]
    pixels = np.arange(T * B).reshape(T, B).astype(np.uint8)
    x[0, 0, 0], y[3, 3] = np.nan, np.inf
    s = read([x, y, pixels], skip=True, local=local)
    assert s.skipped == 2
    check(s, [x, y, pixels], expected([x, y, pixels], None, None, True), 1e-6)


@places
def test_nothing_finite_counts_nothing(local):
    s = read([np.full((T, B, F), np.nan, np.float32)], skip=True, local=local)
    assert (s.count, s.rows, s.skipped) == (0, 0, T * B)
    assert not np.any(s.sums[0]) and np.all(np.isfinite(s.shift[0]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_without_skip_they_count_and_spoil_their_own_feature_only(bad):
    x = normals(9, 1e4)
    x[2, 2, 1] = bad
    s = read([x], skip=False)
    assert (s.count, s.rows, s.skipped) == (T * B, T * B, 0)
    assert np.isfinite(batch_M2(s)).tolist() == [True, False, True]
    right = np.var(x[..., ::2].astype(np.float64), axis=(0, 1)) * T * B
    assert np.all(np.abs(batch_M2(s)[::2] - right) <= 1e-6 * right)


@places
@pytest.mark.parametrize(("mean", "std"), [(1e20, 1e17), (0, 1e25), (3e38, 1e36)])
def test_squares_that_overflow_are_added_in_float64(mean, std, local):
    x = normals(10, mean, std)
    s = read([x], skip=True, local=local)
    check(s, [x], expected([x], None, None, True), 1e-6)


# Masks and weights.

flags = st.lists(st.booleans(), min_size=T * B, max_size=T * B)
weight = st.sampled_from([0.0, 0.25, 1.0, 3.0, -1.0, np.nan, np.inf, 1e-3])


@places
@hypothesis.given(st.data(), st.booleans(), st.booleans(), st.sampled_from([0.0, 1e4]))
def test_count_rows_skipped_and_sums_of_any_mask_and_weights(
    local, data, weighted, skip, mean
):
    mask = np.asarray(data.draw(flags)).reshape(T, B)
    values = data.draw(st.lists(weight, min_size=T * B, max_size=T * B))
    weights = np.asarray(values, np.float32).reshape(T, B) if weighted else None
    x, y = normals(12, mean), normals(13)
    bad = np.asarray(data.draw(flags)).reshape(T, B) & (np.arange(B) < 2)
    counted = expected([x, y], mask, weights, True)
    if skip:
        x[bad, 0] = np.nan
        counted = expected([x, y], mask, weights, True)
    else:  # only where no weight lies
        x[bad & (counted.weight == 0), 0] = np.nan
    given = jax.tree.map(jnp.asarray, {"mask": mask, "weights": weights})
    s = read([x, y], skip=skip, local=local, **given)
    check(s, [x, y], counted, 4e-6)


@places
@pytest.mark.parametrize(("skip", "mean"), [(False, 0.0), (True, 1e4)])
def test_a_prefix_stands_for_all_that_is_behind_it(skip, mean, local):
    x = normals(14, mean)
    if skip:
        x[0, 0, 0] = x[1, 1, 1] = np.nan
    agents = x[..., None]  # [T, B, agents, 1]: each agent is a sample of its own
    mask = np.arange(T * B).reshape(T, B) % 3 > 0
    weights = np.linspace(0.5, 2, T).astype(np.float32)
    options = {"mask": jnp.asarray(mask), "weights": jnp.asarray(weights)}
    s = read([agents], 3, skip=skip, local=local, **options)
    spread = {
        k: jnp.broadcast_to(align_leading(v, x), x.shape) for k, v in options.items()
    }
    same = read([agents], 3, skip=skip, local=local, **spread)
    assert s.count == pytest.approx(float(same.count), rel=1e-12)
    assert (s.rows, s.skipped) == (same.rows, same.skipped)
    assert s.skipped == (np.isnan(agents) & mask[..., None, None]).sum()
    assert batch_mean(s) == pytest.approx(batch_mean(same), rel=1e-7)
    assert batch_M2(s) == pytest.approx(batch_M2(same), rel=1e-6)


@pytest.mark.parametrize("shape", [(0, B, F), (T, 0, F)], ids=str)
@places
def test_an_empty_history_counts_nothing(shape, local):
    s = read([np.zeros(shape, np.float32)], skip=True, local=local)
    assert (s.count, s.rows, s.skipped) == (0, 0, 0) and not np.any(s.sums[0])


# What it costs.

COMPUTATION = re.compile(r"^(?:ENTRY )?(%?[\w.\-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|condition|branch_computations)=\{?(%?[\w.\-]+)")


def readers(text: str, history: str, *, loops: bool) -> int:
    """How many fusions of an HLO module take the history, in loops or whatever happens.

    Bodies of while loops are not reached from the entry when they aren't followed.
    """
    lines: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[1]
            entry = name if line.startswith("ENTRY") else entry
            lines[name] = []
        elif name:
            lines[name].append(line)
    found, todo = [], [entry]
    while todo:
        found.append(todo.pop())
        called = CALLED.findall("\n".join(lines[found[-1]]))
        todo += [c for c in called if c not in found and c not in todo]
    reached = list(lines) if loops else found
    reads = re.compile(rf"= {re.escape(history)}\S* parameter\(")
    return sum(bool(reads.search("\n".join(lines[n]))) for n in reached)


def compile_read(
    x: Any, seeds: bool = False, again: bool = True, **options: Any
) -> Any:
    def function(x, shift):
        with double():
            if again:
                s = batch_sums([x], 2, shift=[shift], skip=True, **options)
            else:
                s = sums(x, shift, None, 2, local=False)
            return jax.tree.map(lambda v: v.astype(jnp.float32), s)

    shift = jnp.zeros(x.shape[2 + seeds :])
    if seeds:
        function, shift = jax.vmap(function), jnp.zeros((x.shape[0], *shift.shape))
    return jax.jit(function).lower(x, shift).compile()


@pytest.mark.parametrize("seeds", [False, True], ids=["one", "vmap"])
def test_the_second_read_is_inside_the_loop(seeds):
    """XLA moves what doesn't change out of loops: then it would always be paid."""
    x = jnp.zeros((4, 32, 16, 8) if seeds else (32, 16, 8), jnp.float32)
    history = f"f32[{','.join(map(str, x.shape))}]"
    text = compile_read(x, seeds, local=False).as_text()
    first = compile_read(x, seeds, again=False).as_text()
    always = readers(text, history, loops=False)
    assert 0 < always == readers(first, history, loops=False)
    assert readers(text, history, loops=True) > always


def test_seeds_that_need_no_second_read_keep_their_shift_and_the_others_get_it():
    means = np.asarray([0.0, 1e4, 0.0, np.nan])
    x = np.stack([normals(20 + i, m) for i, m in enumerate(np.nan_to_num(means))])
    x[3, 2, 2, 0] = np.nan
    with double():
        mapped = jax.vmap(lambda x: batch_sums([x], 2, skip=True))(jnp.asarray(x))
    mapped = jax.tree.map(np.asarray, mapped)
    again = (mapped.shift[0] != 0).any(-1)
    assert again.tolist() == [False, True, False, True]
    for i in range(4):
        alone = read([x[i]], skip=True)
        one = jax.tree.map(lambda v, i=i: v[i], mapped)
        check(one, [x[i]], expected([x[i]], None, None, True), 1e-6)
        assert (one.count, one.skipped) == (alone.count, alone.skipped)


@places
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8])
@pytest.mark.parametrize("kind", ["all", "weights"])
def test_neither_read_makes_anything_of_the_size_of_a_history(dtype, kind, local):
    x = jnp.ones((16, 128, 348), dtype)
    options: dict[str, Any] = {} if kind == "all" else {kind: jnp.ones((16, 128))}
    memory = compile_read(x, local=local, **options).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.02 * x.size * 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8])
def test_on_one_device_temporaries_do_not_grow_with_the_number_of_samples(dtype):
    """A flag per sample of one feature would be a quarter of the history.

    Flags of integers, all of them true, XLA would add up while compiling: for seconds.
    """
    x = jax.ShapeDtypeStruct((10**5, 100, 1), dtype)
    memory = compile_read(x, local=True).memory_analysis()
    assert memory.temp_size_in_bytes <= 2**16


def test_an_eager_call_is_compiled_once():
    """A loop called eagerly would be compiled anew by every call."""
    read([normals(15, 1e4)])
    cache: Any = batch_sums
    compiled = cache._cache_size()
    for seed in range(3):
        read([normals(seed, 1e4)])
    assert cache._cache_size() == compiled


@pytest.mark.parametrize("mean", [0.0, 1e4], ids=["once", "twice"])
def test_every_device_may_read_again_on_its_own(mean):
    mesh, sharded = Mesh(jax.devices()[:2], "d"), PartitionSpec(None, "d")
    x = np.concatenate([normals(16), normals(17, mean)], axis=1)

    def local(x):
        with double():
            s = batch_sums([x], 2, skip=True)
            sides = [v.astype(jnp.float32) for v in (s.shift[0], *s.sums[0])]
            return jnp.stack(sides)[None]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=sharded, out_specs=PartitionSpec("d")
    )
    got = jax.jit(run)(jnp.asarray(x))
    assert np.any(got[1, 0] != 0) == (mean != 0) and not np.any(got[0, 0])
    for shard, half in zip(got, np.split(x, 2, axis=1), strict=True):
        alone = read([half], skip=True)
        np.testing.assert_allclose(shard[0], alone.shift[0], rtol=1e-6)
