# SPDX-License-Identifier: Apache-2.0
"""Export and import: what comes back is what went out, to the last bit."""

import io
import json
import math
from typing import Any

import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import EPS, Observation, Pair, bits, statistics

from nnx_norm import Normalizer, RewardNormalizer
from nnx_norm.serialization import exact


def filled(norm: Any, seed: int = 0, count: Any = 2**24 + 1) -> Any:
    """Statistics that need their residuals, and a skipped sample."""
    rng = np.random.default_rng(seed)

    def numbers(tree: Any, scale: float) -> Any:
        return jax.tree.map(lambda v: rng.random(v.shape) * scale + 0.1, tree)

    mean = norm.mean.get_value()
    norm.set_statistics(numbers(mean, 1e3), numbers(mean, 5.0), count)
    norm.skipped.set_value(jnp.float32(3))
    return norm


def through_json(d: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(d, default=lambda array: array.tolist()))


def through_npz(d: dict[str, Any]) -> Any:
    file = io.BytesIO()
    np.savez(file, **d)
    file.seek(0)
    return np.load(file, allow_pickle=False)


def as_dict(npz: Any) -> dict[str, Any]:
    return {key: npz[key] for key in npz.files}


@flax.struct.dataclass
class Struct:
    pos: Any
    vel: Any


SPECS: dict[str, Any] = {
    "int": 3,
    "scalar": (),
    "matrix": (2, 3),
    "dict": {"goal": {"id": (), "pos": 2}, "obs": 3},
    "tuple": (jnp.zeros(2), jnp.zeros(3)),
    "list": [{"x": 2}, (jnp.zeros(3), jnp.zeros(()))],
    "None": {"a": 2, "n": None},
    "empty": {},
    "nested empty": {"a": {}, "b": 2},
    "awkward keys": {"a/b": 2, "a~b": {"": 3}, "mean": (), "()": {"[]": 2}, "{}": 1},
    "lone brackets": {"()": 3},
    "lone braces": {"{}": {"[]": 3}},
}
CLASSES: dict[str, Any] = {  # what JSON has no word for
    "integer keys": {0: 2, 10: 3},
    "dataclass": Observation(jnp.zeros(2), jnp.zeros(3)),
    "flax dataclass": Struct({"x": jnp.zeros(2)}, jnp.zeros(3)),
    "named tuple": Pair(jnp.zeros(2), jnp.zeros(3)),
}
WAYS: dict[str, Any] = {
    "nested": lambda n: n.to_dict(),
    "flat": lambda n: n.to_dict(flat=True),
    "nested JSON": lambda n: through_json(n.to_dict()),
    "flat JSON": lambda n: through_json(n.to_dict(flat=True)),
    "npz": lambda n: through_npz(n.to_dict(flat=True)),
    "dict of npz": lambda n: as_dict(through_npz(n.to_dict(flat=True))),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
every_spec = pytest.mark.parametrize(
    "spec", (SPECS | CLASSES).values(), ids=(SPECS | CLASSES).keys()
)


# Round trips


@every_way
@every_spec
def test_load_dict_is_the_inverse_of_to_dict_bit_for_bit(spec, way):
    norm = filled(Normalizer(spec))
    again = Normalizer(spec)
    again.load_dict(way(norm))
    assert bits(again) == bits(norm)


@every_way
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_from_dict_makes_the_normalizer_again(spec, way):
    norm = filled(Normalizer(spec, clip=2.5))
    again = Normalizer.from_dict(way(norm))
    assert bits(again) == bits(norm)
    assert (again.spec, again.clip) == (norm.spec, 2.5)


@every_way
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon": 1e-3, "initial_std": 2.0, "clip": 0.0, "nonfinite": "propagate"},
        {"clip": math.inf, "max_count": 100, "emit": "moments", "axis_name": "d"},
        {"decay": 0.5, "axis_name": ("d", "e"), "exclude": ["goal/id", ("image",)]},
        {"exclude": lambda path: True},
    ],
)
def test_every_setting_comes_back(settings, way):
    norm = filled(Normalizer({"goal": {"id": (), "pos": 2}, "image": 3}, **settings))
    again = Normalizer.from_dict(way(norm))
    assert bits(again) == bits(norm)
    names = "epsilon initial_std clip axis_name max_count decay nonfinite emit spec"
    for name in names.split():
        assert getattr(again, name) == getattr(norm, name), name
    assert not again.frozen


