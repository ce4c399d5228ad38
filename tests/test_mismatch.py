# SPDX-License-Identifier: Apache-2.0
"""A tree that doesn't fit is told in what, and what may have been meant."""

from collections import OrderedDict

import numpy as np
import pytest
from support import Box, Config, Pair

from nnx_norm.modules import StatefulModuleOutput
from nnx_norm.spec import parse

ROW = np.zeros(3)
TUPLE, NAMED = parse((ROW, ROW)), parse(Pair(ROW, ROW))


@pytest.mark.parametrize(
    ("spec", "tree", "words"),
    [
        (parse(3), {"a": 1}, ("x is a dict with x['a']", "{one array: (3,)}", "leaf")),
        (parse(3), OrderedDict(a=1), ("x is a OrderedDict with x['a']",)),
        (parse(3), Config({"a": {"b": 1}}), ("x is a Config with x['a']['b']",)),
        (parse(3), {}, ("x is a dict with nothing in it",)),
        (parse(3), (), ("x is a tuple with nothing", "normalizer(state, x)")),
        (parse(3), [1, 2], ("x is a list with x[0], x[1]", "Stack a list of steps")),
        (parse(3), Box(1), ("x is a Box with x",)),
        (parse(3), None, ("x is missing (it is None)", "Pass it")),
        (
            parse(3),
            StatefulModuleOutput((), 1, 2, {}, 3),
            ("x is a StatefulModuleOutput", "Pass its rollout_extras"),
        ),
        (parse({"a": 3, "b": 3}), 5, ("x is one int", "keys ['a', 'b']")),
        (parse({"a": 3}), ROW, ("x is one array of shape (3,)", "keys ['a']")),
        (parse({"a": 3}), None, ("x is None; expected a tree",)),
        (parse({"a": 3}), [{"a": 1}], ("x[0]['a'] is not in", "Stack")),
        (parse({"a": 3}), (1,), ("x[0] is not in", "{a: (3,)}")),
        (TUPLE, ROW, ("x is one array", "a tuple as the normalizer was made with")),
        (NAMED, ROW, ("x is one array", "a Pair as the normalizer was made with")),
        (TUPLE, (1,), ("x[1] is missing", "`exclude` it")),
        (TUPLE, (1, 2, 3), ("x[2] is not in", "{0: (3,), 1: (3,)}")),
        (TUPLE, Pair(1, 2), ("x.first is not in",)),
    ],
)
def test_what_differs_is_named_with_the_fix(spec, tree, words):
    with pytest.raises(ValueError) as caught:
        spec.match(tree, "x")
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_excluded_leaf_belongs_in_a_forward_pass():
    spec = parse({"a": 3, "image": 3}, exclude=["image"])
    with pytest.raises(ValueError, match=r"x\['image'\] is missing.*forward pass"):
        spec.match({"a": 1}, "x")
    spec.match({"a": 1}, "history", partial=True)


@pytest.mark.parametrize("empty", [None, {}, {"a": None}])
def test_specs_without_leaves_take_their_like(empty):
    assert parse(empty).match(empty, "x").kept == []
    with pytest.raises(ValueError, match="x"):
        parse(empty).match({"a": 1}, "x")
