# SPDX-License-Identifier: Apache-2.0
"""Laws of weights: a mask is weights of 0 and 1, and a prefix stands for all behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.extended import double
from nnx_norm.weighting import leave_out, weigh

SIZES = (4, 3, 2)
MASK = np.arange(12).reshape(4, 3) % 3 > 0
WEIGHTS = np.asarray([0.0, 0.5, 2.0, -1.0], np.float32)


def weighed(mask=None, weights=None, bad=None):
    given = [None if v is None else jnp.asarray(v) for v in (mask, weights)]
    with double():
        out = weigh(SIZES, *given)
        out = out if bad is None else leave_out(out, jnp.asarray(bad))
    return jax.tree.map(np.asarray, out)


def test_no_weights_count_every_sample():
    out = weighed()
    assert out.weight is None and (out.count, out.rows, out.skipped) == (24, 24, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_sums_of_mask_and_weights(whole):
    mask, weights = MASK, WEIGHTS
    if whole:
        mask = np.broadcast_to(MASK[..., None], SIZES)
        weights = np.broadcast_to(WEIGHTS[:, None, None], SIZES)
    product = np.where(MASK & (WEIGHTS >= 0)[:, None], WEIGHTS[:, None], 0)
    out = weighed(mask, weights)
    assert out.count == 2 * product.sum() and out.rows == 2 * np.sum(product > 0)
    assert out.skipped == 2 * MASK[3].sum()
    np.testing.assert_array_equal(
        np.broadcast_to(out.weight, SIZES), np.broadcast_to(product[..., None], SIZES)
    )
    only_mask = weighed(mask)
    assert only_mask.count == only_mask.rows == 2 * MASK.sum()


@pytest.mark.parametrize("given", ["nothing", "mask", "weights"])
def test_what_is_left_out_counts_nothing(given):
    bad = np.zeros(SIZES, bool)
    bad[1:3, 0, 1] = True
    options = {"mask": {"mask": MASK}, "weights": {"weights": WEIGHTS}}.get(given, {})
    before, after = weighed(**options), weighed(**options, bad=bad)
    weight = 1.0 if before.weight is None else before.weight
    weight = np.broadcast_to(weight, SIZES).astype(float)
    assert after.count == weight[~bad].sum()
    assert after.rows == np.sum(weight[~bad] > 0)
    assert after.skipped == before.skipped
