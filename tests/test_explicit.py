# SPDX-License-Identifier: Apache-2.0
"""On an Explicit mesh everything goes with everything, however each of it is split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnx_norm import (
    Normalizer,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    moments,
    place,
)
from nnx_norm.explicit import automatic, lies_on_explicit

P = PartitionSpec
T, B, F = 4, 8, 4
RNG = np.random.default_rng(0)
WIDE = (RNG.normal(size=(T, B, F)) + 1e4).astype(np.float32)
SCALAR = RNG.normal(size=(T, B)).astype(np.float32)
MASK, ENDS = RNG.random((T, B)) > 0.3, RNG.random((T, B)) > 0.8
FEATURES_ONLY, ALL, WHOLE = P(None, None, "y"), P("x", "y"), P()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def put(mesh: Mesh, spec: PartitionSpec, x: np.ndarray) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim])))


def shardings(module: nnx.Module) -> Any:
    return jax.tree.map(lambda v: v.sharding, nnx.state(module))


def alike(a: jax.Array, b: jax.Array) -> bool:
    return a.sharding.is_equivalent_to(b.sharding, b.ndim)


def expect(norm: Normalizer, rows: np.ndarray, times: int) -> None:
    rows = rows.reshape(-1, F).astype(np.float64)
    d = norm.to_dict()
    assert d["count"] == times * len(rows)
    assert np.all(np.abs(d["mean"]["wide"] - rows.mean(0)) <= 1e-7 * rows.std(0))
    np.testing.assert_allclose(d["variance"]["wide"], rows.var(0), rtol=5e-7)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("split", "mask", "features"),
    [
        (FEATURES_ONLY, None, None),  # statistics whole, features not
        (FEATURES_ONLY, P(None, "y"), None),  # an axis of the mesh twice
        (P(None, "x", "y"), WHOLE, "y"),
        (P("x", None, "y"), P(None, ("x", "y")), None),
        (ALL, P("x"), "y"),  # features whole, statistics not
        (WHOLE, ALL, "y"),
    ],
)
def test_history_mask_and_statistics_may_be_split_differently(
    mesh: Mesh, split: Any, mask: Any, features: Any, jitted: bool
):
    norm = place(Normalizer({"wide": F, "scalar": ()}), mesh, features=features)
    before = shardings(norm)
    x = {"wide": put(mesh, split, WIDE), "scalar": put(mesh, split, SCALAR)}
    valid = None if mask is None else put(mesh, mask, MASK)

    def step(norm: Normalizer, x: Any, valid: Any) -> Any:
        norm.update_statistics(x, mask=valid)
        norm.update_statistics(x, mask=valid)
        return norm.normalize(x)

    y = (nnx.jit(step) if jitted else step)(norm, x, valid)
    assert shardings(norm) == before
    rows = WIDE if mask is None else WIDE[MASK]
    expect(norm, rows, times=2)
    assert alike(y["wide"], x["wide"])
    right = (WIDE - norm.to_dict()["mean"]["wide"]) / norm.to_dict()["std"]["wide"]
    np.testing.assert_allclose(y["wide"], right, rtol=1e-5, atol=1e-6)


def test_one_normalizer_takes_histories_split_in_every_way(mesh: Mesh):
    norm = Normalizer({"wide": F, "scalar": ()})  # and is not placed
    ways = (ALL, FEATURES_ONLY, P("x", None, "y"), WHOLE)
    for split, other in zip(ways, reversed(ways), strict=True):
        x = {"wide": put(mesh, split, WIDE), "scalar": put(mesh, other, SCALAR)}
        norm.update_statistics(x)
    expect(norm, WIDE, times=len(ways))


@pytest.mark.parametrize("features", [None, "y"])
def test_emitted_moments_of_split_features(mesh: Mesh, features: Any):
    norm = Normalizer({"wide": F}, emit="moments")
    place(norm, mesh, features=features)

    @nnx.jit
    def step(norm: Normalizer, x: Any) -> None:
        extras = norm((), {"wide": x}).rollout_extras
        norm.update_statistics(jax.tree.map(lambda v: v[None], extras))

    for split in (FEATURES_ONLY, ALL):
        step(norm, put(mesh, split, WIDE))
    expect(norm, WIDE, times=2)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("split", "ends", "environments"),
    [(P("x"), WHOLE, None), (ALL, P(None, "y"), "x"), (P(None, "y"), P("x"), "y")],
)
def test_rewards_may_be_split_over_time(
    mesh: Mesh, split: Any, ends: Any, environments: Any, jitted: bool
):
    one = RewardNormalizer(0.9, num_envs=B)
    many = place(RewardNormalizer(0.9, num_envs=B), mesh, environments=environments)
    before = shardings(many)
    step: Any = RewardNormalizer.update
    for mask in (None, MASK):
        one.update(SCALAR, ENDS, mask=mask)
        placed = put(mesh, split, SCALAR), put(mesh, ends, ENDS)
        (nnx.jit(step) if jitted else step)(many, *placed, mask=mask)
    assert shardings(many) == before
    assert one.count == many.count
    np.testing.assert_allclose(many.variance, one.variance, rtol=5e-7)
    returns = [v.running_return.get_value() for v in (many, one)]
    np.testing.assert_allclose(*returns, rtol=1e-6)


def test_running_returns_that_are_not_placed_lie_like_the_rewards(mesh: Mesh):
    norm = RewardNormalizer(0.9)
    norm.update(put(mesh, ALL, SCALAR), put(mesh, ALL, ENDS))
    assert norm.running_return.get_value().sharding.spec == P("y")


@pytest.mark.parametrize("features", [None, "y"])
@pytest.mark.parametrize("split", [P("x", "y"), P(None, "y"), P("y")])
def test_ports_take_split_features(mesh: Mesh, split: Any, features: Any):
    port = place(RunningMeanStd(F, initial_count=0), mesh, features=features)
    before = shardings(port)
    x = put(mesh, split, WIDE[0])
    port.record_moments(x)
    assert shardings(port) == before
    rows = WIDE[0].astype(np.float64)
    np.testing.assert_allclose(port.to_numpy().mean, rows.mean(0), rtol=1e-11)
    np.testing.assert_allclose(port.to_numpy().var, rows.var(0), rtol=5e-7)
    assert alike(port.normalize(x), x)


def test_reward_port_takes_ends_split_in_another_way(mesh: Mesh):
    one, many = (RewardRunningMeanStd(shape=(), gamma=0.9) for _ in range(2))
    place(many, mesh)
    for t in range(2):
        one.record_reward(SCALAR[t], ENDS[t])
        many.record_reward(put(mesh, P("x"), SCALAR[t]), put(mesh, P("y"), ENDS[t]))
    np.testing.assert_allclose(many.to_numpy().var, one.to_numpy().var, rtol=1e-12)


def test_moments_of_a_batch_lie_like_its_features(mesh: Mesh):
    x, mask = put(mesh, FEATURES_ONLY, WIDE), put(mesh, P(None, "y"), MASK)
    batch = moments.from_batch(x, axes=(0, 1), mask=mask)
    assert batch.mean.sharding.spec == batch.M2.sharding.spec == P("y")
    np.testing.assert_allclose(batch.mean, WIDE[MASK].mean(0), rtol=1e-6)


def test_a_population_on_an_explicit_mesh(mesh: Mesh):
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(seed: Any) -> Normalizer:
        del seed
        return Normalizer({"wide": F})

    @nnx.jit
    @nnx.vmap
    def step(norm: Normalizer, x: Any) -> None:
        norm.update_statistics({"wide": x})

    norm = place(make(jnp.arange(2)), mesh)
    both = np.stack([WIDE, WIDE + 1])
    step(norm, put(mesh, P(None, None, "x", "y"), both))
    mean = norm.to_dict()["mean"]["wide"]
    np.testing.assert_allclose(mean, both.astype(float).mean((1, 2)), rtol=1e-9)


def test_gradients_pass_through_a_split_forward(mesh: Mesh):
    norm = place(Normalizer(F), mesh)
    norm.update_statistics(put(mesh, FEATURES_ONLY, WIDE))
    x = put(mesh, FEATURES_ONLY, WIDE)
    with jax.set_mesh(mesh):  # which JAX wants for any gradient outside jit
        slope = jax.grad(lambda x: norm.normalize(x).sum())(x)
    right = np.broadcast_to(1 / norm.to_dict()["std"], WIDE.shape)
    np.testing.assert_allclose(slope, right, rtol=1e-5)
    assert alike(slope, x)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_a_mesh_of_one_device_is_one_too(jitted: bool):
    one = Mesh(np.array(jax.devices()[:1]), ("x",), axis_types=(AxisType.Explicit,))
    norm, rewards = place(Normalizer({"wide": F}), one), RewardNormalizer(0.9)

    def step(norm: Normalizer, rewards: RewardNormalizer, x: Any, r: Any) -> None:
        norm.update_statistics({"wide": x})
        rewards.update(r, jnp.zeros((T, B), bool))

    x, r = (put(one, P(None, "x"), v) for v in (WIDE, SCALAR))
    (nnx.jit(step) if jitted else step)(norm, rewards, x, r)
    expect(norm, WIDE, times=1)
    assert rewards.count == T * B


def test_only_explicit_meshes_are_left(mesh: Mesh):
    auto = Mesh(mesh.devices, mesh.axis_names)
    x = jax.device_put(WIDE, NamedSharding(auto, FEATURES_ONLY))
    assert not lies_on_explicit(x)
    assert not lies_on_explicit(WIDE)
    assert lies_on_explicit(put(mesh, WHOLE, WIDE))
    assert automatic(lambda x: (x, None), x, like=(x, None))[0] is x
