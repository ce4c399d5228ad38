# SPDX-License-Identifier: Apache-2.0
"""RunningMeanStd: known numbers, laws, and every kind of fault met elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from nnx_norm import NormalizerStatistics, RunningMeanStd

P = PartitionSpec


def record(stats: RunningMeanStd, x: Any) -> None:
    stats.record_moments(x)


HOW = {
    "eager": record,
    "jit": nnx.jit(record),
    "jit, graph=False": nnx.jit(record, graph=False),
}
how = pytest.mark.parametrize("fold", HOW.values(), ids=HOW)


def bits(stats: RunningMeanStd) -> list[bytes]:
    return [np.asarray(v).tobytes() for v in jax.tree.leaves(nnx.state(stats))]


def rows(*values: float, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.array(values, dtype)[:, None])


def test_ema_from_the_start():
    stats = RunningMeanStd(1, ema_decay=0.5)
    stats.record_moments(rows(2.0, 4.0))
    full = stats.to_numpy()
    assert (full.mean.item(), full.var.item(), full.count) == (1.5, 1.0, 1)


def test_ema_keeps_by_its_decay_per_update_in_whatever_order():
    a, b = (RunningMeanStd(1, ema_decay=0.9) for _ in range(2))
    a.record_moments(rows(9.0, 10.0, 11.0))
    b.record_moments(rows(11.0, 9.0, 10.0))
    assert a.to_numpy().mean.item() == pytest.approx(1.0, rel=1e-15)
    assert a.to_numpy() == b.to_numpy()


def test_switching_to_ema_on_resume_starts_from_what_was_loaded():
    before = RunningMeanStd(1, initial_count=0)
    before.record_moments(rows(4.0, 8.0))
    after = RunningMeanStd(1, ema_decay=0.75)
    nnx.update(after, nnx.state(before))
    after.record_moments(rows(0.0, 4.0))
    full = after.to_numpy()
    assert (full.mean.item(), full.var.item(), full.count) == (5.0, 4.0, 2)


def test_ema_takes_the_variance_of_a_batch_that_lies_far_off():
    stats = RunningMeanStd(1, ema_decay=0.5)
    stats.count.set_value(jnp.float32(1e7))
    x = np.random.default_rng(0).normal(1e4, 1e-2, (64, 1)).astype(np.float32)
    stats.record_moments(jnp.asarray(x))
    expected = 0.5 + 0.5 * x.astype(np.float64).var()
    assert abs(stats.to_numpy().var.item() - expected) < 1e-9


@how
@pytest.mark.parametrize("shape", [(3,), {"a": 3, "b": {"c": 2}}], ids=str)
def test_lazy_is_shaped_by_the_first_batch(fold: Callable[..., None], shape: Any):
    rng = np.random.default_rng(0)
    shapes = shape if isinstance(shape, dict) else {"": (3,)}
    x = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(3, 2, (5, *np.atleast_1d(s))), jnp.float32),
        shapes,
        is_leaf=lambda s: not isinstance(s, dict),
    )
    x = x if isinstance(shape, dict) else x[""]
    lazy, shaped = RunningMeanStd(), RunningMeanStd(shape)
    known = set(nnx.to_flat_state(nnx.state(shaped)).paths)
    assert set(nnx.to_flat_state(nnx.state(lazy)).paths) == known
    y = lazy.normalize(x)
    jax.tree.map(np.testing.assert_array_equal, y, shaped.normalize(x))
    assert lazy.mean.get_value() is None and lazy.var.get_value() is None
    for _ in range(2):
        fold(lazy, x)
        fold(shaped, x)
    assert bits(lazy) == bits(shaped) and lazy.shape == shaped.shape
    jax.tree.map(np.testing.assert_array_equal, lazy(x), shaped(x))


def test_lazy_un_normalizes_as_a_fresh_instance_and_ignores_an_empty_batch():
    lazy, x = RunningMeanStd(clamp_value=2.0), jnp.array([[1.0, -9.0]])
    lazy.record_moments(jnp.zeros((0, 5)))
    assert lazy.is_lazy
    fresh = RunningMeanStd(2, clamp_value=2.0)
    assert lazy.normalize(x, True).tolist() == fresh.normalize(x, True).tolist()


def test_jit_is_bit_for_bit_the_eager_call_and_compiles_once():
    traces = []

    @nnx.jit
    def fold(stats: RunningMeanStd, x: jax.Array) -> None:
        traces.append(1)
        stats.record_moments(x)

    rng = np.random.default_rng(0)
    a, b = RunningMeanStd(3), RunningMeanStd(3)
    for _ in range(5):
        x = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
        a.record_moments(x)
        fold(b, x)
    assert bits(a) == bits(b) and len(traces) == 1


def test_statistics_are_float32_strong_and_no_parameters():
    stats = RunningMeanStd(2)
    stats.record_moments(jnp.ones((3, 2)))
    for leaf in jax.tree.leaves(nnx.state(stats)):
        assert leaf.dtype == jnp.float32 and not leaf.weak_type
    assert not jax.tree.leaves(nnx.state(stats, nnx.Param))
    everything = jax.tree.leaves(nnx.state(stats))
    assert len(jax.tree.leaves(nnx.state(stats, NormalizerStatistics))) == len(
        everything
    )


def test_one_prior_sample_or_none():
    prior, empty = RunningMeanStd(1), RunningMeanStd(1, initial_count=0)
    for stats in (prior, empty):
        stats.record_moments(rows(100.0, 102.0))
    assert prior.to_numpy().mean.item() == pytest.approx(202 / 3, rel=1e-15)
    assert prior.to_numpy().var.item() == pytest.approx(2267.0 + 8 / 9, rel=1e-14)
    full = empty.to_numpy()
    assert (full.mean.item(), full.var.item(), full.count) == (101.0, 1.0, 2)


def test_single_sample_has_no_nan():
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(rows(5.0))
    assert stats.to_numpy().var.item() == 0 and stats(rows(5.0)).item() == 0


def test_large_offset_costs_no_digits():
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(rows(10000.0, 10001.0, 10002.0, 10003.0))
    assert (stats.to_numpy().mean.item(), stats.to_numpy().var.item()) == (
        10001.5,
        1.25,
    )
    stats = RunningMeanStd(1, initial_count=0)
    for _ in range(100):
        stats.record_moments(rows(1e6 - 1, 1e6 + 1))
    full = stats.to_numpy()
    assert (full.mean.item(), full.var.item(), full.count) == (1e6, 1.0, 200)


@pytest.mark.parametrize("constant", [14.62, np.log(1e-5), 12345.678, 1e6 + 0.1])
def test_constant_feature_is_normalized_to_zero(constant: float):
    stats = RunningMeanStd(1, initial_count=0)
    for _ in range(4):
        stats.record_moments(jnp.full((1000, 1), constant, jnp.float32))
    assert abs(stats(rows(constant)).item()) <= 1e-2


def test_dead_feature_that_moves_ends_at_the_clamp():
    stats = RunningMeanStd(1, initial_count=0, clamp_value=5.0)
    stats.record_moments(jnp.zeros((100, 1)))
    assert stats(rows(255.0)).item() == 5.0


def test_epsilon_is_added_to_the_variance():
    stats = RunningMeanStd(1, initial_count=0, epsilon=1e-4)
    stats.record_moments(rows(0.0, 0.0))
    assert stats(rows(1.0)).item() == pytest.approx(100.0, rel=1e-6)
    assert stats.normalize(rows(100.0), True).item() == pytest.approx(1.0, rel=1e-6)
    fresh = RunningMeanStd(1, epsilon=3.0)
    assert fresh(rows(1.0)).item() == 0.5


def test_un_normalize_inverts_inside_the_clamp_and_clamps_first():
    stats = RunningMeanStd(1, initial_count=0, clamp_value=2.0)
    stats.record_moments(rows(9.0, 11.0))
    x = rows(8.5, 10.0, 11.5)
    back = stats.normalize(stats.normalize(x), un_norm=True)
    np.testing.assert_allclose(back, x, rtol=1e-6)
    edge = 10 + 2 * np.sqrt(1 + 1e-5)
    assert stats.normalize(rows(50.0), True).item() == pytest.approx(edge, rel=1e-6)
    still = RunningMeanStd(1, initial_count=0)
    still.record_moments(rows(7.0, 7.0))
    np.testing.assert_allclose(still.normalize(still(x), True), x, rtol=1e-6)


def test_half_precision_is_accumulated_in_float32_or_better():
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(rows(-200.0, 200.0, dtype=np.float16))
    assert stats.to_numpy().var.item() == 40000.0
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(jnp.tile(rows(1.0, 1.0078125).astype(jnp.bfloat16), (10, 1)))
    assert stats.to_numpy().mean.item() == 1.00390625
    assert stats.to_numpy().var.item() == pytest.approx(3.0518e-4 / 20, rel=1e-4)
    assert stats(jnp.ones((2, 1), jnp.bfloat16)).dtype == jnp.bfloat16


def test_integers_neither_wrap_nor_stay_integers():
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(rows(10, 20, dtype=np.uint8))
    y = stats(rows(10, dtype=np.uint8))
    assert y.dtype == jnp.float32 and y.item() == pytest.approx(-1.0, rel=1e-6)
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(rows(0, 255, dtype=np.uint8))
    assert stats.to_numpy().var.item() == 16256.25
    stats = RunningMeanStd(1, initial_count=0)
    stats.record_moments(rows(2**30 + 1, 2**30 + 3, dtype=np.int32))
    assert stats.to_numpy().mean.item() == 2**30 + 2


def test_nan_enters_the_statistics_as_in_the_source():
    stats = RunningMeanStd(2)
    stats.record_moments(jnp.array([[1.0, np.nan], [3.0, 1.0]]))
    assert np.isnan(stats.to_numpy().mean).tolist() == [False, True]


@how
def test_count_goes_on_after_2_to_the_24(fold: Callable[..., None]):
    stats = RunningMeanStd(1)
    stats.count.set_value(jnp.float32(2**24))
    for _ in range(200):
        fold(stats, rows(1.0))
    assert stats.to_numpy().count == 2**24 + 200
    restored = RunningMeanStd(1)
    nnx.update(restored, nnx.state(stats))
    fold(restored, rows(1.0))
    assert restored.to_numpy().count == 2**24 + 201


def test_count_passes_2_to_the_31():
    stats = RunningMeanStd(1, initial_count=0)
    stats.update_from_moments(np.zeros(1), np.ones(1), 2**31 - 1)
    stats.record_moments(jnp.ones((64, 1)))
    assert stats.to_numpy().count == 2147483711
    assert stats.to_numpy().mean.item() == pytest.approx(64 / 2147483711, rel=1e-14)


@pytest.mark.parametrize("through", ["state", "update_from_moments"])
def test_a_shift_is_absorbed_after_10_billion_samples(through: str):
    stats = RunningMeanStd(1, initial_count=0)
    if through == "state":
        one = {"mean": jnp.ones(1), "var": jnp.ones(1), "count": jnp.float32(1e10)}
        nnx.update(stats, one)
    else:
        stats.update_from_moments(np.ones(1), np.ones(1), 10**10)
    fold, x = nnx.jit(record), jnp.full((4096, 1), 1.5)
    for _ in range(100):
        fold(stats, x)
    moved = 0.5 * 409600 / (1e10 + 409600)
    assert stats.to_numpy().mean.item() - 1 == pytest.approx(moved, rel=1e-6)


def test_resume_weighs_by_the_count():
    stats = RunningMeanStd(1, initial_count=0)
    stats.update_from_moments([5.0], [1.0], 10**6)
    stats.record_moments(rows(0.0))
    assert stats.to_numpy().mean.item() == pytest.approx(5 - 5 / 1000001, rel=1e-15)
    assert stats.to_numpy().count == 1000001


def test_update_from_moments_keeps_every_digit_of_float64():
    rng = np.random.default_rng(0)
    mean, var = rng.normal(size=3), rng.random(3)
    stats = RunningMeanStd(initial_count=0)
    stats.update_from_moments(mean, var, 1)
    assert stats.to_numpy().mean.tolist() == mean.tolist()
    assert stats.to_numpy().var.tolist() == var.tolist()


def test_update_from_moments_in_jit_and_without_samples():
    stats = RunningMeanStd(2)
    nnx.jit(lambda s, m, v, n: s.update_from_moments(m, v, n))(
        stats, jnp.array([1.0, 2.0]), jnp.ones(2), jnp.int32(3)
    )
    assert stats.to_numpy().mean.tolist() == [0.75, 1.5]
    before = bits(stats)
    stats.update_from_moments(np.full(2, 9.0), np.ones(2), 0)
    assert bits(stats) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.record_moments(jnp.ones((4, 3))), r"x has shape \(4, 3\)"),
        (lambda s: s.record_moments(jnp.ones((5, 4, 2))), r"reshape\(-1"),
        (lambda s: s.record_moments(jnp.ones(2)), "no leading axis"),
        (lambda s: s.normalize(jnp.ones((4, 3))), r"x has shape \(4, 3\)"),
        (lambda s: s.record_moments({"a": jnp.ones((4, 2))}), "a"),
        (lambda s: s.update_from_moments(np.ones(3), np.ones(3), 1), r"mean.*\(3,\)"),
        (lambda s: s.update_from_moments(np.ones(2), -np.ones(2), 1), "var"),
        (lambda s: s.update_from_moments(np.ones(2), np.ones(2), -1), "count"),
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(call: Any, message: str):
    stats = RunningMeanStd(2)
    stats.record_moments(jnp.array([[1.0, 2.0], [3.0, 5.0]]))
    before = bits(stats)
    with pytest.raises((ValueError, TypeError), match=message):
        call(stats)
    assert bits(stats) == before


@pytest.mark.parametrize(
    "setting",
    [
        {"epsilon": -1e-5},
        {"clamp_value": -1.0},
        {"ema_decay": 1.5},
        {"ema_decay": -0.1},
        {"initial_count": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(setting: dict):
    with pytest.raises(ValueError, match=next(iter(setting))):
        RunningMeanStd(2, **setting)


def test_settings_are_readable_under_their_names():
    given: dict[str, Any] = {
        "epsilon": 1e-3,
        "clamp_value": 5.0,
        "ema_decay": 0.9,
        "axis_name": "i",
        "initial_count": 2,
    }
    stats = RunningMeanStd(3, **given)
    assert {name: getattr(stats, name) for name in given} == given
    assert stats.shape == (3,)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_devices_are_combined_with_one_collective(decay: float | None):
    assert jax.device_count() > 1
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (8, 4, 3)), jnp.float32)
    whole = RunningMeanStd(3, ema_decay=decay)
    shared = RunningMeanStd(3, ema_decay=decay, axis_name="d")
    graphdef, state = nnx.split(shared)

    def fold(state: Any, x: jax.Array) -> Any:
        stats = nnx.merge(graphdef, state)
        stats.record_moments(x.reshape(-1, 3))
        return nnx.state(stats)

    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    mapped = jax.shard_map(fold, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    for _ in range(2):
        state = jax.jit(mapped)(state, x)
        whole.record_moments(x.reshape(-1, 3))
    nnx.update(shared, state)
    assert str(jax.make_jaxpr(mapped)(state, x)).count("psum") == 1
    for ours, theirs in zip(shared.to_numpy(), whole.to_numpy(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_devices_that_differ_and_an_empty_one():
    stats = RunningMeanStd(1, initial_count=0, axis_name="d")
    fold = nnx.vmap(record, in_axes=(None, 0), out_axes=None, axis_name="d")
    fold(stats, jnp.array([[0.0, 0.0], [2.0, 2.0]])[..., None])
    full = stats.to_numpy()
    assert (full.mean.item(), full.var.item(), full.count) == (1.0, 1.0, 4)
    before = bits(stats)
    fold(stats, jnp.zeros((2, 0, 1)))
    assert bits(stats) == before


def test_axis_that_is_not_bound_is_named_and_the_forward_needs_none():
    stats = RunningMeanStd(1, axis_name="nope")
    assert stats(rows(1.0)).shape == (1, 1)
    with pytest.raises(ValueError, match="nope"):
        stats.record_moments(rows(1.0))


def test_layer_of_a_sequential_whose_overrides_hold():
    class Doubled(RunningMeanStd):
        def normalize(self, x: Any, un_norm: bool = False) -> Any:
            return 2 * super().normalize(x, un_norm)

    model = nnx.Sequential(Doubled(3, epsilon=0.0), nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    x = jnp.ones((4, 3), jnp.float32)
    np.testing.assert_allclose(model(x), model.layers[1](2 * x), rtol=1e-6)


def test_tree_of_shapes_in_mappings_of_any_kind():
    stats = RunningMeanStd({"b": 1, "a": (2,)}, initial_count=0)
    stats.record_moments(nnx.State({"a": jnp.ones((3, 2)), "b": jnp.zeros((3, 1))}))
    assert stats.to_numpy().mean["a"].tolist() == [1.0, 1.0]
    pair = RunningMeanStd((jnp.zeros(2), jnp.zeros(())))
    y = pair((jnp.ones((5, 2)), jnp.ones(5)))
    assert [v.shape for v in y] == [(5, 2), (5,)]


def test_to_moves_and_returns_the_module():
    stats, device = RunningMeanStd(3), jax.devices()[1]
    assert stats.to(device) is stats
    assert {leaf.device for leaf in jax.tree.leaves(nnx.state(stats))} == {device}
    lazy = RunningMeanStd().to(device)
    assert lazy.is_lazy and lazy.count.get_value().device == device


def test_forward_runs_anywhere_and_writes_nothing():
    stats, x = RunningMeanStd(1, initial_count=0), jnp.arange(6.0).reshape(3, 2, 1)
    stats.record_moments(rows(0.0, 2.0))
    before, plain = bits(stats), stats(x)
    scanned = jax.lax.scan(lambda c, v: (c, stats(v)), 0, x)[1]
    mapped = nnx.vmap(lambda s, v: s(v), in_axes=(None, 0))(stats, x)
    for y in (scanned, mapped, nnx.jit(lambda s, v: s(v))(stats, x)):
        np.testing.assert_allclose(y, plain, rtol=1e-6)
    assert nnx.eval_shape(lambda s: s(x), stats).shape == (3, 2, 1)
    assert bits(stats) == before


def test_gradients_stop_at_the_statistics():
    stats, x = RunningMeanStd(1, initial_count=0, epsilon=0.0), rows(1.0, 3.0)
    stats.record_moments(rows(0.0, 4.0))
    assert jax.grad(lambda v: stats(v).sum())(x).tolist() == [[0.5], [0.5]]
    grads = jax.grad(lambda s: nnx.merge(nnx.graphdef(stats), s)(x).sum())(
        nnx.state(stats)
    )
    assert all(not np.any(g) for g in jax.tree.leaves(grads))

    @partial(nnx.grad, argnums=1)
    def loss(stats: RunningMeanStd, w: jax.Array) -> jax.Array:
        stats.record_moments(x * w)
        return stats(x * w).sum()

    assert np.isfinite(loss(RunningMeanStd(1), jnp.float32(2.0)))


def test_module_as_a_scan_carry():
    stats = RunningMeanStd(1)

    def step(stats: RunningMeanStd, x: jax.Array) -> tuple[RunningMeanStd, None]:
        stats.record_moments(x)
        return stats, None

    x = jnp.tile(rows(0.0, 2.0), (3, 1, 1))
    carried, _ = jax.lax.scan(step, stats, x)
    for batch in x:
        stats.record_moments(batch)
    assert bits(carried) == bits(stats)


def test_a_population_has_statistics_of_its_own():
    @nnx.vmap
    def make(_: jax.Array) -> RunningMeanStd:
        return RunningMeanStd(1, initial_count=0)

    members = make(jnp.arange(3))
    nnx.vmap(record)(
        members, jnp.array([[0.0, 2.0], [4.0, 4.0], [1.0, 1.0]])[..., None]
    )
    full = members.to_numpy()
    assert full.mean.ravel().tolist() == [1.0, 4.0, 1.0]
    assert full.var.ravel().tolist() == [1.0, 0.0, 0.0]
    assert full.count.tolist() == [2, 2, 2]
