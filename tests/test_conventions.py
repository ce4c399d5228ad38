# SPDX-License-Identifier: Apache-2.0
"""Divisors of other libraries, from one way of using an epsilon to another."""

import itertools

import numpy as np
import pytest

from nnx_norm import conventions
from nnx_norm.conventions import (
    ADDED_TO_STD,
    ADDED_TO_VARIANCE,
    FLOORED,
    FLOORED_OR_ONE,
    Convention,
)

ALL = [ADDED_TO_VARIANCE, ADDED_TO_STD, FLOORED, FLOORED_OR_ONE]


@pytest.mark.parametrize(("one", "other"), list(itertools.product(ALL, ALL)))
def test_fitted_variance_gives_the_same_divisor(one: Convention, other: Convention):
    variance = 10.0 ** np.linspace(-12, 12, 49)
    for epsilon in (1e-12, 1e-8, 1e-2):
        std = one.divisor(variance, epsilon)
        fitted = other.fitted(variance, std, 1e-12, "x")
        error = np.abs(other.divisor(fitted, 1e-12) / std - 1)
        assert error.max() <= conventions.SAME


@pytest.mark.parametrize("one", ALL)
def test_variance_is_kept_to_the_last_bit_where_it_fits(one: Convention):
    variance = np.random.default_rng(0).random(100) + 0.5
    std = np.sqrt(variance + 1e-8)
    assert one.fitted(variance, std, 1e-8, "x").tolist() == variance.tolist()


@pytest.mark.parametrize("one", ALL)
def test_divisor_that_an_epsilon_rules_out_is_refused(one: Convention):
    with pytest.raises(ValueError, match=r"\['goal'\] would be .* epsilon 0.01"):
        one.fitted(np.zeros(2), np.array([1.0, 1e-3]), 1e-2, "['goal']")


def test_scalars_and_empty_arrays():
    assert FLOORED.fitted(np.float64(4), np.float64(2), 1e-6, "x") == 4
    assert FLOORED.fitted(np.zeros(0), np.zeros(0), 1e-6, "x").shape == (0,)


def test_no_variance_is_made_up_where_a_constant_is_divided_by_one():
    variance, one = np.array([0.0, 4.0]), np.array([1.0, 2.0])
    assert FLOORED_OR_ONE.divisor(variance, 1e-8).tolist() == one.tolist()
    assert FLOORED_OR_ONE.fitted(variance, one, 1e-8, "x").tolist() == [0.0, 4.0]
    assert FLOORED.fitted(variance, one, 1e-8, "x").tolist() == [1.0, 4.0]
