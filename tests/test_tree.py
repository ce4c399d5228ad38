# SPDX-License-Identifier: Apache-2.0
"""Laws of trees: one kind of mapping, and a name of its own for every path."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.tree_util import tree_flatten_with_path

from nnx_norm import Normalizer
from nnx_norm.tree import canonicalize, is_mapping, is_none, keys_of, path_name

Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    c: int


class Duck:
    """A mapping by its methods only, like ml_collections.ConfigDict."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def keys(self) -> Any:
        return self._items.keys()

    def __getitem__(self, key: str) -> Any:
        return self._items[key]


def backwards(items: dict[str, Any]) -> OrderedDict[str, Any]:
    return OrderedDict(reversed(items.items()))


MAPPINGS = {
    "dict": dict,
    "OrderedDict": backwards,
    "defaultdict": lambda items: defaultdict(list, items),
    "FrozenDict": FrozenDict,
    "MappingProxyType": MappingProxyType,
    "duck": lambda items: Duck(**items),
    "nnx.State": nnx.State,
}
kinds = pytest.mark.parametrize("kind", MAPPINGS.values(), ids=MAPPINGS)

keys = st.text("ab/~01", max_size=4)
trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def with_mappings(tree: Any, kind: Any) -> Any:
    """`tree`, with every dict in it made a `kind`."""
    if isinstance(tree, dict):
        return kind({k: with_mappings(v, kind) for k, v in tree.items()})
    if isinstance(tree, Pair):
        return Pair(*(with_mappings(v, kind) for v in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_mappings(v, kind) for v in tree)
    return tree


@hypothesis.given(trees)
def test_canonical_trees_stay_as_they_are(tree):
    assert canonicalize(tree) == tree
    assert jax.tree.structure(canonicalize(tree)) == jax.tree.structure(tree)


@pytest.mark.parametrize("kind", ["OrderedDict", "MappingProxyType"])
@hypothesis.given(tree=trees)
def test_mappings_of_every_kind_become_one(kind, tree):
    same = canonicalize(with_mappings(tree, MAPPINGS[kind]))
    assert same == tree
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    assert jax.tree.leaves(same) == jax.tree.leaves(tree)


@kinds
def test_mappings_become_dicts_at_any_depth(kind):
    tree = (kind({"b": Pair(kind({"x": 1}), None), "a": [kind({}), 2]}),)
    plain = canonicalize(tree)
    assert plain == ({"b": Pair({"x": 1}, None), "a": [{}, 2]},)
    assert type(plain[0]) is type(plain[0]["b"].left) is type(plain[0]["a"][0]) is dict


@kinds
def test_mappings_are_known_by_their_methods(kind):
    assert is_mapping(kind({"a": 1}))


@pytest.mark.parametrize(
    "x", [None, 1, "ab", (1,), [1], Pair(1, 2), np.zeros(2), jnp.zeros(2), dict]
)
def test_other_things_are_no_mappings(x):
    assert not is_mapping(x)


def test_a_mapping_stays_what_it_was():
    given = OrderedDict(b=OrderedDict(x=1), a=2)
    canonicalize(given)
    assert list(given) == ["b", "a"] and type(given["b"]) is OrderedDict


def test_none_is_the_only_none():
    assert is_none(None)
    assert not any(is_none(x) for x in (0, (), {}, False, np.zeros(0)))


def test_keys_are_plain():
    tree = {"a": [Pair(1, {7: 2})], "b": (Point(c=3),)}
    paths = [keys_of(path) for path, _ in tree_flatten_with_path(tree)[0]]
    assert paths == [("a", 0, "left"), ("a", 0, "right", 7), ("b", 0, "c")]


paths = st.lists(keys, min_size=1, max_size=4).map(tuple)


@hypothesis.given(paths, paths)
def test_different_paths_have_different_names(a, b):
    assert (path_name(a) == path_name(b)) == (a == b)


@hypothesis.given(paths, paths)
def test_a_path_begins_with_its_parents_name(parent, child):
    assert path_name(parent + child) == f"{path_name(parent)}/{path_name(child)}"
    # Escaped as in RFC 6901, so that reading a name backwards gives its path.
    read = [
        k.replace("~1", "/").replace("~0", "~") for k in path_name(child).split("/")
    ]
    assert tuple(read) == child


@pytest.mark.parametrize("keys", [(1, "3"), ("a", None), ("a", ("b",))])
def test_keys_that_jax_cannot_sort_are_refused_by_name(keys: Any):
    mapping = {"goal": dict.fromkeys(keys, 2)}
    with pytest.raises(ValueError, match="has the keys .* can't sort; expected keys"):
        canonicalize(mapping)
    with pytest.raises(ValueError, match="can't sort"):
        Normalizer(mapping)
    with pytest.raises(ValueError, match="can't sort"):
        Normalizer({"goal": 2}).normalize(mapping)


def test_keys_of_two_types_that_sort_are_taken():
    assert canonicalize({1: "a", 2.5: "b"}) == {1: "a", 2.5: "b"}