@hypothesis.given(st.data())
def test_any_statistics_come_back(data):
    normal = st.floats(2.0**-60, 2.0**60) | st.floats(-(2.0**60), -(2.0**-60))
    positive, any_sign = normal.map(abs), normal | st.just(0.0)
    mean = np.array([data.draw(any_sign) for _ in range(2)])
    variance = np.array([data.draw(positive) for _ in range(2)])
    count = data.draw(st.integers(1, 2**47) | st.floats(2.0**-20, 2.0**20))
    norm, again = Normalizer(2), Normalizer(2)
    norm.set_statistics(mean, variance, count)
    d = norm.to_dict()
    for way in ("nested JSON", "npz"):
        again.load_dict(WAYS[way](norm))
        assert bits(again) == bits(norm)
    np.testing.assert_allclose(d["mean"], mean, rtol=2.0**-47)
    np.testing.assert_allclose(d["variance"], variance, rtol=2.0**-46)
    assert float(d["count"]) == pytest.approx(count, rel=2.0**-47)
    if isinstance(count, int):
        assert d["count"] == count


@pytest.mark.parametrize("way", ["nested", "flat", "flat JSON", "npz"])
def test_populations_come_back_with_their_member_axis(way):
    norm = nnx.vmap(lambda _: Normalizer({"a": 2, "b": ()}))(jnp.arange(3))
    mean = {"a": np.arange(6.0).reshape(3, 2), "b": np.arange(3.0)}
    norm.set_statistics(mean, 1.5, np.array([1, 2, 2**24 + 1]))
    d = norm.to_dict()
    assert d["count"].tolist() == [1, 2, 2**24 + 1]
    assert (d["std"]["a"].shape, d["std"]["b"].shape) == ((3, 2), (3,))
    again = Normalizer.from_dict(WAYS[way](norm))
    assert bits(again) == bits(norm)


def test_reward_statistics_come_back():
    tree = {"task": (), "cost": 2}
    norm = filled(RewardNormalizer(0.99, shape=tree, num_envs=2, clip=4.0))
    for way in WAYS.values():
        again = RewardNormalizer(0.5, shape=tree, num_envs=2)
        again.load_dict(way(norm))
        assert bits(again) == bits(norm) and again.gamma == 0.5
    d = norm.to_dict()
    assert (d["gamma"], d["clip"], d["epsilon"], d["nonfinite"]) == (
        0.99,
        4,
        1e-8,
        "skip",
    )
    np.testing.assert_allclose(d["std"]["cost"], norm.std["cost"], rtol=EPS)


def test_nan_comes_back_where_it_was_let_in():
    norm = Normalizer(1, nonfinite="propagate")
    norm.update_statistics(jnp.full((1, 2, 1), jnp.nan))
    again = Normalizer(1, nonfinite="propagate")
    again.load_dict(through_json(norm.to_dict()))
    assert again.count == 2 and np.isnan(again.mean.get_value()[0])
    with pytest.raises(ValueError, match="mean holds .*nan.*finite"):
        Normalizer(1).load_dict(norm.to_dict())


# Forms


def test_the_nested_form_has_str_keys_numpy_arrays_and_python_values():
    spec = {"goal": {"id": ()}, "pair": (jnp.zeros(2), jnp.zeros(3)), "n": None}
    norm = filled(Normalizer(spec, exclude=["pair/1"], axis_name=("d", "e")))
    d = norm.to_dict()
    assert set(d) == {
        *("mean", "M2", "variance", "std", "count", "skipped"),
        *("epsilon", "initial_std", "clip", "axis_name", "max_count", "decay"),
        *("nonfinite", "emit", "exclude", "shape"),
    }
    for name in ("mean", "M2", "variance", "std"):
        assert set(d[name]) == {"goal", "pair"} and set(d[name]["pair"]) == {"0", "1"}
        assert d[name]["pair"]["1"] is None
        for leaf in jax.tree.leaves(d[name]):
            assert (
                isinstance(leaf, (np.ndarray, np.float64)) and leaf.dtype == np.float64
            )
    assert (type(d["count"]), d["count"], d["skipped"]) == (int, 2**24 + 1, 3)
    assert d["exclude"] == ["pair/1"] and d["axis_name"] == ["d", "e"]
    assert d["clip"] is None and d["decay"] is None


