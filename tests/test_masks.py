# SPDX-License-Identifier: Apache-2.0
"""Masks, weights and flags: never broadcast, never taken for one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm import masks

LEAD = (2, 3)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4)])
def test_masks_and_weights_are_over_a_leading_prefix(shape):
    lead = (2, 3, 4)
    mask = masks.mask_array(np.ones(shape, bool), lead)
    weights = masks.weight_array(np.ones(shape, np.int32), lead)
    assert mask is not None and weights is not None
    assert mask.shape == weights.shape == shape and weights.dtype == jnp.float32
    whole = shape == lead
    for prefix in (True, False):
        if prefix or whole:
            masks.mask_array(np.ones(shape, bool), lead, prefix=prefix)
        else:
            with pytest.raises(ValueError, match="mask has shape"):
                masks.mask_array(np.ones(shape, bool), lead, prefix=prefix)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (1, 3), (2, 1), (2, 3, 1)])
def test_masks_and_weights_are_never_broadcast(shape):
    for name, call in (
        ("mask", lambda: masks.mask_array(np.ones(shape, bool), LEAD)),
        ("weights", lambda: masks.weight_array(np.ones(shape), LEAD)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        words = f"{name} has shape {shape}; expected the leading axes {LEAD}"
        assert words in str(error.value)


def test_masks_are_bool_and_weights_are_not():
    assert masks.mask_array(None, LEAD) is None
    assert masks.weight_array(None, LEAD) is None
    with pytest.raises(TypeError, match=r"int32; expected bool.*weights="):
        masks.mask_array(np.ones(LEAD, np.int32), LEAD)
    with pytest.raises(TypeError, match="bool; expected numbers.*mask="):
        masks.weight_array(np.ones(LEAD, bool), LEAD)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_weights_are_refused_where_they_count(bad):
    weights = np.ones(LEAD, np.float32)
    weights[1, 2] = bad
    mask = np.ones(LEAD, bool)
    for given in (None, jnp.asarray(mask), jnp.array([False, True])):
        with pytest.raises(ValueError, match="weights >= 0"):
            masks.weight_array(weights, LEAD, given)
    mask[1, 2] = False
    for given in (jnp.asarray(mask), jnp.array([True, False])):
        masks.weight_array(weights, LEAD, given)
    jax.jit(lambda w: masks.weight_array(w, LEAD))(weights)  # counted, not refused


def test_weights_over_fewer_axes_than_the_mask_are_looked_at_where_any_sample_counts():
    weights = np.array([1.0, np.nan], np.float32)
    mask = jnp.array([[True] * 3, [False] * 3])
    masks.weight_array(weights, LEAD, mask)
    with pytest.raises(ValueError, match="weights >= 0"):
        masks.weight_array(weights, LEAD, mask.at[1, 1].set(True))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32])
def test_flags_are_bool_or_zeros_and_ones(dtype):
    given = np.array([[0, 1, 0], [1, 0, 0]], dtype)
    flags = masks.flags(given, LEAD, "terminated")
    assert flags.dtype == jnp.bool_ and flags.tolist() == given.astype(bool).tolist()
    with pytest.raises(ValueError, match=r"terminated has shape \(2, 3\); expected"):
        masks.flags(given, (3, 2), "terminated")
    with pytest.raises(TypeError, match="terminated is None"):
        masks.flags(None, LEAD, "terminated")


@pytest.mark.parametrize("bad", [2.5, -1.0, np.nan, 0.5, 2])
def test_flags_that_are_neither_zero_nor_one_are_refused_where_they_are_read(bad):
    given = np.zeros(LEAD, np.float32)
    given[1, 2] = bad
    with pytest.raises(ValueError, match="terminated holds .*; expected flags: bool"):
        masks.flags(given, LEAD, "terminated")
    mask = jnp.ones(LEAD, bool)
    with pytest.raises(ValueError, match="truncated holds"):
        masks.flags(given, LEAD, "truncated", mask)
    masks.flags(given, LEAD, "terminated", mask.at[1, 2].set(False))
    under_jit = jax.jit(lambda v: masks.flags(v, LEAD, "terminated"))(given)
    assert under_jit.tolist() == (given != 0).tolist()
