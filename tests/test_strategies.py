# SPDX-License-Identifier: Apache-2.0
"""What is drawn for the machines: any tree reads alike, however it is written."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from nnx_norm import spec
from nnx_norm.tree import canonicalize, path_name
from tests.strategies import (
    DAMAGES,
    FORMS,
    KINDS,
    MAPPINGS,
    Layout,
    forms,
    layouts,
    make_samples,
    mappings,
)

SHAPES = ((2,), ())
ANY = hypothesis.settings(
    phases=[hypothesis.Phase.generate], derandomize=True, database=None
)
trees = st.integers(0, 2).flatmap(lambda n: layouts(n).map(lambda tree: (n, tree)))


@hypothesis.given(trees, forms, mappings)
def test_a_spec_reads_alike_however_it_is_written(
    drawn: tuple[int, Layout], form: str, mapping: str
):
    leaves, tree = drawn
    given = [FORMS[form](shape) for shape in SHAPES[:leaves]]
    excluded = tree.excluded()
    parsed = spec.parse(tree.build(given, FORMS[form]((4,)), mapping), excluded)
    assert parsed.features == SHAPES[:leaves]
    assert parsed.excluded_names == tuple(map(path_name, excluded))
    plain = [FORMS["struct"](shape) for shape in SHAPES[:leaves]]
    again = spec.parse(
        tree.build(plain, FORMS["struct"]((4,))), lambda path: path in excluded
    )
    assert again == parsed and hash(again) == hash(parsed)


@hypothesis.given(trees, mappings)
def test_any_tree_is_matched_and_put_together_again(
    drawn: tuple[int, Layout], mapping: str
):
    leaves, tree = drawn
    excluded = tree.excluded()
    plain = [FORMS["struct"](shape) for shape in SHAPES[:leaves]]
    parsed = spec.parse(tree.build(plain, FORMS["struct"]((4,))), excluded)
    values = [f"leaf {i}" for i in range(leaves)]
    given = tree.build(values, "out", mapping)
    match = parsed.match(given, "x")
    assert [match.leaves[i] for i in match.kept] == values
    assert match.replace(values, others=True) == canonicalize(given)
    assert parsed.flatten(parsed.unflatten(values), "x") == values
    without = tree.build(values, None, mapping)
    assert parsed.flatten(without, "x") == values
    if leaves:
        with pytest.raises(ValueError, match="missing"):
            parsed.match(tree.build([None] * leaves, "out", mapping), "x")


@pytest.mark.parametrize("kind", ["mapping", "tuple", "list", "pair", "observation"])
def test_every_kind_of_container_is_drawn(kind: str):
    tree = hypothesis.find(layouts(2), lambda tree: kind in tree.kinds(), settings=ANY)
    assert len(jax.tree.leaves(canonicalize(tree.build([1, 2])))) == 2


@pytest.mark.parametrize("what", ["out", None, "empty"])
def test_excluded_none_and_empty_nodes_are_drawn(what: str | None):
    def shown(tree: Layout) -> bool:
        return {
            "out": bool(tree.excluded()),
            None: "None" in str(tree.build([1, 1], "x")),
            "empty": "{}" in str(tree.build([1, 1], "x")),
        }[what]

    assert shown(hypothesis.find(layouts(2), shown, settings=ANY))


def test_config_dict_is_among_the_mappings():
    assert "ConfigDict" in MAPPINGS


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("damage", sorted(set(DAMAGES)))
def test_samples_have_their_shapes_and_their_damage(kind, damage):
    s = make_samples(kind, SHAPES, 3, 1.0, 1.0, damage)
    assert [v.shape for v in s.leaves] == [(*kind.lead, 2), kind.lead]
    assert [v.dtype.name for v in s.leaves] == list(kind.dtypes)
    floats = [v for v in s.leaves if "float" in v.dtype.name]
    broken = sum(int((~np.isfinite(v)).sum()) for v in floats)
    hurt = s.leaves[:1] if damage == "nan" else s.leaves
    widths = [
        v[(0,) * len(kind.lead)].size if damage == "row" else 1 for v in hurt if v.size
    ]
    held = ["float" in v.dtype.name for v in hurt if v.size]
    expected = sum(w for w, h in zip(widths, held, strict=True) if h)
    assert broken == (0 if damage == "none" else expected)
    assert s.weight().shape == kind.lead