def test_nodes_of_classes_are_named_by_their_fields():
    names = {name: Normalizer(spec).to_dict() for name, spec in CLASSES.items()}
    assert set(names["integer keys"]["mean"]) == {"0", "10"}
    assert set(names["dataclass"]["mean"]) == {"image", "speed"}
    assert set(names["named tuple"]["std"]) == {"first", "second"}
    assert set(names["flax dataclass"]["M2"]) == {"pos", "vel"}
    for spec in CLASSES.values():
        with pytest.raises(ValueError, match="shape is missing.*load_dict"):
            Normalizer.from_dict(Normalizer(spec).to_dict())


def test_the_flat_form_is_one_level_without_unset_settings():
    norm = Normalizer({"goal": {"id": (), "a/b": 2}, "off": 3}, exclude=["off"])
    d = filled(norm).to_dict(flat=True)
    trees = ("mean", "M2", "variance", "std")
    paths = {f"{t}/{p}" for t in trees for p in ("goal/id", "goal/a~1b")}
    settings = {"epsilon", "initial_std", "nonfinite", "emit", "exclude", "shape"}
    assert set(d) == paths | settings | {"count", "skipped"}
    for value in through_npz(d).values():
        assert value.dtype.kind in "fiU"
    single = filled(Normalizer(3, clip=1.0)).to_dict(flat=True)
    assert single["mean"].shape == (3,) and single["clip"] == 1.0


def test_values_are_in_full_precision_and_consistent():
    norm = filled(Normalizer(4, epsilon=4.0))
    d = norm.to_dict()
    rng = np.random.default_rng(0)
    mean = rng.random(4) * 1e3 + 0.1
    np.testing.assert_allclose(d["mean"], mean, rtol=2.0**-47)
    np.testing.assert_array_equal(d["variance"], d["M2"] / d["count"])
    np.testing.assert_array_equal(d["std"], np.sqrt(np.maximum(d["variance"], 4.0)))
    assert np.any(d["variance"] < 4) and np.any(d["std"] != d["std"].astype(np.float32))
    empty = Normalizer(2, initial_std=3.0).to_dict()
    assert (empty["std"].tolist(), empty["variance"].tolist()) == ([3, 3], [0, 0])


def test_the_export_is_enough_to_normalize_in_numpy():
    norm = Normalizer(5, clip=2.0)
    norm.set_statistics([3, -1e4, 0.1, 7, 1e-3], [1, 1e6, 1e-5, 0, 1e-12], 1000)
    d = norm.to_dict()
    rng = np.random.default_rng(1)
    x = np.float32(d["mean"] + d["std"] * rng.normal(size=(100, 5)) * 1.5)
    right = np.clip(
        (x.astype(np.float64) - d["mean"]) / d["std"], -d["clip"], d["clip"]
    )
    y = np.asarray(norm.normalize(x))
    assert np.all(np.abs(y - right) <= 4 * np.spacing(np.abs(np.float32(right))))
    assert np.any(np.abs(right) == 2.0)


def test_exact_gives_ints_where_numbers_are_whole():
    assert exact(np.float64(2**48 + 1)) == 2**48 + 1
    assert type(exact(np.float64(3))) is int and type(exact(np.float64(2.5))) is float
    assert math.isnan(exact(np.float64("nan")))
    assert exact(np.array([1.0, 2.0])).dtype == np.int64
    assert exact(np.array([1.0, 2.5])).tolist() == [1.0, 2.5]


# Refusals

GOOD = filled(Normalizer({"a": 2, "b": {"c": ()}})).to_dict()


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k not in names} | changes


