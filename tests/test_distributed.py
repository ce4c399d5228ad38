# SPDX-License-Identifier: Apache-2.0
"""Laws over devices: any sharding gives the whole, alike on all, in one collective."""

import math
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from nnx_norm.distributed import all_reduce, gather
from nnx_norm.extended import double, join
from nnx_norm.fold import Rule, Statistics, fold_inputs
from nnx_norm.moments import Moments, from_batch, merge

Local = Callable[[Any, Any], Any]  # of a device's part of `[T, B, F]`, and a state
Run = Callable[..., Any]  # of the whole; leaves of the result are `[devices, ...]`

T, B, F = 3, 8, 2
DEVICES = 8
COLLECTIVES = re.compile(
    r"= .*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)


GATHERED = re.compile(r"\w+\[([\d,]*)\]\S* all-gather\(")


def collectives(function: Any, *args: Any) -> tuple[list[str], Any]:
    """The collectives of a program, and what it returns."""
    compiled = jax.jit(function).lower(*args).compile()
    return COLLECTIVES.findall(str(compiled.as_text())), compiled(*args)


def history(seed: int, mean: Any = 0.0) -> np.ndarray:
    """`[T, B, F]`, a mean of its own for every environment and so for every device."""
    x = np.random.default_rng(seed).normal(0, 1, (T, B, F))
    return (x + np.reshape(mean, (-1, 1))).astype(np.float32)


def exact(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    return rows.mean(0), rows.var(0) * len(rows), len(rows)


def check(m: Moments, x: np.ndarray, tolerance: float = 1e-6) -> None:
    """Every device (leading axis) has the moments of the whole, bit for bit alike."""
    mean, M2, count = exact(x)
    refuse_different(m)
    assert np.all(m.count == count)
    spread = np.sqrt(M2 / count)
    rounded = 8 * 2.0**-24 * np.abs(mean)  # each device's mean is a float32
    assert np.all(np.abs(m.mean - mean) <= tolerance * spread + rounded)
    error = tolerance * M2 + count * rounded * (spread + rounded)
    assert np.all(np.abs(m.M2 - M2) <= error)


def refuse_different(tree: Any) -> None:
    """Fails unless all devices (leading axis) hold the same bits."""
    for v in jax.tree.leaves(tree):
        rows = bits(v).reshape(len(v), -1)
        assert np.all(rows == rows[:1])


def bits(v: Any) -> np.ndarray:
    return np.frombuffer(np.asarray(v).tobytes(), np.uint8)


def stacked(m: Any) -> Any:
    return jax.tree.map(lambda v: v[None], m)


def by_device(x: Any) -> Any:
    return jnp.stack(jnp.split(jnp.asarray(x), DEVICES, axis=1))


def shard_mapped(local: Local) -> Run:
    """What every device holds, known to be alike by the check of `shard_map`."""
    mesh, shards = Mesh(jax.devices(), "d"), PartitionSpec(None, "d")
    compiled = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(shards, PartitionSpec()),
            out_specs=PartitionSpec(),
        )
    )

    def held(v: jax.Array) -> np.ndarray:
        assert v.is_fully_replicated and len(v.addressable_shards) == DEVICES
        return np.stack([shard.data for shard in v.addressable_shards])

    return lambda x, state=None: jax.tree.map(held, compiled(jnp.asarray(x), state))


def pmapped(local: Local) -> Run:
    compiled = jax.pmap(local, axis_name="d", in_axes=(0, None))
    return lambda x, state=None: jax.tree.map(np.asarray, compiled(by_device(x), state))


def vmapped(local: Local) -> Run:
    compiled = jax.jit(jax.vmap(local, axis_name="d", in_axes=(0, None)))
    return lambda x, state=None: jax.tree.map(np.asarray, compiled(by_device(x), state))


mapped = pytest.mark.parametrize("over_devices", [vmapped, shard_mapped, pmapped])


