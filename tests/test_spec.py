# SPDX-License-Identifier: Apache-2.0
"""Laws of specs: every way to write one is the same, and what doesn't fit is named."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from nnx_norm.spec import Spec, parse, refuse_dtype
from nnx_norm.tree import keys_of, path_name

Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any


class Alike(str):
    """A key that can't be told from others of its kind by its name."""

    def __str__(self) -> str:
        return "same"


Struct = jax.ShapeDtypeStruct
KEY = jax.random.key(0)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
trees = st.recursive(  # of ShapeDtypeStructs and None, in nodes of every kind
    shapes.map(lambda s: Struct(s, jnp.float32)) | st.none(),
    lambda inner: (
        st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=2)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=6,
)


def of_shapes(tree: Any) -> Any:
    """The same spec by shapes: `(2, 3)` where there was an array of that shape."""
    return jax.tree.map(lambda leaf: leaf.shape, tree)


def numbered(spec: Spec) -> Any:
    return spec.unflatten(range(len(spec.kept)))


@hypothesis.given(trees)
def test_leaves_keep_the_order_and_the_shapes_that_jax_sees(tree):
    spec = parse(tree)
    assert spec.features == tuple(leaf.shape for leaf in jax.tree.leaves(tree))
    assert jax.tree.structure(numbered(spec)) == jax.tree.structure(tree)
    assert jax.tree.leaves(numbered(spec)) == list(range(len(spec.kept)))


@hypothesis.given(trees)
def test_shapes_structs_and_arrays_say_the_same(tree):
    spec = parse(tree)
    assert parse(jax.tree.map(lambda s: np.zeros(s.shape), tree)) == spec
    assert parse(jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.uint8), tree)) == spec
    assert parse(of_shapes(tree)) == spec
    assert hash(parse(tree)) == hash(spec)


@hypothesis.given(trees)
def test_flatten_is_the_inverse_of_unflatten(tree):
    spec = parse(tree)
    assert spec.flatten(numbered(spec), "mean") == list(range(len(spec.kept)))


@hypothesis.given(trees)
def test_a_tree_like_the_spec_fits_and_comes_back(tree):
    match = parse(tree).match(tree, "x")
    kept = [match.leaves[i] for i in match.kept]
    assert kept == jax.tree.leaves(tree)
    for others in (True, False):
        assert match.replace(kept, others=others) == tree


@hypothesis.given(trees, st.randoms())
def test_excluded_leaves_have_no_statistics_however_they_are_named(tree, random):
    paths = [keys_of(path) for path in parse(tree).paths]
    chosen = [path for path in paths if random.random() < 0.5]
    hypothesis.assume(() not in chosen)
    spec = parse(tree, chosen)
    leaves, shapes = len(paths), parse(tree).shapes
    expected = tuple(
        i for i in range(leaves) if paths[i] not in chosen and shapes[i] is not None
    )
    assert spec.kept == expected
    assert parse(tree, [path_name(path) for path in chosen]) == spec
    assert parse(tree, lambda path: path in chosen) == spec
    assert parse(tree, spec.excluded_names) == spec


@hypothesis.given(trees)
def test_without_their_excluded_leaves_trees_fit_in_part(tree):
    spec = parse(tree, lambda path: True)
    assert spec.kept == () and jax.tree.leaves(numbered(spec)) == []
    match = spec.match(jax.tree.map(lambda _: None, tree), "history", partial=True)
    assert match.kept == []
    whole = spec.match(tree, "x")
    assert whole.replace([], others=True) == tree


ONE_ARRAY = [3, (3,), [3], np.int64(3), np.zeros(3), Struct((3,), jnp.bfloat16)]


@pytest.mark.parametrize("shape", ONE_ARRAY, ids=repr)
def test_one_array_of_three_features(shape):
    assert parse(shape) == parse((3,)) and parse(shape).features == ((3,),)


@pytest.mark.parametrize(
    ("shape", "features"),
    [
        ((), ((),)),
        ([], ((),)),
        ((2, 3), ((2, 3),)),
        ({}, ()),
        (None, ()),
        ({"image": (64, 64, 3)}, ((64, 64, 3),)),
        ((np.zeros(2), np.zeros(3)), ((2,), (3,))),
        ([{"x": 2}, (1, 3)], ((2,), (1, 3))),
        ((Struct((), jnp.float32), (4,)), ((), (4,))),
        (Pair((2,), 3), ((2,), (3,))),
        (Point({"b": 1, "a": 2}, None), ((2,), (1,))),
        (0, ((0,),)),
        (np.float32(1.0), ((),)),
    ],
    ids=repr,
)
def test_what_is_a_shape_and_what_a_tree(shape, features):
    assert parse(shape).features == features


@pytest.mark.parametrize("kind", [OrderedDict, FrozenDict])
def test_the_kind_of_a_mapping_says_nothing(kind):
    spec = parse({"a": (1,), "b": {"c": 2, "d": 3}})
    nested = kind([("b", kind([("d", 3), ("c", 2)])), ("a", (1,))])
    assert parse(nested) == spec
    plain = spec.match({"a": 1, "b": {"c": 2, "d": 3}}, "x")
    other = spec.match(kind([("b", kind([("d", 3), ("c", 2)])), ("a", 1)]), "x")
    assert other == plain and type(other.replace([1, 2, 3], others=True)) is dict