BAD = {
    "no count": (without("count"), ValueError, "count is missing"),
    "no mean": (without("mean"), ValueError, "'mean/a' is missing"),
    "no M2": (without("M2", "variance"), ValueError, "'variance/a' is missing"),
    "no leaf": (without(mean={"a": [1, 2]}), ValueError, "'mean/b/c' is missing"),
    "None": (without(mean={"a": None, "b": {"c": 1}}), ValueError, "'mean/a' is miss"),
    "extra": (
        without(mean={"a": [1, 2], "b": {"c": 1, "d": 1}}),
        ValueError,
        "'mean/b/d' is not in the spec",
    ),
    "shape": (
        without(M2={"a": [1, 2, 3], "b": {"c": 1}}),
        ValueError,
        "M2/a has shape (3,); expected (2,)",
    ),
    "scalar": (without(M2={"a": 1, "b": {"c": 1}}), ValueError, "M2/a has shape ()"),
    "negative": (without(M2={"a": [1, -1], "b": {"c": 1}}), ValueError, "M2/a holds"),
    "count": (without(count=-3), ValueError, "count holds -3"),
    "count shape": (without(count=[3]), ValueError, "count has shape (1,)"),
    "torn": (without(count=0), ValueError, "count is 0 where mean['a'] is not"),
    "NaN": (
        without(mean={"a": [math.nan, 0], "b": {"c": 1}}),
        ValueError,
        "mean/a holds",
    ),
    "text": (without(mean={"a": "ab", "b": {"c": 1}}), TypeError, "mean/a is 'ab'"),
    "no mapping": ([1, 2], TypeError, "load_dict got list"),
}


@pytest.mark.parametrize("bad, error, words", BAD.values(), ids=BAD.keys())
def test_load_dict_refuses_by_name_and_changes_nothing(bad, error, words):
    norm = filled(Normalizer({"a": 2, "b": {"c": ()}}), seed=5)
    before = bits(norm)
    with pytest.raises(error) as caught:
        norm.load_dict(bad)
    assert words in str(caught.value)
    assert bits(norm) == before


def test_load_dict_takes_statistics_only():
    norm = Normalizer({"a": 2, "b": {"c": ()}}, clip=1.0, epsilon=0.5)
    norm.load_dict(GOOD | {"clip": 7.0, "epsilon": 3.0, "unknown": "setting"})
    assert (norm.clip, norm.epsilon, norm.count) == (1.0, 0.5, 2**24 + 1)


def test_load_dict_takes_a_variance_for_an_m2_and_no_skipped():
    norm = Normalizer({"a": 2, "b": {"c": ()}})
    norm.load_dict(without("M2", "skipped"))
    d = norm.to_dict()
    np.testing.assert_allclose(d["M2"]["a"], GOOD["M2"]["a"], rtol=1e-14)
    assert d["skipped"] == 0


@pytest.mark.parametrize("flat", [False, True])
def test_a_variance_that_was_edited_is_not_passed_over(flat):
    norm = Normalizer({"a": 2})
    norm.set_statistics(1.0, 4.0, 10)
    d = norm.to_dict(flat=flat)
    d |= {"variance/a": np.full(2, 5.0)} if flat else {"variance": {"a": [4.0, 5.0]}}
    before = bits(norm)
    with pytest.raises(ValueError, match="'variance/a' contradicts 'M2/a'"):
        norm.load_dict(d)
    assert bits(norm) == before
    norm.load_dict({k: v for k, v in d.items() if k.split("/")[0] != "M2"})
    assert norm.variance["a"].tolist() == ([5.0, 5.0] if flat else [4.0, 5.0])


def test_a_resumed_export_goes_on_as_if_it_had_not_stopped():
    norm = Normalizer(1)
    norm.update_statistics(jnp.array([[[0.0], [2.0]]]))
    again = Normalizer.from_dict(through_json(norm.to_dict()))
    for n in (norm, again):
        n.update_statistics(jnp.array([[[5.0], [9.0]]]))
    assert bits(again) == bits(norm)
    assert statistics(again) == ([4.0], [46.0], 4)


def test_a_count_beyond_the_integers_is_exact_and_does_not_wrap_around():
    assert exact(np.float64(1e30)) == int(1e30)
    assert exact(np.array([1e30, 2.0])).tolist() == [1e30, 2.0]
    assert exact(np.array([2.0**62, 2.0])).dtype == np.int64