MEANS = {
    "alike": 0.0,
    "far": 1e4,
    "apart": np.repeat([-1e3, 0, 5, 1e3], 2),
    "ladder": np.arange(8.0),
}


def test_there_are_eight_devices():
    assert jax.device_count() == DEVICES


def lift_and_reduce(x: jax.Array, _: Any) -> Moments:
    return all_reduce(from_batch(x, (0, 1)), "d")


@mapped
def test_any_device_has_the_moments_of_the_whole(over_devices):
    run = over_devices(lift_and_reduce)
    for mean in MEANS.values():
        x = history(0, mean)
        check(run(x), x)
    constant = np.full((T, B, F), 1e6 + 0.1, np.float32)
    m = run(constant)
    assert np.all(m.mean == constant[0, 0]) and np.all(m.M2 == 0)


def test_averaging_over_devices_loses_what_is_between_them():
    x = history(0, MEANS["apart"])  # teeth for the law above
    local = np.var(np.split(x, DEVICES, axis=1), axis=(1, 2)).mean(0)
    assert np.all(local < 0.1 * np.var(x, axis=(0, 1)))


@hypothesis.given(st.integers(0, 2**32 - 1), st.permutations(range(T * B)))
def test_it_does_not_matter_which_device_has_which_sample(seed, order):
    x = history(seed, MEANS["ladder"])
    check(reduce_shuffled(x.reshape(-1, F)[order].reshape(x.shape)), x)


reduce_shuffled = vmapped(lift_and_reduce)


@hypothesis.given(
    st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B)
)
def test_devices_without_samples_have_no_influence(mask):
    x, mask = np.abs(history(1, MEANS["apart"])), np.asarray(mask).T
    hypothesis.assume(mask.any())
    hidden = np.where(mask[..., None], x, np.float32(np.nan))
    check(reduce_positive(hidden), x[mask])  # NaN is not positive


@vmapped
def reduce_positive(x: jax.Array, _: Any) -> Moments:
    return all_reduce(from_batch(x, (0, 1), mask=x[..., 0] > 0), "d")


@mapped
def test_no_sample_anywhere_is_no_sample(over_devices):
    def local(x: jax.Array, _: Any) -> Moments:
        return all_reduce(from_batch(x, (0, 1), mask=x[..., 0] > 1e9), "d")

    m = over_devices(local)(history(2))
    assert not any(np.any(v) for v in jax.tree.leaves(m))


def test_counts_are_exact_in_double_precision():
    with double():
        count = jnp.asarray([2.0**40 + i for i in range(DEVICES)], jnp.float64)
        many = Moments(jnp.zeros(DEVICES), jnp.zeros(DEVICES), count)
        total = jax.vmap(lambda m: all_reduce(m, "d"), axis_name="d")(many).count
        assert total.tolist() == [8 * 2**40 + 28] * DEVICES


AXES = [("a", "b"), ["b", "a"], ("a",), "b"]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("kind", ["shard_map", "vmap"])
def test_several_axes_are_reduced_together_or_apart(axes, kind):
    x = history(3, MEANS["ladder"])
    grid = jnp.stack(jnp.split(jnp.asarray(x), 4, axis=1))
    grid = jnp.stack(jnp.split(grid, 2, axis=2))  # [a=2, b=4, T, 1, F]

    def local(x: jax.Array) -> Moments:
        return all_reduce(from_batch(x, (0, 1)), axes)

    if kind == "vmap":
        m = jax.jit(jax.vmap(jax.vmap(local, axis_name="b"), axis_name="a"))(grid)
    else:
        mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("a", "b"))
        mapped = jax.shard_map(
            lambda x: stacked(stacked(local(x[0, 0]))),
            mesh=mesh,
            in_specs=PartitionSpec("a", "b"),
            out_specs=PartitionSpec("a", "b"),
        )
        m = jax.jit(mapped)(grid)
    m, grid = jax.tree.map(np.asarray, (m, grid))
    for i in range(2):
        for j in range(4):
            own = {"a": slice(None), "b": slice(None)}
            own |= {} if "a" in axes else {"a": slice(i, i + 1)}
            own |= {} if "b" in axes else {"b": slice(j, j + 1)}
            whole = grid[own["a"], own["b"]]
            check(stacked(jax.tree.map(lambda v, i=i, j=j: v[i, j], m)), whole)


