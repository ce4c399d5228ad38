# SPDX-License-Identifier: Apache-2.0
"""Modules filled with the statistics of another library."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import bits

from nnx_norm import (
    Normalizer,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    imported,
)
from nnx_norm.conventions import (
    ADDED_TO_STD,
    ADDED_TO_VARIANCE,
    FLOORED,
    FLOORED_OR_ONE,
)
from nnx_norm.moved import Moved, exported, moved

MEAN = np.array([1.0, -1e4, 0.1])
VARIANCE = np.array([4.0, 1e-5, 0.0])  # epsilon shows in the last two


@pytest.mark.parametrize("convention", [ADDED_TO_VARIANCE, ADDED_TO_STD, FLOORED])
@pytest.mark.parametrize("into", [None, Normalizer, RunningMeanStd])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-2])
def test_divides_by_what_the_source_divides_by(
    convention: Any, into: Any, epsilon: float
):
    source = moved(MEAN, VARIANCE, 7.0001, convention, epsilon)
    module = imported.normalizer(
        source,
        into and into(3, epsilon=1e-16 if convention is ADDED_TO_STD else 1e-8),
        epsilon,
    )
    out = exported(module)
    assert out.std == pytest.approx(source.std, rel=1e-6)
    assert out.mean == pytest.approx(MEAN, rel=1e-12)
    assert float(out.count) == pytest.approx(7.0001, rel=1e-12)
    assert out.variance[0] == pytest.approx(source.std[0] ** 2, rel=1e-6)


def test_settings_of_a_new_normalizer_and_of_a_given_one():
    source = moved(MEAN, VARIANCE, 7, ADDED_TO_VARIANCE, 1e-8)
    new = imported.normalizer(source, None, 1e-8, clip=3.0, max_count=9.0)
    assert (new.clip, new.max_count, new.epsilon) == (3.0, 9.0, 1e-8)
    given = Normalizer(3, epsilon=1e-9, clip=4.0)
    assert imported.normalizer(source, given, 1e-8, clip=3.0) is given
    assert given.clip == 4.0


def test_epsilon_is_lowered_to_the_smallest_divisor():
    source = Moved(MEAN, VARIANCE, np.array([1.0, 1e-5, 2.0]), 3)
    assert imported.normalizer(source, None, 1e-6).epsilon == pytest.approx(1e-10)


def test_trees_with_entries_that_pass_through():
    tree = {"b": MEAN, "a": MEAN[:1]}
    variance = {"b": VARIANCE, "a": VARIANCE[:1]}
    source = moved(tree, variance, 7, FLOORED, 1e-6)
    norm = imported.normalizer(source, None, 1e-6, passing={"c": (2, 2)})
    x = {"a": jnp.zeros((1, 1)), "b": jnp.zeros((1, 3)), "c": jnp.ones((1, 2, 2))}
    assert norm.normalize(x)["c"].tolist() == x["c"].tolist()
    assert norm.to_dict()["exclude"] == ["c"]
    lazy = imported.normalizer(source, RunningMeanStd(epsilon=1e-9), 1e-6)
    assert lazy.shape == {"a": (1,), "b": (3,)}


def test_before_any_sample_the_first_divisor_is_the_sources():
    source = Moved(np.zeros(2), np.zeros(2), np.full(2, 1.5), 0)
    norm = imported.normalizer(source, None, 1e-6)
    assert (norm.count, norm.initial_std) == (0, 1.5)
    with pytest.raises(ValueError, match="initial_std"):
        imported.normalizer(source, Normalizer(2), 1e-6)


@pytest.mark.parametrize("into", [Normalizer(2), RunningMeanStd(2), Normalizer({})])
def test_what_does_not_fit_is_refused_before_anything_changes(into: Any):
    before = bits(into)
    with pytest.raises(ValueError):
        imported.normalizer(moved(MEAN, VARIANCE, 7, FLOORED, 1e-6), into, 1e-6)
    small = moved(MEAN[:2], 1e-9 + 0 * VARIANCE[:2], 7, ADDED_TO_STD, 1e-12)
    with pytest.raises(ValueError):
        imported.normalizer(small, into, 1e-6)
    assert bits(into) == before


@pytest.mark.parametrize(
    "bad",
    [
        {"mean": np.array([0.0, np.nan, 0.0])},
        {"std": np.array([1.0, 1.0, 0.0])},
        {"std": np.array([1.0, np.nan, 1.0])},
        {"count": -1},
        {"count": np.inf},
        {"mean": MEAN[:2]},
        {"count": 0},
    ],
)
def test_statistics_that_are_none_are_refused(bad: dict[str, Any]):
    source = moved(MEAN, VARIANCE, 7, FLOORED, 1e-6)._replace(**bad)
    with pytest.raises(ValueError):
        imported.normalizer(source, None, 1e-6)


def test_other_modules_and_populations_are_refused():
    source = moved(MEAN, VARIANCE, 7, FLOORED, 1e-6)
    linear: Any = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="into is a Linear"):
        imported.normalizer(source, linear, 1e-6)
    population = Normalizer(3)
    population._add_members((2,))
    with pytest.raises(ValueError, match="population"):
        imported.normalizer(source, population, 1e-6)


RETURNS = np.array([1.0, 1 / 3])


@pytest.mark.parametrize(
    "into",
    [None, RewardNormalizer(0.5), RewardRunningMeanStd(gamma=0.5, epsilon=1e-8)],
    ids=["new", "RewardNormalizer", "port"],
)
def test_rewards_carry_their_returns(into: Any):
    source = moved(np.float64(3.0), np.float64(4.0), 9, ADDED_TO_VARIANCE, 1e-8)
    norm = imported.rewards(source, into, 1e-8, gamma=0.9, running=RETURNS)
    assert norm is into or isinstance(norm, RewardNormalizer) and norm.gamma == 0.9
    assert float(norm.normalize(4.0)) == pytest.approx(2.0)
    name = "discounted_reward" if hasattr(norm, "initial_count") else "running_return"
    carried = getattr(norm, name).get_value()
    assert np.asarray(carried).tolist() == RETURNS.astype(np.float32).tolist()


def test_rewards_of_one_return_are_refused():
    source = moved(np.float64(3.0), np.float64(4.0), 1, ADDED_TO_VARIANCE, 1e-8)
    with pytest.raises(ValueError, match="With 1 samples"):
        imported.rewards(source, None, 1e-8, gamma=0.9, running=None)


@pytest.mark.parametrize("count", [1, 9])
def test_rewards_all_alike_stay_as_they_are_and_add_no_variance(count: int):
    source = moved(np.float64(3.0), np.float64(0.0), count, FLOORED_OR_ONE, 0.0)
    norm = imported.rewards(source, None, 1e-8, gamma=0.9, running=None)
    assert float(norm.normalize(4.0)) == 4.0
    d = norm.to_dict()
    assert (float(d["M2"]), int(d["count"])) == (0.0, count)
