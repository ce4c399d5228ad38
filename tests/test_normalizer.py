# SPDX-License-Identifier: Apache-2.0
"""The forward pass and its inverse, for every dtype and every kind of tree."""

import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from ml_collections import ConfigDict
from support import EPS, Box, Config, Observation, Pair, bits

from nnx_norm import Normalizer

F = 3
MEAN, VARIANCE = np.array([1.0, -200.0, 0.03]), np.array([4.0, 1e4, 1e-4])


def known(shape: Any = F, count: float = 8, **settings: Any) -> Normalizer:
    norm = Normalizer(shape, **settings)
    norm.set_statistics(MEAN, VARIANCE, count)
    return norm


def rows(*lead: int, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(*lead, F))
    return (MEAN + np.sqrt(VARIANCE) * noise).astype(np.float32)


# Numbers


def test_before_any_sample_the_mean_is_zero_and_the_std_initial_std():
    x = jnp.array([[20.0, -5.0, 0.0]])
    assert Normalizer(F).normalize(x).tolist() == [[2.0, -0.5, 0.0]]
    other = Normalizer(F, initial_std=2.0, epsilon=100.0)
    assert other.normalize(x).tolist() == [[10.0, -2.5, 0.0]]
    assert other.denormalize(jnp.ones((1, F))).tolist() == [[2.0] * F]


def test_output_is_deviation_over_std():
    x = rows(64)
    right = (x - MEAN) / np.sqrt(VARIANCE)
    np.testing.assert_allclose(known().normalize(x), right, rtol=0, atol=8 * EPS)


@pytest.mark.parametrize("epsilon, right", [(1e-4, 100.0), (0.25, 2.0)])
def test_epsilon_is_the_floor_of_the_variance(epsilon, right):
    norm = Normalizer(1, epsilon=epsilon)
    norm.set_statistics(mean=3.0, variance=0.0, count=5)
    assert float(norm.normalize(jnp.array([4.0]))[0]) == pytest.approx(right)
    assert float(norm.std[0]) == pytest.approx(1 / right)
    assert float(norm.denormalize(jnp.array([right]))[0]) == pytest.approx(4.0)
    above = known(epsilon=epsilon / 1e9)  # a floor, not added
    np.testing.assert_allclose(above.std, np.sqrt(VARIANCE), rtol=EPS)


def test_a_dead_feature_is_centred_and_finite():
    dead = Normalizer(1, clip=5.0)
    dead.update_statistics(jnp.zeros((10, 10, 1)))
    assert dead.normalize(jnp.array([255.0])).tolist() == [5.0]
    constant = Normalizer(1)
    constant.update_statistics(jnp.full((10, 10, 1), 7.0))
    assert constant.normalize(jnp.array([7.0])).tolist() == [0.0]
    assert float(constant.normalize(jnp.array([8.0]))[0]) == pytest.approx(1000.0)


def test_clip_bounds_the_output_and_zero_and_infinity_are_clips():
    x = rows(64)
    whole = np.asarray(known().normalize(x))
    clipped = known(clip=0.5).normalize(x)
    np.testing.assert_array_equal(clipped, np.clip(whole, -0.5, 0.5))
    assert np.any(np.abs(whole) > 0.5)
    np.testing.assert_array_equal(known(clip=math.inf).normalize(x), whole)
    np.testing.assert_array_equal(known(clip=0).normalize(x), 0 * x)
    np.testing.assert_array_equal(known(clip=0)((), x).output, 0 * x)


def test_denormalize_does_not_clip():
    y = jnp.array([[-20.0, 3.0, 100.0]])
    right = np.asarray(y) * np.sqrt(VARIANCE) + MEAN
    np.testing.assert_allclose(known(clip=0.5).denormalize(y), right, rtol=4 * EPS)


@hypothesis.given(st.integers(0, 2**32 - 1))
def test_denormalize_is_the_inverse_of_normalize(seed):
    rng = np.random.default_rng(seed)
    norm = Normalizer(F)
    mean, variance = rng.normal(size=F) * 1e3, 10.0 ** rng.uniform(-12, 6, F)
    norm.set_statistics(mean, variance * rng.integers(0, 2, F), 10)  # some are dead
    x = np.float32(mean + np.sqrt(variance) * rng.normal(size=(5, F)))
    back = norm.denormalize(norm.normalize(x))
    scale = np.abs(x) + np.abs(mean)
    assert np.all(np.abs(np.asarray(back) - x) <= 4 * EPS * scale)