def test_two_axes_leave_a_checked_result_replicated():
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("a", "b"))
    x = history(4)

    def local(x: jax.Array) -> Moments:
        return all_reduce(from_batch(x, (0, 1)), ("a", "b"))

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=PartitionSpec(None, ("a", "b")),
        out_specs=PartitionSpec(),
    )
    m = jax.jit(mapped)(jnp.asarray(x))
    check(jax.tree.map(lambda v: np.asarray(v)[None], m), x)


def test_without_an_axis_nothing_is_done():
    m = from_batch(jnp.asarray(history(5)), (0, 1))
    assert all_reduce(m, None) is m


@pytest.mark.parametrize("axis", ["nope", ("d", "nope"), ["nope", "d"]], ids=str)
@pytest.mark.parametrize("function", [all_reduce, gather])
def test_an_axis_that_is_not_bound_is_named(axis, function):
    m = from_batch(jnp.zeros((2, F)))
    for call in (
        lambda: function(m, axis),
        lambda: jax.jit(lambda m: function(m, axis))(m),
        lambda: jax.vmap(lambda _: function(m, axis), axis_name="d")(jnp.zeros(2)),
    ):
        with pytest.raises(
            ValueError, match=r"axis_name 'nope' is not bound|'d' is not"
        ):
            call()
    with pytest.raises(ValueError, match="'nope' is not bound here: call this inside"):
        function(m, "nope")


def many_leaves(x: jax.Array) -> dict[str, jax.Array]:
    return {f"leaf{i:02}": x * (i + 1) + i for i in range(20)}


@pytest.mark.parametrize("axis", ["d", ("a", "b")], ids=str)
def test_a_tree_of_twenty_leaves_takes_one_collective(axis):
    shape, names = ((8,), ("d",)) if axis == "d" else ((2, 4), ("a", "b"))
    mesh = Mesh(np.reshape(jax.devices(), shape), names)
    shards = PartitionSpec(None, names)

    def local(x: jax.Array) -> Moments:
        return all_reduce(from_batch(many_leaves(x), (0, 1)), axis)

    function = jax.shard_map(
        local, mesh=mesh, in_specs=shards, out_specs=PartitionSpec()
    )
    x = jnp.asarray(history(6))
    names, m = collectives(function, x)
    assert names == ["all-reduce"]
    for i, leaf in enumerate(jax.tree.leaves(m.mean)):
        np.testing.assert_allclose(leaf, exact(history(6) * (i + 1) + i)[0], atol=1e-4)


def test_under_pmap_it_is_one_too():
    def local(x: jax.Array) -> Moments:
        return all_reduce(from_batch(many_leaves(x), (0, 1)), "d")

    lowered: Any = jax.pmap(local, axis_name="d").lower(by_device(history(6)))
    assert COLLECTIVES.findall(lowered.compile().as_text()) == ["all-reduce"]


# Gather.


@mapped
def test_gather_gives_all_to_all_bit_for_bit(over_devices):
    special = [np.nan, np.inf, -np.inf, 3e38, 1e-30, 0.1, 2.0**24 + 2, -1.0]
    x = np.tile(np.asarray(special, np.float32)[None, :, None], (1, 1, F))

    def local(x: jax.Array, _: Any) -> Any:
        n = jnp.full((2,), jax.lax.axis_index("d"), jnp.int32) + 2**30
        return gather({"x": x[0, 0], "n": n, "flag": x[0, 0, 0] > 0}, "d")

    out = over_devices(local)(x)
    assert out["n"].dtype == np.int32 and out["flag"].dtype == np.bool_
    for device in range(DEVICES):
        assert np.array_equal(bits(out["x"][device]), bits(x[0]))
        assert out["n"][device].tolist() == [[2**30 + i] * 2 for i in range(DEVICES)]
        assert np.array_equal(out["flag"][device], np.asarray(special) > 0)


