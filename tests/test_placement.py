# SPDX-License-Identifier: Apache-2.0
"""Placed once, statistics stay where they are: one trace, the numbers of one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import bits

from nnx_norm import (
    Normalizer,
    NormalizerStatistics,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    RunningReturn,
    Sequential,
    place,
)

P = PartitionSpec
T, B = 4, 8
FEATURES = {"speed": 3, "wide": 8}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

both_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def mesh_of(kind: AxisType, **axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * 2)


def normal(seed: int, *shape: int, mean: float = 0.0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=shape)
    return (noise + mean).astype(np.float32)


def shardings(module: nnx.Module) -> Any:
    return jax.tree.map(lambda v: v.sharding, nnx.state(module))


class Counted:
    """Calls a function of a module and arrays under a jit; counts its traces.

    `jax.jit` takes and gives the state, `nnx.jit` changes the module in place.
    """

    def __init__(self, function: Callable[..., Any], *, plain: bool = False):
        self.function, self.traces, self.plain = function, 0, plain
        self.jitted: Any = jax.jit(self.pure) if plain else nnx.jit(self.traced)

    def traced(self, module: nnx.Module, *args: Any) -> Any:
        self.traces += 1
        return self.function(module, *args)

    def pure(self, module: nnx.Module, *args: Any) -> Any:
        return self.traced(module, *args), nnx.state(module)

    def __call__(self, module: nnx.Module, *args: Any) -> Any:
        out = self.jitted(module, *args)
        if self.plain:
            nnx.update(module, out[1])
        return out[0] if self.plain else out

    @property
    def compiled(self) -> int:
        jitted = self.jitted if self.plain else self.jitted.jitted_fn
        return jitted._cache_size()


def update(norm: Normalizer, history: Any) -> None:
    norm.update_statistics(history)


def forward(norm: Normalizer, x: Any) -> Any:
    return norm((), x).output


SPLITS = {
    "B": (P(None, ("x", "y")), None),
    "T": (P("x"), None),
    "T and B": (P("x", "y"), None),
    "B and features": (P(None, "x", "y"), "y"),
}


def histories(mesh: Mesh, spec: PartitionSpec) -> list[Any]:
    """Three on the mesh, the first far off, so that it is read twice."""
    whole = [
        {
            "speed": normal(seed + 10, T, B, 3, mean=1e4),
            "wide": normal(seed + 20, T, B, 8, mean=-1e4),
        }
        for seed in range(3)
    ]
    narrow = NamedSharding(mesh, P(*spec[:2]))
    split = NamedSharding(mesh, spec)
    placement = {"speed": narrow, "wide": split}
    return [(x, jax.device_put(x, placement)) for x in whole]


@pytest.fixture(scope="module")
def alone() -> Normalizer:
    norm = Normalizer(FEATURES)
    for x, _ in histories(mesh_of(AxisType.Auto, x=1, y=1), P()):
        norm.update_statistics(x)
    return norm


@both_kinds
@pytest.mark.parametrize("split", SPLITS)
def test_updates_keep_the_placement_and_compile_once(split, kind, alone):
    spec, features = SPLITS[split]
    mesh = mesh_of(kind, x=2, y=2)
    norm = place(Normalizer(FEATURES), mesh, features=features)
    before = shardings(norm)
    plain = (split == "T") != (kind == AxisType.Auto)  # each way with half of them
    fold, read = Counted(update, plain=plain), Counted(forward, plain=plain)
    x = {"speed": normal(9, B, 3), "wide": normal(9, B, 8)}
    x = jax.device_put(x, NamedSharding(mesh, P(*spec[1:2])))
    for _, history in histories(mesh, spec):
        fold(norm, history)
        y = read(norm, x)
        assert shardings(norm) == before
    assert (fold.traces, fold.compiled, read.traces, read.compiled) == (1, 1, 1, 1)
    sharded = norm.M2.get_value()["wide"].sharding.is_fully_replicated
    assert sharded == (features is None)
    many, one, right = norm.to_dict(), alone.to_dict(), alone.normalize(x)
    assert many["count"] == one["count"] == 3 * T * B
    for name in FEATURES:
        bound = 1e-7 * one["std"][name]
        assert np.all(np.abs(many["mean"][name] - one["mean"][name]) <= bound)
        np.testing.assert_allclose(many["M2"][name], one["M2"][name], rtol=5e-7)
        np.testing.assert_allclose(y[name], right[name], rtol=1e-5)


def test_what_was_not_placed_compiles_twice():
    mesh = mesh_of(AxisType.Auto, x=2, y=2)  # teeth for the law above
    norm, fold = Normalizer(2), Counted(update)
    x = jax.device_put(normal(0, T, B, 2), NamedSharding(mesh, P(None, "x")))
    for _ in range(3):
        fold(norm, x)
    assert fold.traces == 2


OTHERS = {
    "rewards": (
        AxisType.Auto,
        lambda: RewardNormalizer(0.9, num_envs=B),
        lambda m, r, e: m.update(r, e),
        P(None, "x"),
        {"environments": "x"},
    ),
    "rewards over two axes": (
        AxisType.Explicit,
        lambda: RewardNormalizer(0.9, num_envs=B),
        lambda m, r, e: m.update(r, e),
        P(None, ("x", "y")),
        {"environments": ("x", "y")},
    ),
    "port of rewards": (
        AxisType.Explicit,
        lambda: RewardRunningMeanStd(gamma=0.9, num_envs=B),
        lambda m, r, e: m.record_reward(r[0], e[0]),
        P(None, "y"),
        {"environments": "y"},
    ),
    "port": (
        AxisType.Auto,
        lambda: RunningMeanStd(B),
        lambda m, r, e: m.record_moments(r),
        P("x", "y"),
        {"features": "y"},
    ),
}


@pytest.mark.parametrize("which", OTHERS)
def test_rewards_and_ports_stay_too(which):
    kind, make, call, spec, axes = OTHERS[which]
    mesh, split = mesh_of(kind, x=2, y=2), P(*spec)
    module, one, fold = place(make(), mesh, **axes), make(), Counted(call)
    before = shardings(module)
    assert not all(v.is_fully_replicated for v in jax.tree.leaves(before))
    for seed in range(3):
        data = normal(seed, T, B, mean=1e3), normal(seed + 10, T, B) > 1
        fold(module, *jax.device_put(data, NamedSharding(mesh, split)))
        call(one, *map(jnp.asarray, data))
    assert (fold.traces, fold.compiled, shardings(module)) == (1, 1, before)
    x, y = normal(7, T, B), normal(7, T, B, mean=1e3)
    np.testing.assert_allclose(module.normalize(x), one.normalize(x), rtol=2e-6)
    np.testing.assert_allclose(module.normalize(y), one.normalize(y), rtol=2e-6, atol=1)


class Agent(nnx.Module):
    """Statistics in several places, one of them twice."""

    def __init__(self):
        self.norm = Normalizer(8)
        self.rewards = RewardNormalizer(0.9, num_envs=B)
        self.lazy = RewardRunningMeanStd(None, gamma=0.9)
        linear = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        self.actor = Sequential([self.norm, linear])


@both_kinds
def test_only_statistics_move_and_no_bit_changes(kind):
    agent, mesh = Agent(), mesh_of(kind, x=2, y=2)
    agent.norm.set_statistics(np.arange(8) / 3, 2.0, 2**30 + 1)
    before, params = bits(agent), nnx.state(agent, nnx.Param)
    assert place(agent, mesh, environments="x", features="y") is agent
    assert bits(agent) == before
    assert agent.actor.layers[0] is agent.norm and agent.lazy.is_lazy
    where = shardings(agent)
    assert {len(v.device_set) for v in jax.tree.leaves(where)} == {1, 4}
    after = nnx.state(agent, nnx.Param)
    pairs = zip(*map(jax.tree.leaves, (params, after)), strict=True)
    assert all(a is b for a, b in pairs)
    for leaf in jax.tree.leaves(nnx.state(agent, RunningReturn)):
        assert leaf.sharding == NamedSharding(mesh, P("x"))
    statistics = jax.tree.leaves(nnx.state(agent, NormalizerStatistics))
    for leaf in statistics:
        assert leaf.sharding == NamedSharding(mesh, P("y") if leaf.ndim else P())
    place(agent, mesh, environments="x", features="y")  # nothing to do
    again = jax.tree.leaves(nnx.state(agent, NormalizerStatistics))
    assert all(a is b for a, b in zip(statistics, again, strict=True))
    place(agent, mesh)
    assert all(
        v.sharding.is_fully_replicated for v in jax.tree.leaves(nnx.state(agent))
    )
    assert bits(agent) == before


def test_placed_buffers_are_their_own_and_can_be_donated():
    norm, mesh = Normalizer(2), mesh_of(AxisType.Auto, x=2, y=2)
    norm.set_statistics([1.0, 2.0], 1.0, 3)
    old = norm.mean.get_value()
    place(norm, mesh)
    donated = nnx.jit(update, donate_argnums=0)
    for _ in range(2):
        donated(
            norm,
            jax.device_put(np.ones((T, B, 2), np.float32), NamedSharding(mesh, P())),
        )
    assert norm.count == 3 + 2 * T * B
    assert np.asarray(old).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("features", [P(None, "y"), P(("x", "y")), "x"], ids=str)
def test_leaves_that_an_axis_does_not_divide_stay_whole(features):
    mesh = mesh_of(AxisType.Auto, x=2, y=3)
    norm = place(Normalizer({"a": (2, 3), "b": 12, "c": ()}), mesh, features=features)
    found = {k: v.sharding.spec for k, v in norm.M2.get_value().items()}
    split = {
        "x": {"a": P("x"), "b": P("x")},
        P(None, "y"): {"a": P(None, "y")},
        P(("x", "y")): {"b": P(("x", "y"))},
    }
    assert found == {"a": P(), "b": P(), "c": P()} | split[features]


def test_the_members_of_a_population_are_not_split():
    norm = nnx.vmap(lambda _: Normalizer({"a": 4, "b": ()}))(jnp.arange(4))
    mesh = mesh_of(AxisType.Auto, x=2, y=2)
    place(norm, mesh, features="x")
    assert norm.mean.get_value()["a"].sharding.spec == P(None, "x")
    assert norm.mean.get_value()["b"].sharding.is_fully_replicated
    assert norm.counter.get_value().sharding.is_fully_replicated


def test_an_abstract_model_becomes_a_template_to_restore_into():
    mesh = mesh_of(AxisType.Auto, x=2, y=2)
    kinds = {"environments": "x", "features": "y"}
    abstract = place(nnx.eval_shape(lambda: Normalizer(4)), mesh, **kinds)
    placed = place(Normalizer(4), mesh, **kinds)
    assert shardings(abstract) == shardings(placed)
    for leaf in jax.tree.leaves(nnx.state(abstract)):
        assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.float32


@pytest.mark.parametrize(
    "axes, words",
    [
        ({"environments": "z"}, r"environments names the axes \['z'\].*\('x', 'y'\)"),
        ({"environments": ("x", "z")}, r"environments names the axes \['z'\]"),
        ({"features": P(None, ("x", "w"))}, r"features names the axes \['w'\]"),
        ({"environments": "y"}, r"rewards.running_return has 8 .* multiple of the 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_moves(axes, words):
    agent, mesh = Agent(), mesh_of(AxisType.Auto, x=2, y=3)
    before = shardings(agent)
    with pytest.raises(ValueError, match=words):
        place(agent, mesh, **axes)
    assert shardings(agent) == before


def test_it_wants_a_mesh_outside_jit():
    mesh: Any = jax.devices()
    with pytest.raises(TypeError, match="mesh is list; expected a Mesh, such as"):
        place(Normalizer(1), mesh)
    mesh = mesh_of(AxisType.Auto, x=2, y=2)
    with pytest.raises(TypeError, match=r"traced (M2|mean).*; call it outside jit"):
        nnx.jit(lambda norm: place(norm, mesh) and None)(Normalizer(1))
