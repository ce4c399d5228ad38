# SPDX-License-Identifier: Apache-2.0
"""What both normalizers share: Variables, freezing, setting, copying, keeping."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support import EPS, Box, Observation, Pair, bits, moments64, statistics

from nnx_norm import Moments, Normalizer, RewardNormalizer

TREE = {"a": 2, "b": {"c": ()}}
KINDS = {
    "Normalizer": lambda: Normalizer(TREE),
    "RewardNormalizer": lambda: RewardNormalizer(0.5, shape=TREE, num_envs=2),
}
both = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


def fold(norm: Any, scale: float = 1.0) -> None:
    """One update [T=2, B=2] of rows 0, 1, 2, 3 times a scale."""
    c = jnp.arange(4.0).reshape(2, 2) * scale
    data = {"a": jnp.stack([c, -3 * c], axis=-1), "b": {"c": c}}
    if isinstance(norm, Normalizer):
        norm.update_statistics(data)
    else:
        norm.update(data, jnp.zeros((2, 2), bool))


def state(norm: Any) -> dict[str, Any]:
    """The bits of the statistics alone."""
    return {path: kind for path, kind in bits(norm).items() if "running" not in path}


# Reading


def test_derived_statistics_have_the_structure_of_the_spec():
    norm = Normalizer(TREE, epsilon=0.5)
    fold(norm)
    assert norm.variance["a"].tolist() == [1.25, 11.25]
    assert norm.variance["b"]["c"].tolist() == 1.25
    np.testing.assert_allclose(norm.std["a"], np.sqrt([1.25, 11.25]), rtol=EPS)
    norm.set_statistics(0.0, 0.25, 4)
    np.testing.assert_allclose(norm.std["b"]["c"], np.sqrt(0.5), rtol=EPS)
    assert norm.variance["b"]["c"] == 0.25
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(norm.std))


def test_count_is_exact_and_an_int_where_it_is_whole():
    norm = Normalizer(1)
    for count in (0, 1, 2**24 + 1, 2**31, 2**48 + 1, 0.375, 2**20 + 0.5):
        norm.set_statistics(0.0, 1.0, count)
        assert norm.count == count and type(norm.count) is type(count)


# Freeze, reset, copy


@both
def test_freezing_stops_folding_and_setting_still_works(make):
    norm = make()
    fold(norm)
    norm.freeze()
    before = bits(norm)
    fold(norm, 100.0)
    assert bits(norm) == before and norm.frozen
    other = make()
    fold(other, 3.0)
    norm.copy_from(other)
    assert state(norm) == state(other) and norm.frozen
    norm.load_dict(make().to_dict())
    assert state(norm) == state(make()) and norm.frozen
    norm.set_statistics(1.0, 1.0, 5)
    assert norm.count == 5
    norm.reset()
    assert norm.count == 0 and norm.frozen
    norm.unfreeze()
    fold(norm)
    assert norm.count == 4


@both
def test_reset_forgets_every_sample(make):
    norm = make()
    fold(norm, float("nan"))
    fold(norm)
    norm.reset()
    assert bits(norm) == bits(make())
    again = make()
    for n in (norm, again):
        fold(n)
    assert bits(norm) == bits(again)


@both
def test_copies_share_no_buffer_no_setting_and_no_flag(make):
    norm, other = make(), make()
    fold(other, 2.0)
    other.freeze()
    norm.copy_from(other)
    assert state(norm) == state(other) and not norm.frozen
    before = bits(norm)
    for leaf in jax.tree.leaves(nnx.state(other)):
        leaf.delete()  # as donation does
    assert bits(norm) == before
    fold(norm)
    assert norm.count == 8


def test_copy_from_keeps_settings():
    norm, other = Normalizer(TREE, clip=1.0), Normalizer(TREE, clip=2.0, epsilon=3.0)
    fold(other)
    norm.copy_from(other)
    assert (norm.clip, norm.epsilon, norm.count) == (1.0, 1e-6, 4)


def test_copy_from_refuses_another_structure_and_changes_nothing():
    norm = Normalizer(TREE)
    fold(norm)
    before = bits(norm)
    for shape in ({"a": 2}, {"a": 3, "b": {"c": ()}}, {"a": 2, "b": {"d": ()}}, 2):
        with pytest.raises(ValueError, match="copy_from got .*; expected .*b/c"):
            norm.copy_from(Normalizer(shape))
    with pytest.raises(TypeError, match="copy_from got dict; expected a normalizer"):
        norm.copy_from(norm.to_dict())  # pyright: ignore[reportArgumentType]
    assert bits(norm) == before


def test_copy_from_knows_nodes_that_cannot_be_compared():
    one, two = Normalizer(Box(jnp.zeros(2))), Normalizer(Box(jnp.zeros(2)))
    two.set_statistics(1.0, 1.0, 3)
    one.copy_from(two)
    assert one.count == 3
    with pytest.raises(ValueError, match="copy_from"):
        one.copy_from(Normalizer(Box(jnp.zeros(3))))


# Setting


def test_set_statistics_takes_scalars_arrays_and_lists_for_leaves():
    norm = Normalizer(TREE)
    norm.set_statistics(mean=1, variance=4.0, count=np.int64(3))
    d = norm.to_dict()
    assert d["mean"]["a"].tolist() == [1.0, 1.0] and d["mean"]["b"]["c"] == 1.0
    assert d["M2"]["a"].tolist() == [12.0, 12.0] and d["count"] == 3
    mean = {"a": np.array([0.1, 0.2]), "b": {"c": 0.3}}
    norm.set_statistics(mean, {"a": [1, 2], "b": {"c": jnp.float32(3)}}, 2)
    d = norm.to_dict()
    np.testing.assert_allclose(d["mean"]["a"], [0.1, 0.2], rtol=2.0**-48)
    assert d["M2"]["a"].tolist() == [2.0, 4.0] and d["M2"]["b"]["c"] == 6.0
    single = Normalizer((2, 2))
    single.set_statistics([[1, 2], [3, 4]], np.ones((2, 2)), 1)
    assert single.to_dict()["mean"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_set_statistics_keeps_digits_of_float64():
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=3) * 1e4, rng.random(3)
    norm = Normalizer(3)
    norm.set_statistics(mean, variance, 10**9 + 1)
    d = norm.to_dict()
    np.testing.assert_allclose(d["mean"], mean, rtol=2.0**-47)
    np.testing.assert_allclose(d["variance"], variance, rtol=2.0**-47)
    assert np.any(d["mean"] != d["mean"].astype(np.float32))


def test_set_statistics_leaves_skipped_as_it_is():
    norm = Normalizer(1)
    norm.update_statistics(jnp.full((1, 2, 1), jnp.nan))
    norm.set_statistics(0.0, 1.0, 3)
    assert norm.to_dict()["skipped"] == 2


@pytest.mark.parametrize(
    "mean, variance, count, words",
    [
        ({"a": np.zeros(3), "b": {"c": 0}}, 1.0, 1, "mean['a'] has shape (3,)"),
        ({"a": 0.0, "b": {"c": 0}}, 1.0, 1, "mean['a'] has shape ()"),
        ({"a": np.zeros(2)}, 1.0, 1, "mean['b']['c'] is missing"),
        (np.zeros(2), 1.0, 1, "mean is "),
        (0.0, -1.0, 1, "variance['a'] holds"),
        (0.0, {"a": [1, -1], "b": {"c": 0}}, 1, "variance['a'] holds [1.0, -1.0]"),
        (0.0, 1.0, -1, "count holds -1.0"),
        (0.0, 1.0, [1, 2], "count has shape (2,)"),
        (float("nan"), 1.0, 1, "mean['a'] holds"),
        (0.0, float("inf"), 1, "variance['a'] holds"),
        (1e39, 1.0, 1, "more than float32 holds"),
        (0.0, 1e30, 1e10, "M2['a'] holds 1e+40"),
        (1.0, 1.0, 0, "count is 0 where mean['a'] is not"),
    ],
)
def test_set_statistics_refuses_by_name_and_changes_nothing(
    mean, variance, count, words
):
    norm = Normalizer(TREE)
    fold(norm)
    before = bits(norm)
    with pytest.raises(ValueError) as error:
        norm.set_statistics(mean, variance, count)
    assert words in str(error.value)
    with pytest.raises(TypeError, match=r"mean\['a'\].*real numbers"):
        norm.set_statistics("zero", variance=1.0, count=1)
    assert bits(norm) == before


def test_set_statistics_works_under_jit():
    norm, right = Normalizer(TREE), Normalizer(TREE)

    def warm(norm: Normalizer, mean: Any, variance: Any, count: Any) -> None:
        norm.set_statistics(mean, variance, count)

    mean = {"a": jnp.array([0.0, 1.0]), "b": {"c": jnp.float32(0)}}
    nnx.jit(warm)(norm, mean, jnp.float32(2.0), jnp.float32(3.0))
    right.set_statistics(mean, 2.0, 3)
    assert bits(norm) == bits(right)


def test_states_of_numpy_arrays_are_states():
    norm, right = Normalizer(TREE), Normalizer(TREE)
    fold(right)
    nnx.update(norm, jax.tree.map(np.asarray, nnx.state(right)))
    for call in (
        lambda n: n.normalize({"a": jnp.ones(2), "b": {"c": jnp.ones(())}}),
        lambda n: (n.variance, n.std, n.count),
        lambda n: n.set_statistics(0.1, 0.2, 3),
        fold,
    ):
        nnx.update(norm, jax.tree.map(np.asarray, nnx.state(norm)))
        got, want = call(norm), call(right)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
    assert bits(norm) == bits(right)


def test_setting_keeps_the_placement():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    norm = Normalizer(1)
    nnx.update(norm, jax.device_put(nnx.state(norm), placed))
    norm.set_statistics(0.0, 1.0, 2)
    norm.load_dict(norm.to_dict())
    assert {leaf.sharding for leaf in jax.tree.leaves(nnx.state(norm))} == {placed}


# Merging


def counted(rows: Any, **settings: Any) -> Normalizer:
    """A normalizer that has seen rows `[n]`."""
    norm = Normalizer(1, **settings)
    norm.update_statistics(np.asarray(rows, np.float32)[:, None])
    return norm


def of(norm: Normalizer) -> Moments:
    """Its moments in float64, as `all_reduce_processes` gives them."""
    d = norm.to_dict()
    return Moments(d["mean"], d["M2"], np.float64(d["count"]))  # pyright: ignore


def listed(norm: Normalizer) -> Any:
    return json.loads(json.dumps(norm.to_dict(), default=np.ndarray.tolist))


WAYS = {
    "normalizer": lambda norm: norm,
    "moments": of,
    "dict": Normalizer.to_dict,
    "flat dict": lambda norm: norm.to_dict(flat=True),
    "JSON": listed,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_merging_counts_the_samples_of_the_other_exactly(way):
    rows = np.asarray(1e6 + np.random.default_rng(0).normal(size=20), np.float32)
    norm, other = counted(rows[:4]), counted(rows[4:9])
    before = bits(other)
    norm.merge_from(way(other))
    norm.merge_from(way(counted(rows[9:])))
    assert bits(other) == before
    right, d = moments64(rows[:, None]), norm.to_dict()
    assert norm.count == right.count
    np.testing.assert_allclose(d["mean"], right.mean, rtol=2.0**-46)
    np.testing.assert_allclose(d["M2"], right.M2, rtol=1e-9)


@both
def test_merging_reaches_every_leaf_and_leaves_running_returns(make):
    norm, other = make(), make()
    fold(norm)
    fold(other, 5.0)
    a, b = norm.to_dict(), other.to_dict()
    returns = {k: v for k, v in bits(norm).items() if "running" in k}
    norm.merge_from(other)
    d = norm.to_dict()
    assert d["count"] == 8
    for get in (lambda tree: tree["a"], lambda tree: tree["b"]["c"]):
        means, M2s = [get(v["mean"]) for v in (a, b)], [get(v["M2"]) for v in (a, b)]
        np.testing.assert_allclose(get(d["mean"]), np.mean(means, 0), rtol=1e-13)
        between = 2 * np.square(means[1] - means[0])
        np.testing.assert_allclose(get(d["M2"]), np.sum(M2s, 0) + between, rtol=1e-13)
    assert returns == {k: v for k, v in bits(norm).items() if "running" in k}


def test_merging_obeys_the_settings_as_an_update_does():
    other = counted([8.0, float("nan"), 12.0])
    norm = counted([1.0, 3.0], max_count=3)
    norm.merge_from(other)  # folds, then stops
    assert statistics(norm) == ([6.0], [74.0], 4) and norm.to_dict()["skipped"] == 1
    before = bits(norm)
    norm.merge_from(other)
    assert bits(norm) == before

    norm = counted([1.0, 3.0], decay=0.5)  # weight 1 and M2 1 by then
    norm.merge_from(other)
    np.testing.assert_allclose(norm.to_dict()["mean"], 22 / 3, rtol=1e-13)
    assert norm.count == 3
    before = bits(norm)
    norm.merge_from(Normalizer(1))
    assert bits(norm) == before

    norm = counted([1.0])
    norm.freeze()
    before = bits(norm)
    norm.merge_from(other)
    assert bits(norm) == before


def test_merging_what_float32_cannot_hold_is_skipped():
    norm, huge = counted([-1e19]), counted([2e19, 2e19])
    norm.set_statistics(-1e19, 3e38, 1)
    before = statistics(norm)
    norm.merge_from(huge)
    assert statistics(norm) == before and norm.to_dict()["skipped"] == 2


@both
def test_merging_refuses_what_does_not_fit_and_changes_nothing(make):
    norm = make()
    made: Any = Moments
    fold(norm)
    before = bits(norm)
    mean, M2 = norm.to_dict()["mean"], norm.to_dict()["M2"]
    negative = {"a": np.array([-1.0, 1.0]), "b": {"c": np.float64(0)}}
    for other, words in (
        (norm, "the normalizer itself"),
        (Normalizer({"a": 3, "b": {"c": ()}}), "merge_from got the statistics of"),
        (made(0.0, M2, 3), "mean is "),
        (made({**mean, "a": 0.0}, M2, 3), "mean['a'] has shape ()"),
        (made(mean, negative, 3), "M2['a'] holds"),
        (made(mean, M2, -3), "count holds -3"),
        (made(mean, M2, float("nan")), "count holds nan"),
        ({"mean": mean, "M2": M2}, "count is missing"),
    ):
        with pytest.raises(ValueError) as error:
            norm.merge_from(other)
        assert words in str(error.value)
    with pytest.raises(TypeError, match="merge_from got int; expected a normalizer"):
        norm.merge_from(3)
    assert bits(norm) == before


def test_merging_works_under_jit_and_at_once_for_populations():
    one, two = counted([1.0, 2.0]), counted([10.0])
    right = counted([1.0, 2.0])
    for other in (two, of(two)):
        right.merge_from(other)

    def unite(norm: Normalizer, other: Normalizer, moments: Moments) -> None:
        norm.merge_from(other)
        norm.merge_from(moments)

    nnx.jit(unite)(one, two, jax.tree.map(jnp.float32, of(two)))
    assert bits(one) == bits(right)

    norm, other = population(), population()
    mean = np.arange(6.0).reshape(3, 2)
    norm.set_statistics(mean, 1.0, np.array([1, 2, 4]))
    other.set_statistics(mean + 2, 1.0, np.array([1, 2, 4]))
    norm.merge_from(other)
    assert norm.count.tolist() == [2, 4, 8]
    np.testing.assert_allclose(norm.to_dict()["mean"], mean + 1, rtol=1e-13)
    np.testing.assert_allclose(norm.variance, np.full((3, 2), 2.0), rtol=EPS)


# Populations


def population(members: int = 3) -> Normalizer:
    return nnx.vmap(lambda _: Normalizer(2))(jnp.arange(members))


def test_a_population_carries_the_member_axis_everywhere():
    norm = population()
    mean = np.arange(6.0).reshape(3, 2)
    norm.set_statistics(mean, np.ones((3, 2)), np.array([1, 2, 2**24 + 1]))
    assert norm.count.tolist() == [1, 2, 2**24 + 1]
    for value in (
        norm.variance,
        norm.std,
        norm.to_dict()["M2"],
        norm.to_dict()["mean"],
    ):
        assert value.shape == (3, 2)
    np.testing.assert_allclose(norm.variance, np.ones((3, 2)), rtol=EPS)
    other = population()
    other.load_dict(norm.to_dict())
    assert bits(other) == bits(norm)
    other.load_dict(norm.to_dict(flat=True))
    other.reset()
    assert bits(other) == bits(population())
    other.copy_from(norm)
    assert bits(other) == bits(norm)
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        Normalizer(2).copy_from(norm)


def test_scalars_fill_a_population():
    norm = population()
    norm.set_statistics(1.0, 2.0, 5)
    assert norm.count.tolist() == [5, 5, 5]
    assert norm.to_dict()["M2"].tolist() == [[10.0, 10.0]] * 3


def test_a_member_without_samples_has_no_mean():
    norm, mean = population(2), np.array([[0.0, 0.0], [1.0, 2.0]])
    norm.set_statistics(mean, 1.0, np.array([0, 5]))
    before = bits(norm)
    with pytest.raises(ValueError, match="count is 0"):
        norm.set_statistics(mean, 1.0, np.array([5, 0]))
    assert bits(norm) == before


# Keeping


SPECS = {
    "dict": TREE,
    "tuple": (jnp.zeros(2), {"c": jnp.zeros(())}),
    "named tuple": Pair(jnp.zeros(2), jnp.zeros(())),
    "dataclass": Observation(jnp.zeros(2), jnp.zeros(())),
    "None": {"a": 2, "n": None, "off": 3},
}


def kept(spec: Any) -> Normalizer:
    exclude = ["off"] if isinstance(spec, dict) and "off" in spec else ()
    norm = Normalizer(spec, clip=3.0, exclude=exclude)
    norm.set_statistics(1 / 3, 0.7, 2**24 + 1)
    return norm


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize(
    "way",
    [
        lambda n: pickle.loads(pickle.dumps(n)),
        copy.deepcopy,
        nnx.clone,
        lambda n: nnx.merge(*nnx.split(n)),
    ],
    ids=["pickle", "deepcopy", "clone", "split/merge"],
)
def test_copies_of_the_module_are_whole(spec, way):
    norm = kept(spec)
    norm.freeze()
    again = way(norm)
    assert bits(again) == bits(norm)
    assert (again.clip, again.frozen, again.spec) == (3.0, True, norm.spec)


def checkpointed(module: nnx.Module, make: Any, path: Path) -> Any:
    """Save a module with Orbax, and restore it into an abstract one."""
    abstract = nnx.eval_shape(make)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", nnx.state(module))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path / "state", nnx.state(abstract))
    nnx.update(abstract, restored)
    return abstract


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_orbax_restores_every_bit_into_an_abstract_module(spec, tmp_path):
    norm = kept(spec)
    again = checkpointed(norm, lambda: kept(spec), tmp_path)
    assert bits(again) == bits(norm) and again.count == 2**24 + 1


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    norm = Normalizer(1)
    for batch in ([0.0, 2.0], [5.0, 9.0]):
        norm.update_statistics(jnp.array(batch)[None, :, None])
    again = checkpointed(norm, lambda: Normalizer(1), tmp_path)
    assert statistics(again) == ([4.0], [46.0], 4)
    x = jnp.array([[3.3]])
    np.testing.assert_array_equal(again.normalize(x), norm.normalize(x))
    for n in (norm, again):
        n.update_statistics(jnp.ones((1, 2, 1)))
    assert bits(again) == bits(norm)