def test_gather_orders_devices_as_their_axes_say():
    index = jnp.arange(8).reshape(2, 4)
    for axes, right in ((("a", "b"), index), (("b", "a"), index.T)):
        both = jax.vmap(
            jax.vmap(lambda i, axes=axes: gather(i, axes), axis_name="b"), axis_name="a"
        )(index)
        assert both[1, 2].tolist() == right.ravel().tolist()


def test_gather_of_nothing_is_nothing():
    assert jax.vmap(lambda x: gather({"a": None}, "d"), axis_name="d")(
        jnp.zeros(2)
    ) == {"a": None}


# The step of a running statistic.


def empty() -> tuple[Statistics, Statistics]:
    zeros, zero = [jnp.zeros(F, jnp.float32)], jnp.zeros((), jnp.float32)
    value = Statistics(zeros, zeros, zero, zero)
    return value, value


def numbers(state: Any) -> Statistics:
    with double():
        return jax.tree.map(lambda v, r: np.asarray(join(v, r)), *state)


def first_device(state: Any) -> Any:
    """The state of one device, once all are known to hold the same bits."""
    refuse_different(state)
    return jax.tree.map(lambda v: jnp.asarray(v[0]), state)


def fold(rule: Rule) -> Local:
    """The step of a running statistic, of samples whose first feature isn't -9."""

    def local(x: jax.Array, state: Any) -> Any:
        mask, (value, residual) = x[..., 0] != -9, state
        return fold_inputs(value, residual, [x], mask, None, lead=2, rule=rule)

    return local


@pytest.mark.parametrize(
    ("over_devices", "wide"),
    [(vmapped, False), (shard_mapped, False), (shard_mapped, True), (pmapped, False)],
)
def test_five_rounds_over_devices_are_those_of_one_device(over_devices, wide):
    shared, alone = empty(), empty()
    with jax.enable_x64(wide):
        run, one_device = over_devices(fold(Rule(axis_name="d"))), fold(Rule())
        for round_, mean in enumerate([0.0, 1e4, MEANS["apart"], 1e4, 1e4]):
            x = history(round_, mean)
            x[0, 3, 0] = x[1, 3, 1] = x[2, 7, 0] = np.nan  # on two devices
            shared = first_device(run(x, shared))
            alone = one_device(jnp.asarray(x), alone)
            assert numbers(shared).counter == (round_ + 1) * (T * B - 3)
    many, one = numbers(shared), numbers(alone)
    assert one.counter == many.counter and one.skipped == many.skipped == 5 * 3
    variance = one.M2[0] / one.counter
    assert np.all(np.abs(many.mean[0] - one.mean[0]) <= 1e-7 * np.sqrt(variance))
    assert np.all(np.abs(many.M2[0] - one.M2[0]) <= 5e-7 * one.M2[0])