def test_nan_and_infinity_are_not_hidden():
    x = jnp.array([[jnp.nan, jnp.inf, -jnp.inf]])
    for norm in (known(), known(nonfinite="propagate")):
        np.testing.assert_array_equal(norm.normalize(x), x)
    clipped = known(clip=2.0).normalize(x)
    np.testing.assert_array_equal(clipped, [[np.nan, 2.0, -2.0]])


def test_the_residual_takes_part_in_both_directions():
    mean = 1.0 + 2.0**-25  # float32 rounds it to 1
    norm = Normalizer(1, epsilon=1e-20)
    norm.set_statistics(np.array([mean]), 2.0**-50, 1e6)
    assert norm.mean.get_value().tolist() == [1.0]
    assert norm.normalize(jnp.float32([1.0])).tolist() == [-1.0]
    # 2^-25 + 1.5 * 2^-25 rounds up to the next float32; without the residual, down.
    assert norm.denormalize(jnp.float32([1.5])).tolist() == [1.0 + 2.0**-23]


# Dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floats_come_out_in_their_dtype_computed_in_float32(dtype):
    x = jnp.asarray(rows(64)).astype(dtype)
    out = known()((), x)
    right = (np.asarray(x, np.float64) - MEAN) / np.sqrt(VARIANCE)
    assert out.output.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    error = np.abs(np.asarray(out.output, np.float64) - right)
    assert np.all(error <= eps * np.abs(right) + 8 * EPS)
    assert known().denormalize(x).dtype == dtype


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "uint32"])
def test_integers_and_bool_come_out_as_float32(dtype):
    values = [[0, 1, 1], [1, 0, 1]] if dtype == "bool" else [[0, 10, 100], [7, 1, 9]]
    x = jnp.array(values, dtype)
    norm = Normalizer(F)
    norm.set_statistics([15.0, -2.0, 1e5], [25.0, 4.0, 1e4], 3)
    right = (np.array(values) - [15, -2, 1e5]) / [5, 2, 100]
    for y in (norm.normalize(x), norm((), x).output):
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, right, rtol=4 * EPS)
    assert norm.denormalize(x).dtype == jnp.float32


def test_large_integers_keep_their_last_bit():
    norm = Normalizer(1)
    norm.set_statistics(mean=2.0**30, variance=1.0, count=4)
    x = jnp.array([[2**30 + 1], [2**30 - 3]], jnp.int32)
    assert norm.normalize(x).tolist() == [[1.0], [-3.0]]


@pytest.mark.parametrize("x64", [False, True])
def test_float64_comes_out_in_it_where_jax_has_it(x64):
    with jax.enable_x64(x64):
        norm = known()
        x = rows(4).astype(np.float64)
        out = norm((), x)
        assert out.output.dtype == (jnp.float64 if x64 else jnp.float32)
        assert out.rollout_extras.dtype == np.float64
        assert norm.denormalize(x).dtype == out.output.dtype
        right = (x - MEAN) / np.sqrt(VARIANCE)
        np.testing.assert_allclose(out.output, right, rtol=8 * EPS, atol=8 * EPS)
        norm.update_statistics(jnp.asarray(x)[None])
        assert {dtype for dtype, *_ in bits(norm).values()} == {"float32"}


def test_float64_inputs_lose_no_digits_to_the_mean():
    with jax.enable_x64(True):
        norm = Normalizer(1)
        norm.set_statistics(mean=1.0 + 2.0**-25, variance=1.0, count=2)
        y = norm.normalize(jnp.array([1.0 + 2.0**-25 + 2.0**-40]))
        assert float(y[0]) == 2.0**-40


# What a call gives back


def test_a_call_gives_the_contract_of_the_policy_graph():
    norm, state, x = known(), ("any", "state"), jnp.asarray(rows(4))
    out = norm(state, x)
    assert out.next_state is state
    assert norm.initialize_state(4) == ()
    assert out.metrics == {}
    loss = out.regularization_loss
    assert (loss.shape, loss.dtype, loss.weak_type) == ((), jnp.float32, False)
    np.testing.assert_array_equal(out.output, norm.normalize(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "uint8", "bool"])
