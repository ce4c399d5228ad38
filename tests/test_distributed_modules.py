# SPDX-License-Identifier: Apache-2.0
"""Whole modules over devices, by the transforms of NNX: one device's statistics."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from support import bits

from nnx_norm import (
    Normalizer,
    NormalizerStatistics,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    RunningReturn,
)

P = PartitionSpec
T, B, DEVICES = 3, 8, 4
SPLIT = P(None, "d")

Module = Any
Call = Callable[..., None]
MODULES: dict[str, tuple[Callable[..., Module], Call]] = {
    "Normalizer": (
        lambda envs, axis: Normalizer((), axis_name=axis),
        lambda m, x, mask: m.update_statistics(x, mask=mask),
    ),
    "RewardNormalizer": (
        lambda envs, axis: RewardNormalizer(0.5, num_envs=envs, axis_name=axis),
        lambda m, x, mask: m.update(x, x > 1e3, mask=mask),
    ),
    "RunningMeanStd": (
        lambda envs, axis: RunningMeanStd((), axis_name=axis),
        lambda m, x, mask: m.record_moments(x.reshape(-1)),
    ),
    "RewardRunningMeanStd": (
        lambda envs, axis: RewardRunningMeanStd(
            gamma=0.5, num_envs=envs, axis_name=axis
        ),
        lambda m, x, mask: m.record_reward(x[0], x[0] > 1e3),
    ),
}
each_module = pytest.mark.parametrize("name", MODULES)


def over(transform: Any, call: Call, devices: int = DEVICES, axes: Any = "d") -> Call:
    """`call` over devices, for a module and arrays `[T, B]`, compiled once."""
    if transform is nnx.shard_map:
        shape, names = ((devices,), "d") if axes == "d" else ((2, devices // 2), axes)
        mesh = Mesh(np.reshape(jax.devices()[:devices], shape), tuple(names))
        split = P(None, tuple(names))
        state: Any = nnx.StateSharding({RunningReturn: P(split[1]), ...: P()})
        specs = {"in_specs": (state, split, split), "out_specs": P()}
        return nnx.jit(nnx.shard_map(call, mesh=mesh, **specs))
    mapped = transform(call, axis_name="d")

    def run(module: Module, *data: Any) -> None:
        mapped(module, *(jnp.stack(jnp.split(v, devices, axis=1)) for v in data))

    return run


def made(name: str, transform: Any, devices: int = DEVICES, axis: Any = "d") -> Module:
    """The module whose update goes over devices; stacked but for `shard_map`."""
    make, _ = MODULES[name]
    if transform is nnx.shard_map:
        return make(B, axis)
    return nnx.vmap(lambda _: make(B // devices, axis))(jnp.arange(devices))


def whole(module: Module, like: Module) -> Module:
    """One module of what devices hold, once they are known to hold the same bits."""

    def held(leaf: jax.Array) -> np.ndarray:
        if leaf.is_fully_replicated and len(leaf.devices()) > 1:
            return np.stack([shard.data for shard in leaf.addressable_shards])
        return np.asarray(leaf)

    def same(leaf: jax.Array) -> jax.Array:
        ranks = held(leaf)
        assert len(ranks) > 1 and {rank.tobytes() for rank in ranks} == {
            ranks[0].tobytes()
        }
        return jnp.asarray(ranks[0])

    statistics = jax.tree.map(same, nnx.state(module, NormalizerStatistics))
    returns = jax.tree.map(
        lambda v: jnp.asarray(np.asarray(v).reshape(-1)),
        nnx.state(module, RunningReturn),
    )
    nnx.update(like, statistics)
    nnx.update(like, returns)
    return like


def data(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = 1e3 + rng.normal(size=(T, B)) + 10 * np.arange(B)
    return jnp.asarray(x, jnp.float32), jnp.asarray(rng.random((T, B)) < 0.8)


@each_module
@pytest.mark.parametrize("transform", [nnx.shard_map, nnx.pmap])
def test_updates_over_devices_are_those_of_one(name, transform):
    make, call = MODULES[name]
    module, one = made(name, transform), make(B, None)
    run = over(transform, call)
    for seed in range(2):
        run(module, *data(seed))
        call(one, *data(seed))
    many = whole(module, make(B, None))
    x, _ = data(9)
    np.testing.assert_allclose(many.normalize(x), one.normalize(x), rtol=2e-6)
    alike(many, one)
    pairs = (jax.tree.leaves(nnx.state(m, RunningReturn)) for m in (many, one))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_array_equal(a, b)


def alike(many: Module, one: Module) -> None:
    """Statistics in full precision, within the bounds of one device's."""

    def known(module: Module) -> tuple[Any, Any, Any]:
        if isinstance(module, (RunningMeanStd, RewardRunningMeanStd)):
            return module.to_numpy()
        d = module.to_dict()
        return d["mean"], d["variance"], (d["count"], d["skipped"])

    (mean, var, count), right = known(many), known(one)
    assert count == right[2]
    assert abs(mean - right[0]) <= 1e-7 * np.sqrt(right[1])
    assert var == pytest.approx(right[1], rel=5e-7)


