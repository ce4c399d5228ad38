# SPDX-License-Identifier: Apache-2.0
"""A dict of `to_dict` makes the same normalizer, or an error: nothing is invented."""

import json
from typing import Any

import numpy as np
import pytest
from support import bits

from nnx_norm import Normalizer, RewardNormalizer
from nnx_norm.settings import refuse_other_class, shape_from_json


def seen(**settings: Any) -> Normalizer:
    """A normalizer of a tree, with samples."""
    norm = Normalizer({"a": 2, "b": {"c": ()}}, **settings)
    rng = np.random.default_rng(0)
    norm.update_statistics({"a": rng.normal(size=(4, 2)), "b": {"c": rng.random(4)}})
    return norm


def without(d: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in d.items() if k not in names}


@pytest.mark.parametrize("name", ["epsilon", "initial_std", "nonfinite", "emit"])
@pytest.mark.parametrize("flat", [False, True])
def test_from_dict_invents_no_setting(name, flat):
    d = Normalizer(2, clip=5.0).to_dict(flat=flat)
    for gone in ({k: v for k, v in d.items() if k != name}, {**d, name: None}):
        with pytest.raises(ValueError, match=f"{name} missing: no dict of this class"):
            Normalizer.from_dict(gone)


@pytest.mark.parametrize("make", [lambda: seen(), lambda: Normalizer(2)])
@pytest.mark.parametrize("name", ["clip", "decay", "max_count", "axis_name", "exclude"])
def test_what_may_be_unset_is_there_in_the_nested_form(make: Any, name: str):
    norm = make()
    with pytest.raises(ValueError, match=f"{name} missing"):
        Normalizer.from_dict(without(norm.to_dict(), name))
    flat = norm.to_dict(flat=True)
    assert name not in flat and bits(Normalizer.from_dict(flat)) == bits(norm)


@pytest.mark.parametrize("name", ["clip", "axis_name", "num_envs", "gamma"])
def test_rewards_miss_nothing_either(name: str):
    with pytest.raises(ValueError, match=f"{name} missing"):
        RewardNormalizer.from_dict(without(RewardNormalizer(0.9).to_dict(), name))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["count", "skipped"])
def test_numbers_are_not_invented(name: str, flat: bool):
    with pytest.raises(ValueError, match=f"{name} missing"):
        Normalizer.from_dict(without(seen().to_dict(flat=flat), name))


@pytest.mark.parametrize("flat", [False, True])
def test_keys_of_something_else_are_refused(flat: bool):
    d = seen().to_dict(flat=flat)
    for odd in ("clipp", "std_", "gamma"):
        with pytest.raises(ValueError, match=f"^{odd}: no key of this class's to_dict"):
            Normalizer.from_dict({**d, odd: 1.0})
    with pytest.raises(ValueError, match="decay: no key"):
        RewardNormalizer.from_dict({**RewardNormalizer(0.9).to_dict(), "decay": 0.5})


@pytest.mark.parametrize("way", ["nested", "flat", "json"])
def test_a_std_that_contradicts_is_refused_and_one_left_out_is_not(way: str):
    norm = seen()
    d = norm.to_dict(flat=way == "flat")
    if way == "json":
        d = json.loads(json.dumps(d, default=np.ndarray.tolist))
    assert bits(Normalizer.from_dict(d)) == bits(norm)
    key = "std/b/c" if way == "flat" else "std"
    other = 3.0 if way == "flat" else {**d["std"], "b": {"c": 3.0}}
    with pytest.raises(ValueError, match="'std/b/c' contradicts the statistics"):
        Normalizer.from_dict({**d, key: other})
    stds = [k for k in d if k.split("/")[0] == "std"]
    assert bits(Normalizer.from_dict(without(d, *stds))) == bits(norm)
    # Another epsilon is another std: so the two belong together.
    with pytest.raises(ValueError, match="'std/a' contradicts"):
        Normalizer.from_dict({**d, "epsilon": 100.0})


@pytest.mark.parametrize("shape", [{"pos": 3}, [3], 3])
def test_a_shape_is_the_text_that_was_written(shape: Any):
    with pytest.raises(ValueError, match="expected the text that to_dict wrote"):
        Normalizer.from_dict({**Normalizer(3).to_dict(), "shape": shape})
    with pytest.raises(ValueError):
        shape_from_json("{")


@pytest.mark.parametrize("flat", [False, True])
def test_statistics_of_returns_and_of_samples_do_not_mix(flat: bool):
    norm, rewards = Normalizer(()), RewardNormalizer(0.9)
    norm.set_statistics(1.0, 2.0, 3)
    rewards.set_statistics(1.0, 2.0, 3)
    for a, b in ((norm, rewards), (rewards, norm)):
        before = bits(a)
        for call in (a.load_dict, a.merge_from):
            with pytest.raises(ValueError, match="got the dict of a normalizer of"):
                call(b.to_dict(flat=flat))
        for call in (a.copy_from, a.merge_from):
            with pytest.raises(ValueError, match="got the statistics of"):
                call(b)
        assert bits(a) == before
    bare = {"mean": 1.0, "M2": 6.0, "count": 3}  # without settings it is of any class
    norm.load_dict(bare)
    rewards.load_dict(bare)
    refuse_other_class(bare, "returns", "load_dict")


def test_from_dict_refuses_what_to_dict_did_not_give():
    with pytest.raises(ValueError, match="shape is missing"):
        Normalizer.from_dict(without(seen().to_dict(), "shape"))
    with pytest.raises(ValueError, match="count missing"):
        Normalizer.from_dict(without(seen().to_dict(), "count"))
    with pytest.raises(TypeError, match="from_dict got list"):
        Normalizer.from_dict([1])
    with pytest.raises(ValueError, match="emit is 'nothing'"):
        Normalizer.from_dict({**seen().to_dict(), "emit": "nothing"})
