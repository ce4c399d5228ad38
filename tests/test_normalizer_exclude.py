# SPDX-License-Identifier: Apache-2.0
"""Excluded leaves pass through, have no statistics and need not be in a history."""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import bits

from nnx_norm import Normalizer

IMAGE = (4, 4, 3)
EXCLUDES = [("image",), "image", [("image",)], lambda path: path[0] == "image"]


@pytest.mark.parametrize("exclude", EXCLUDES, ids=["path", "str", "keys", "predicate"])
@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_excluded_leaves_pass_through_untouched(exclude, emit):
    norm = Normalizer({"pos": 2, "image": IMAGE}, exclude=exclude, emit=emit)
    image = jnp.full((5, *IMAGE), 200, jnp.uint8)
    out = norm((), {"pos": jnp.full((5, 2), 20.0), "image": image})
    assert out.output["image"] is image
    assert out.output["pos"].tolist() == [[2.0, 2.0]] * 5
    assert norm.mean.get_value()["image"] is norm.M2.get_value()["image"] is None
    assert norm.std["image"] is norm.variance["image"] is None
    extras = out.rollout_extras
    pairs = [extras] if emit == "inputs" else [extras.mean, extras.M2]
    assert all(pair["image"] is None for pair in pairs)
    assert norm.denormalize(out.output)["image"] is image


def test_a_history_may_hold_excluded_leaves_or_not():
    pos, image = jnp.array([[[0.0], [2.0]]]), jnp.zeros((1, 2, *IMAGE))
    for extra in ({"image": image}, {"image": None}, {}, {"image": "anything"}):
        norm = Normalizer({"pos": 1, "image": IMAGE}, exclude="image")
        norm.update_statistics({"pos": pos, **extra})
        norm.update_statistics(OrderedDict(pos=pos, **extra))
        assert (norm.count, norm.mean.get_value()["pos"].tolist()) == (4, [1.0])


def test_tuples_hold_none_for_excluded_leaves():
    spec = (jnp.zeros(1), jnp.zeros(IMAGE))
    norm = Normalizer(spec, exclude=[(1,)])
    out = norm((), (jnp.ones((2, 1)), jnp.ones((2, *IMAGE))))
    assert out.rollout_extras[1] is None
    norm.update_statistics((out.rollout_extras[0][None], None))
    norm.update_statistics((out.rollout_extras[0][None], jnp.ones((1, 2, *IMAGE))))
    assert norm.count == 4


def test_exclude_takes_nested_paths_and_subtrees():
    spec = {"goal": {"id": 1, "pos": 2}, "hand": (jnp.zeros(3), jnp.zeros(4))}

    def kept(exclude: Any) -> list[tuple[int, ...]]:
        norm = Normalizer(spec, exclude=exclude)
        return [leaf.shape for leaf in jax.tree.leaves(norm.mean.get_value())]

    assert kept(["goal/id"]) == kept([("goal", "id")]) == [(2,), (3,), (4,)]
    assert kept(["goal"]) == kept([("goal",)]) == [(3,), (4,)]
    assert kept(["hand/1", "goal/pos"]) == kept([("hand", 1), "goal/pos"])
    assert kept(["hand/1", "goal/pos"]) == [(1,), (3,)]
    assert kept(lambda path: path[-1] in ("id", 0)) == [(2,), (4,)]
    assert kept(()) == [(1,), (2,), (3,), (4,)]


def test_a_predicate_sees_tuples_of_keys_once_and_is_not_kept():
    seen = []
    spec = {"goal": {"id": 1}, "hand": (jnp.zeros(3),), "none": None}
    norm = Normalizer(spec, exclude=lambda path: bool(seen.append(path)))
    assert sorted(seen) == [("goal", "id"), ("hand", 0)]
    norm(
        (),
        {"goal": {"id": jnp.ones((1, 1))}, "hand": (jnp.ones((1, 3)),), "none": None},
    )
    assert len(seen) == 2
    same = Normalizer(spec, exclude=())
    assert norm.spec == same.spec and hash(norm.spec) == hash(same.spec)


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_excluding_everything_is_the_identity(emit):
    norm = Normalizer({"a": 2, "b": 3}, exclude=lambda path: True, emit=emit)
    x = {"a": jnp.ones((5, 2), jnp.uint8), "b": jnp.ones((5, 3))}
    out = norm((), x)
    assert all(out.output[k] is x[k] for k in x)
    before = bits(norm)
    norm.update_statistics(jax.tree.map(lambda v: v[None], out.rollout_extras))
    assert bits(norm) == before and norm.count == 0


def test_a_path_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="exclude names 'imge'.*image"):
        Normalizer({"image": IMAGE}, exclude="imge")
    with pytest.raises(TypeError, match="exclude holds 1.5"):
        Normalizer({"image": IMAGE}, exclude=[1.5])  # pyright: ignore