@each_module
def test_an_axis_that_is_not_bound_is_named_and_nothing_changes(name):
    make, call = MODULES[name]
    module = make(B, ("devices", "hosts"))
    before = bits(module)
    for attempt in (call, nnx.jit(call)):
        with pytest.raises(ValueError, match="axis_name 'devices' is not bound here"):
            attempt(module, *data(0))
    assert bits(module) == before
    assert module.normalize(jnp.ones(3)).shape == (3,)  # which needs no axis


def test_several_axes_are_reduced_at_once():
    make, call = MODULES["Normalizer"]
    module, one = make(B, ("a", "b")), make(B, None)
    over(nnx.shard_map, call, axes=("a", "b"))(module, *data(0))
    call(one, *data(0))
    alike(module, one)


# Known numbers: two devices with the columns of three rows, None where masked.

KNOWN = {
    "means apart": ([[0, 2], [0, 2], [None, None]], (1.0, 4.0, 4)),
    "counts apart": ([[1, 10], [2, None], [3, None]], (4.0, 50.0, 4)),
    "one empty": ([[None, 1], [None, 3], [None, None]], (2.0, 2.0, 2)),
    "both empty": ([[None, None]] * 3, (0.0, 0.0, 0)),
}


@cache
def over_two(transform: Any) -> Call:
    return over(transform, MODULES["Normalizer"][1], devices=2)


def rows(table: Any) -> tuple[Any, Any]:
    x = np.array(table, np.float32)  # None becomes NaN, which the mask hides
    return jnp.asarray(x), jnp.asarray(~np.isnan(x))


@pytest.mark.parametrize("case", KNOWN)
@pytest.mark.parametrize("transform", [nnx.shard_map, nnx.pmap])
def test_known_numbers(case, transform):
    table, (mean, M2, count) = KNOWN[case]
    module = made("Normalizer", transform, devices=2)
    over_two(transform)(module, *rows(table))
    d = whole(module, Normalizer(())).to_dict()
    assert (d["mean"], d["M2"], d["count"], d["skipped"]) == (mean, M2, count, 0)


@pytest.mark.parametrize("transform", [nnx.shard_map, nnx.pmap])
def test_restored_on_every_rank_it_counts_once(transform):
    saved, module = Normalizer(()), made("Normalizer", transform, devices=2)
    saved.set_statistics(1e3 / 3, 2.0, 100)
    state = jax.tree.map(np.asarray, nnx.state(saved))
    if transform is not nnx.shard_map:
        state = jax.tree.map(lambda v: np.stack([v] * 2), state)
    nnx.update(module, jax.tree.map(jnp.asarray, state))
    for _ in range(2):  # synced without a new row
        over_two(transform)(module, *rows([[None, None]] * 3))
    restored = whole(module, Normalizer(()))
    assert bits(restored) == bits(saved) and restored.count == 100
    over_two(transform)(module, *rows([[5, None], [None, None], [None, None]]))
    assert whole(module, Normalizer(())).count == 101