def test_a_fold_over_devices_takes_one_collective():
    mesh, shards = Mesh(jax.devices(), "d"), PartitionSpec(None, "d")
    zeros, zero = [jnp.zeros(F, jnp.float32)] * 5, jnp.zeros((), jnp.float32)
    state = Statistics(zeros, zeros, zero, zero)

    def local(x: jax.Array, mask: jax.Array, value: Any, residual: Any) -> Any:
        leaves = jax.tree.leaves(many_leaves(x))[:5]
        return fold_inputs(
            value, residual, leaves, mask, None, lead=2, rule=Rule(axis_name="d")
        )

    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(shards, shards, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    x, mask = jnp.asarray(history(7)), jnp.ones((T, B), bool)
    names, after = collectives(function, x, mask, state, state)
    assert names == ["all-reduce"] and numbers(after).counter == T * B


@mapped
def test_devices_decide_together(over_devices):
    run = over_devices(fold(Rule(axis_name="d", decay=0.5)))
    start = fold(Rule())(jnp.zeros((T, B, F), jnp.float32), empty())

    # No valid sample on any device: not a bit changes.
    nothing = first_device(run(np.full((T, B, F), -9, np.float32), start))
    for a, b in zip(jax.tree.leaves(nothing), jax.tree.leaves(start), strict=True):
        assert np.array_equal(bits(a), bits(b))

    # One valid sample on one device: all of them forget, once.
    x = np.full((T, B, F), -9, np.float32)
    x[0, 5] = 2
    after, n = numbers(first_device(run(x, start))), T * B / 2 + 1
    assert after.counter == n
    assert after.mean[0] == pytest.approx([2 / n] * F, rel=1e-12)
    M2 = (n - 1) * (2 / n) ** 2 + (2 - 2 / n) ** 2
    assert after.M2[0] == pytest.approx([M2] * F, rel=1e-12)

    # An update that overflows on one device is refused on all.
    x = history(10)
    x[:, 6] *= 1e25
    after = numbers(first_device(run(x, start)))
    assert (after.counter, after.skipped) == (T * B, T * B)


@pytest.mark.parametrize("spec", [(None, "d"), ("d",)], ids=["B", "T"])
def test_a_sharded_history_under_plain_jit_gives_the_same(spec):
    mesh = Mesh(jax.devices(), "d")
    x = np.concatenate([history(i, 1e4) for i in range(8)])[:8]
    sharded = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(*spec)))

    def plain(x: jax.Array, state: Any) -> Any:
        value, residual = state
        return fold_inputs(value, residual, [x], None, None, lead=2, rule=Rule())

    compiled = jax.jit(plain).lower(sharded, empty()).compile()
    for shape in GATHERED.findall(
        str(compiled.as_text())
    ):  # a sum of each device at most
        assert math.prod(map(int, shape.split(","))) <= DEVICES * F
    many = compiled(sharded, empty())
    one = plain(jnp.asarray(x), empty())
    one, many = numbers(plain(jnp.asarray(x), one)), numbers(plain(sharded, many))
    assert many.counter == one.counter == 2 * x[..., 0].size
    variance = one.M2[0] / one.counter
    assert np.all(np.abs(many.mean[0] - one.mean[0]) <= 1e-7 * np.sqrt(variance))
    assert np.all(np.abs(many.M2[0] - one.M2[0]) <= 5e-7 * one.M2[0])


# One device or many.

SIZES = {shard_mapped: (1, 2, 4, 8), pmapped: (2, 4), vmapped: (2, 4)}
WAYS = [(way, n) for way, sizes in SIZES.items() for n in sizes]
WAYS += [("plain jit", n) for n in (2, 4, 8)]


def fold_over(way: Any, devices: int) -> Run:
    """The step over so many devices; leaves of the result are `[ranks, ...]`."""
    mesh, shards = Mesh(jax.devices()[:devices], "d"), PartitionSpec(None, "d")
    rule = Rule(axis_name=None if way == "plain jit" else "d")

    def local(x: jax.Array, state: Any) -> Any:
        value, residual = state
        return fold_inputs(value, residual, [x], None, None, lead=2, rule=rule)

    def ranks(v: jax.Array) -> np.ndarray:
        assert v.is_fully_replicated and len(v.addressable_shards) == devices
        return np.stack([shard.data for shard in v.addressable_shards])

    if way in (vmapped, pmapped):
        transform = jax.pmap if way is pmapped else jax.vmap
        run = transform(local, axis_name="d", in_axes=(0, None))

        def stacked(x: jax.Array, state: Any) -> Any:
            parts = jnp.stack(jnp.split(x, devices, axis=1))
            return jax.tree.map(np.asarray, run(parts, state))

        return stacked
    specs = {"in_specs": (shards, PartitionSpec()), "out_specs": PartitionSpec()}
    mapped = local
    if way is shard_mapped:
        mapped = jax.shard_map(local, mesh=mesh, **specs)
    compiled = jax.jit(mapped)
    split = jax.NamedSharding(mesh, shards)
    return lambda x, state: jax.tree.map(
        ranks, compiled(jax.device_put(x, split), state)
    )