def test_extras_are_the_raw_input_bit_for_bit(dtype):
    x = jnp.asarray(rows(4)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        x = x.at[0, 0].set(jnp.nan).at[1, 1].set(-0.0)
    extras = known()((), x).rollout_extras
    assert extras.dtype == x.dtype
    assert np.asarray(extras).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_replay_returns_what_came_in_untouched(emit):
    norm, x = known(emit=emit), jnp.asarray(rows(4))
    for extras in ({"anything": object()}, "replay", (), jnp.zeros(2), False):
        out = norm((), x, extras)
        assert out.rollout_extras is extras
        np.testing.assert_array_equal(out.output, norm.normalize(x))


def test_equal_inputs_have_equal_outputs_until_the_update():
    norm = Normalizer(1)
    norm.update_statistics(jnp.array([[[0.0], [2.0]]]))
    acted = norm((), jnp.array([[3.0]]))
    replayed = norm((), acted.rollout_extras, acted.rollout_extras)
    assert acted.output.tolist() == replayed.output.tolist() == [[2.0]]
    norm.update_statistics(acted.rollout_extras[None])
    assert norm((), jnp.array([[3.0]])).output.tolist() != [[2.0]]


@pytest.mark.parametrize("lead", [(), (2,), (0,), (2, 0, 5), (1, 2, 3)])
def test_normalize_takes_any_leading_axes(lead):
    x = jnp.ones((*lead, F))
    right = np.broadcast_to(known().normalize(jnp.ones(F)), x.shape)
    np.testing.assert_array_equal(known().normalize(x), right)
    assert known().denormalize(x).shape == x.shape


# Trees


@flax.struct.dataclass
class Struct:
    pos: Any
    vel: Any


def example(make: Any) -> Any:
    """A tree of two leaves of the shapes (2,) and (3,) out of `make(shape)`."""
    return {"x": make((2,)), "y": make((3,))}


SPECS: dict[str, tuple[Any, Any]] = {  # the spec, and the same tree around two leaves
    "dict": (example(tuple), lambda x, y: {"x": x, "y": y}),
    "ints": ({"x": 2, "y": np.int64(3)}, lambda x, y: {"x": x, "y": y}),
    "lists": ({"x": [2], "y": [3]}, lambda x, y: {"x": x, "y": y}),
    "OrderedDict": (
        OrderedDict(y=(3,), x=(2,)),
        lambda x, y: OrderedDict([("y", y), ("x", x)]),
    ),
    "FrozenDict": (
        FrozenDict(example(tuple)),
        lambda x, y: FrozenDict({"y": y, "x": x}),
    ),
    "MappingProxyType": (
        MappingProxyType(example(tuple)),
        lambda x, y: MappingProxyType({"y": y, "x": x}),
    ),
    "Config": (Config(example(tuple)), lambda x, y: Config({"y": y, "x": x})),
    "nested": (
        {"a": {"b": {"x": 2}}, "y": 3},
        lambda x, y: {"a": OrderedDict(b={"x": x}), "y": y},
    ),
    "tuple": ((jnp.zeros(2), jnp.zeros(3)), lambda x, y: (x, y)),
    "list": (
        [jax.ShapeDtypeStruct((2,), jnp.float32), np.zeros(3)],
        lambda x, y: [x, y],
    ),
    "mixed list": ([{"x": 2}, (3,)], lambda x, y: [{"x": x}, y]),
    "named tuple": (Pair(jnp.zeros(2), jnp.zeros(3)), Pair),
    "dataclass": (Observation(jnp.zeros(2), jnp.zeros(3)), Observation),
    "flax dataclass": (Struct(jnp.zeros(2), jnp.zeros(3)), Struct),
    "registered node": (Box((jnp.zeros(2), jnp.zeros(3))), lambda x, y: Box((x, y))),
    "mapping in a tuple": (
        (OrderedDict(x=jnp.zeros(2)), jnp.zeros(3)),
        lambda x, y: (Config({"x": x}), y),
    ),
    "None leaf": (
        {"x": 2, "n": None, "y": 3},
        lambda x, y: {"x": x, "n": None, "y": y},
    ),
    "empty node": (
        {"x": 2, "e": {}, "y": 3},
        lambda x, y: {"x": x, "e": OrderedDict(), "y": y},
    ),
}
every_spec = pytest.mark.parametrize("spec, tree", SPECS.values(), ids=SPECS.keys())


def leaves(tree: Any) -> list[np.ndarray]:
    """The two leaves of a tree of `SPECS`, x before y in all of them."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def plain(tree: Any) -> Any:
    """The tree with plain dicts for mappings: the structure that comes out."""
    if hasattr(tree, "keys"):
        return {k: plain(tree[k]) for k in tree.keys()}
    if type(tree) in (list, tuple):
        return type(tree)(plain(v) for v in tree)
    return tree


@every_spec
def test_every_kind_of_tree_is_folded_and_normalized(spec, tree):
    norm = Normalizer(spec)
    x = np.array([[[0.0, 10.0], [4.0, 30.0]]], np.float32)
    y = np.array([[[1.0, 1.0, 5.0], [3.0, 1.0, -5.0]]], np.float32)
    for history in (tree(x, y), tree(x + 2, y * 3)):
        norm.update_statistics(history)
    right = [np.concatenate([x, x + 2]), np.concatenate([y, y * 3])]
    for mean, variance, std, h in zip(
        *map(leaves, (norm.mean.get_value(), norm.variance, norm.std)),
        right,
        strict=True,
    ):
        np.testing.assert_allclose(mean, h.mean((0, 1)), rtol=EPS)
        np.testing.assert_allclose(variance, h.var((0, 1)), rtol=2 * EPS)
        np.testing.assert_allclose(std, h.std((0, 1)), rtol=2 * EPS)
    out = norm((), tree(jnp.asarray(x[0]), jnp.asarray(y[0])))
    structure = jax.tree.structure(plain(tree(0, 0)))
    for given in (out.output, out.rollout_extras, norm.mean.get_value(), norm.std):
        assert jax.tree.structure(given) == structure
    means, stds = leaves(norm.mean.get_value()), leaves(norm.std)
    for got, h, mean, std in zip(leaves(out.output), (x, y), means, stds, strict=True):
        np.testing.assert_allclose(got, (h[0] - mean) / std, rtol=4 * EPS)
    for got, h in zip(leaves(out.rollout_extras), (x, y), strict=True):
        assert got.tobytes() == h[0].tobytes()
    back = leaves(norm.denormalize(out.output))
    np.testing.assert_allclose(back[0], x[0], atol=1e-5)


def test_leaves_are_paired_by_key_and_not_by_position():
    norm = Normalizer({"a": (1,), "b": (1,)})
    b, a = jnp.array([[[10.0], [30.0]]]), jnp.array([[[1.0], [3.0]]])
    norm.update_statistics(OrderedDict([("b", b), ("a", a)]))
    assert {k: v.tolist() for k, v in norm.mean.get_value().items()} == {
        "a": [2.0],
        "b": [20.0],
    }
    out = norm.normalize(OrderedDict([("b", b), ("a", a)]))
    assert type(out) is dict and out["b"].tolist() == out["a"].tolist()


def test_config_dict_of_ml_collections_is_a_mapping():
    norm = Normalizer(ConfigDict({"a": {"b": 1}}))
    out = norm.normalize(ConfigDict({"a": {"b": jnp.array([[20.0]])}}))
    assert jax.tree.map(lambda v: v.tolist(), out) == {"a": {"b": [[2.0]]}}


@pytest.mark.parametrize(
    "shape, right", [((2, 3), (2, 3)), ([2, 3], (2, 3)), ((), ()), (0, (0,))]
)
def test_ints_and_sequences_of_ints_are_one_array(shape, right):
    norm = Normalizer(shape)
    assert norm.mean.get_value().shape == norm.M2.get_value().shape == right
    norm.update_statistics(jnp.ones((2, 2, *right)))
    norm.update_statistics(jnp.full((2, 2, *right), 3.0))
    np.testing.assert_array_equal(norm.mean.get_value(), np.full(right, 2.0))
    np.testing.assert_array_equal(norm.variance, np.full(right, 1.0))
    assert norm.normalize(jnp.ones((5, *right))).shape == (5, *right)


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_a_tree_without_leaves_is_the_identity(emit):
    norm = Normalizer({}, emit=emit)
    out = norm((), {})
    assert out.output == {}
    history = jax.tree.map(lambda v: v[None], out.rollout_extras)
    before = bits(norm)
    norm.update_statistics(history)
    assert bits(norm) == before
    assert (norm.count, norm.mean.get_value()) == (0, {})


# Refusals


@pytest.mark.parametrize(
    "shape", [1.5, "abc", {"a": "b"}, {"a": object()}, True, (2, 1.0), (True, 2)]
)
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(TypeError, match="shape"):
        Normalizer(shape)


def test_negative_dimensions_and_complex_leaves_are_refused():
    with pytest.raises(ValueError, match=r"shape\['a'\].*negative"):
        Normalizer({"a": (2, -1)})
    with pytest.raises(TypeError, match=r"shape\['a'\].*complex64"):
        Normalizer({"a": jnp.zeros(2, jnp.complex64)})


@pytest.mark.parametrize(
    "setting, error",
    [
        ({"epsilon": 0}, ValueError),
        ({"epsilon": -1e-6}, ValueError),
        ({"epsilon": math.nan}, ValueError),
        ({"epsilon": 1e-50}, ValueError),
        ({"epsilon": "1"}, TypeError),
        ({"initial_std": 0.0}, ValueError),
        ({"initial_std": -1}, ValueError),
        ({"clip": -0.1}, ValueError),
        ({"clip": math.nan}, ValueError),
        ({"max_count": 0}, ValueError),
        ({"decay": 0}, ValueError),
        ({"decay": 1.01}, ValueError),
        ({"decay": 0.9, "max_count": 10}, ValueError),
        ({"nonfinite": "drop"}, ValueError),
        ({"emit": "input"}, ValueError),
        ({"axis_name": 3}, TypeError),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, error):
    with pytest.raises(error, match=next(iter(setting))):
        Normalizer(1, **setting)


def test_settings_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        Normalizer(1, 1e-6)  # pyright: ignore[reportCallIssue]


TREE = {"a": 4, "b": {"c": (2, 3)}}


@pytest.mark.parametrize(
    "x, words",
    [
        ({"a": jnp.zeros((2, 1)), "b": {"c": jnp.zeros((2, 2, 3))}},
         ("x['a']", "(2, 1)", "(*lead, 4)", "(B, 4)", "(T, B, 4)")),
        ({"a": jnp.zeros(()), "b": {"c": jnp.zeros((2, 2, 3))}},
         ("x['a']", "()", "(*lead, 4)")),
        ({"a": jnp.zeros((2, 4)), "b": {"c": jnp.zeros((2, 3, 2))}},
         ("x['b']['c']", "(2, 3, 2)", "(*lead, 2, 3)")),
        ({"a": jnp.zeros((2, 4))}, ("x['b']['c']", "missing", "b/c: (2, 3)")),
        ({"a": jnp.zeros((2, 4)), "b": None}, ("x['b']",)),
        ({"a": None, "b": {"c": jnp.zeros((2, 2, 3))}}, ("x['a']", "missing")),
        ({"a": jnp.zeros((2, 4)), "b": {"c": jnp.zeros((2, 2, 3)), "d": jnp.ones(2)}},
         ("x['b']['d']", "not in the normalizer's spec", "Leave it out")),
        (jnp.zeros((2, 4)), ("x", "a: (4,)")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_was_expected(x, words):
    norm = Normalizer(TREE)
    for call in (norm.normalize, lambda x: norm((), x)):
        with pytest.raises(ValueError) as error:
            call(x)
        assert all(word in str(error.value) for word in words)
    with pytest.raises(ValueError) as error:
        norm.denormalize(x)
    assert words[0].replace("x", "y", 1) in str(error.value)


@pytest.mark.parametrize(
    "bad", ["text", 1j, jnp.zeros((2, 4), jnp.complex64), object()]
)
def test_what_holds_no_real_numbers_is_a_type_error(bad):
    with pytest.raises(TypeError, match=r"^x\['a'\]"):
        Normalizer({"a": 4}).normalize({"a": bad})


def test_containers_of_another_kind_are_refused():
    norm = Normalizer((jnp.zeros(2), jnp.zeros(3)))
    with pytest.raises(ValueError, match="x has the structure .*; expected"):
        norm.normalize([jnp.zeros((1, 2)), jnp.zeros((1, 3))])


def test_python_numbers_are_scalar_leaves():
    norm = Normalizer({"a": ()})
    assert norm.normalize({"a": 20.0})["a"] == 2.0
    assert norm.normalize({"a": 20})["a"].dtype == jnp.asarray(0.0).dtype