@pytest.mark.parametrize(
    ("shape", "error", "named"),
    [
        ("abc", TypeError, "'abc'"),
        (1.5, TypeError, "1.5"),
        ({"a": {"b": 2.0}}, TypeError, "['a']['b']"),
        ({"a": True}, TypeError, "True"),
        ((2, -1), ValueError, "-1"),
        ({"a": np.zeros(2, np.complex64)}, TypeError, "complex64"),
        ({"a": KEY}, TypeError, "['a']"),
        ({"a": np.array(["x"])}, TypeError, "['a']"),
        ({Alike("a"): 2, Alike("b"): 3}, ValueError, "['same', 'same']"),
    ],
    ids=repr,
)
def test_what_is_no_shape_is_refused_by_name(shape, error, named):
    with pytest.raises(error) as raised:
        parse(shape)
    assert named in str(raised.value)


SPEC = {"goal": {"id": 2, "pos": 3}, "image": (4, 4), "none": None}


@pytest.mark.parametrize(
    ("exclude", "kept"),
    [
        ((), ("goal/id", "goal/pos", "image")),
        ("image", ("goal/id", "goal/pos")),
        (("image",), ("goal/id", "goal/pos")),
        ([("image",)], ("goal/id", "goal/pos")),
        (("goal/id", "image"), ("goal/pos",)),
        ([("goal", "id"), ("image",)], ("goal/pos",)),
        ("goal", ("image",)),
        (lambda path: path[0] == "goal", ("image",)),
        (lambda path: True, ()),
        (["goal", "image", "none"], ()),
    ],
)
def test_paths_of_leaves_subtrees_and_predicates(exclude, kept):
    spec = parse(SPEC, exclude)
    names = [path_name(keys_of(path)) for path in spec.paths]
    assert tuple(names[i] for i in spec.kept) == kept
    assert set(spec.excluded_names) == {"goal/id", "goal/pos", "image"} - set(kept)


def test_a_name_is_no_prefix_of_a_longer_name():
    assert parse({"go": 1, "goal": 2}, "go").features == ((2,),)


@pytest.mark.parametrize("index", ["0", (0,), 0], ids=repr)
def test_indices_of_tuples_are_paths(index):
    assert parse((np.zeros(2), np.zeros(3)), [index]).features == ((3,),)


@pytest.mark.parametrize(
    ("exclude", "error"),
    [("imag", ValueError), ([("goal", "x")], ValueError), ([1.5], TypeError)],
)
def test_a_path_that_does_not_exist_is_refused(exclude, error):
    with pytest.raises(error, match=r"exclude (names|holds) "):
        parse(SPEC, exclude)


x = {"goal": {"id": 1, "pos": 2}, "image": 3, "none": None}


def without(tree: dict[str, Any], *path: str) -> dict[str, Any]:
    if len(path) == 1:
        return {k: v for k, v in tree.items() if k != path[0]}
    return tree | {path[0]: without(tree[path[0]], *path[1:])}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (x | {"velocity": 4}, "x['velocity']"),
        (x | {"goal": 1}, "x['goal']"),
        (without(x, "goal", "pos"), "x['goal']['pos'] is missing"),
        (x | {"goal": {"id": 1, "pos": None}}, "x['goal']['pos'] is missing"),
        (x | {"none": 5}, "x['none'] must be None"),
        (x | {"goal": (1, 2)}, "x['goal']"),
        (5, "x is one int; expected a tree"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tree, named, partial):
    with pytest.raises(ValueError) as raised:
        parse(SPEC, "image").match(tree, "x", partial=partial)
    assert named in str(raised.value)


def test_sequences_of_another_type_are_refused():
    with pytest.raises(ValueError, match="structure"):
        parse((np.zeros(2), np.zeros(3))).match([1, 2], "x")


def test_only_a_partial_match_does_without_excluded_leaves():
    spec, history = parse(SPEC, "image"), without(x, "image")
    with pytest.raises(ValueError, match=r"x\['image'\] is missing"):
        spec.match(history, "x")
    for given in (history, history | {"image": None}, history | {"image": 3}):
        match = spec.match(given, "history", partial=True)
        assert [match.leaves[i] for i in match.kept] == [1, 2]


def test_others_pass_through_or_become_none():
    match = parse(SPEC, "image").match(x, "x")
    new = {"goal": {"id": 10, "pos": 20}, "none": None}
    assert match.replace([10, 20], others=True) == new | {"image": 3}
    assert match.replace([10, 20], others=False) == new | {"image": None}


@pytest.mark.parametrize("dtype", [bool, "u1", "i4", "f2", jnp.bfloat16, "f8", "i8"])
def test_real_numbers_are_accepted(dtype):
    refuse_dtype(jnp.dtype(dtype), "x")


OTHERS = [np.dtype(name) for name in ("c8", "U3", "O", "M8[s]")] + [KEY.dtype]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match=r"x\.y has dtype .*real numbers"):
        refuse_dtype(dtype, "x.y")


def test_an_excluded_leaf_may_hold_anything():
    keys = jax.eval_shape(lambda: jax.random.key(0))
    example = {"key": keys, "wave": jnp.zeros(2, jnp.complex64), "x": jnp.zeros(3)}
    assert parse(example, exclude=["key", "wave"]).features == ((3,),)
    for left in (["key"], ["wave"]):
        with pytest.raises(TypeError, match="Exclude it"):
            parse(example, exclude=left)


def test_a_printed_normalizer_shows_its_leaves():
    assert repr(parse(3)) == "Spec({one array: (3,)})"
    spec = parse({"goal": {"id": ()}, "image": (4, 4)}, exclude=("image",))
    assert repr(spec) == "Spec({goal/id: (), image: (4, 4)}, exclude image)"