@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_any_number_of_devices_holds_the_statistics_of_one(way, devices):
    run = fold_over(way, devices)
    for offset in (0.0, 1e4, 1e6):
        many, rows = empty(), np.zeros((0, F))
        for seed in range(2):
            x = history(seed, offset + np.arange(B))
            many = first_device(run(jnp.asarray(x), many))
            rows = np.concatenate([rows, x.reshape(-1, F)])
            mean, M2, count = exact(rows)
            held = numbers(many)
            assert held.counter == count
            assert np.all(np.abs(held.mean[0] - mean) <= 1e-7 * np.sqrt(M2 / count))
            assert np.all(np.abs(held.M2[0] - M2) <= 5e-7 * M2)


SPLITS = [(None, "d"), ("d",), ("t", "d"), (None, "t", "d")]


def sharded_update(
    split: tuple[Any, ...], features: int, kind: AxisType = AxisType.Auto
) -> str:
    """The program of an update on a tree with such a history."""
    shape, names = ((2, 4), ("t", "d")) if "t" in split else ((8,), ("d",))
    kinds = (kind,) * len(names)
    mesh = Mesh(np.reshape(jax.devices(), shape), names, axis_types=kinds)

    def on_mesh(shape: tuple[int, ...], *spec: Any) -> Any:
        sharding = jax.NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    leaves = [on_mesh((features,), *split[2:])] * 3
    state = Statistics(leaves, leaves, on_mesh(()), on_mesh(()))
    history = [on_mesh((8, 8, features), *split)] * 3

    def update(value: Any, residual: Any, history: Any) -> Any:
        return fold_inputs(value, residual, history, None, None, lead=2, rule=Rule())

    compiled = jax.jit(update).lower(state, state, history).compile()
    return str(compiled.as_text())


@pytest.mark.parametrize(
    ("split", "kind"),
    [*((s, AxisType.Auto) for s in SPLITS), (SPLITS[-1], AxisType.Explicit)],
    ids=str,
)
def test_no_history_is_gathered_under_plain_jit(split, kind):
    program = sharded_update(split, 64, kind)
    assert "all-reduce" in COLLECTIVES.findall(program)
    # Where features are split too, each device's flags; nothing else, not even sums.
    flags = re.findall(r"= (\w+\[\d+\])\S* all-gather", program)
    assert set(flags) == ({"s32[4]", "pred[4]"} if len(split) == 3 else set())
    assert len(flags) == len(GATHERED.findall(program))


def test_no_sums_are_gathered_on_accelerators(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # as it is read there
    for split in ((None, "d"), (None, "t", "d")):
        program = sharded_update(split, 72)  # a shape not traced for CPU
        assert "all-reduce" in COLLECTIVES.findall(program)
        shapes = [tuple(map(int, v.split(","))) for v in GATHERED.findall(program)]
        assert max(map(math.prod, shapes), default=0) <= DEVICES


def test_merging_what_devices_reduced_equals_reducing_what_they_merged():
    x, y = history(12, 3.0), history(13, MEANS["apart"])

    def local(x: jax.Array, y: jax.Array) -> Any:
        a, b = from_batch(x, (0, 1)), from_batch(y, (0, 1))
        return merge(all_reduce(a, "d"), all_reduce(b, "d")), all_reduce(
            merge(a, b), "d"
        )

    both = jax.vmap(local, axis_name="d")(by_device(x), by_device(y))
    for m in jax.tree.map(np.asarray, both):
        check(m, np.concatenate([x, y], axis=1), 4e-6)
