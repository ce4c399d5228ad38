# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused at trace time, with what came and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm import Normalizer, validation
from nnx_norm.spec import parse

SPEC = parse({"a": 2, "b": {"c": ()}, "off": 3}, exclude=["off"])
LEAD = (2, 3)


@pytest.mark.parametrize(
    "leaf", [True, 2, 2.5, np.float32(1), np.zeros(2), jnp.ones(2)]
)
def test_as_array_takes_arrays_and_python_numbers(leaf):
    array = validation.as_array(leaf, "x")
    assert isinstance(array, jax.Array) and array.shape == np.shape(leaf)
    np.testing.assert_array_equal(array, leaf)


@pytest.mark.parametrize("leaf", [None, "text", [1, 2], object(), 1j, np.array(["a"])])
def test_as_array_refuses_the_rest_by_name(leaf):
    with pytest.raises(TypeError, match=r"^history\['a'\] (is|has dtype) "):
        validation.as_array(leaf, "history['a']")


def test_samples_are_the_leaves_with_statistics():
    tree = {"off": "anything", "b": {"c": jnp.ones(LEAD)}, "a": jnp.zeros((*LEAD, 2))}
    a, c = validation.samples(SPEC, SPEC.match(tree, "x"), "x")
    assert (a.shape, c.shape) == ((*LEAD, 2), LEAD)


@pytest.mark.parametrize(
    "shape, words",
    [
        ((3, 1), "x['a'] has shape (3, 1); expected (*lead, 2), usually (B, 2)"),
        ((), "x['a'] has shape (); expected (*lead, 2)"),
        ((2, 3), "x['a'] has shape (2, 3)"),
    ],
)
def test_samples_never_broadcast_features(shape, words):
    tree = {"off": None, "b": {"c": 1.0}, "a": jnp.zeros(shape)}
    with pytest.raises(ValueError) as error:
        validation.samples(SPEC, SPEC.match(tree, "x"), "x")
    assert words in str(error.value) and "never broadcast" in str(error.value)


def test_leading_axes_are_those_of_every_leaf():
    arrays = [jnp.zeros((*LEAD, 2)), jnp.zeros(LEAD)]
    assert validation.leading(SPEC, arrays, "history") == LEAD
    assert validation.common_leading(SPEC, [jnp.zeros(2), jnp.zeros(())], "x") == ()
    with pytest.raises(ValueError, match=r"history\['b'\]\['c'\].*\(3,\).*\(2, 3\)"):
        validation.leading(SPEC, [arrays[0], jnp.zeros(3)], "history")
    with pytest.raises(ValueError, match=r"history\['a'\].*no leading axis.*x\[None\]"):
        validation.leading(SPEC, [jnp.zeros(2), jnp.zeros(())], "history")


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4)])
def test_masks_and_weights_are_over_a_leading_prefix(shape):
    lead = (2, 3, 4)
    mask = validation.mask_array(np.ones(shape, bool), lead)
    weights = validation.weight_array(np.ones(shape, np.int32), lead)
    assert mask is not None and weights is not None
    assert mask.shape == weights.shape == shape and weights.dtype == jnp.float32
    whole = shape == lead
    for prefix in (True, False):
        if prefix or whole:
            validation.mask_array(np.ones(shape, bool), lead, prefix=prefix)
        else:
            with pytest.raises(ValueError, match="mask has shape"):
                validation.mask_array(np.ones(shape, bool), lead, prefix=prefix)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (1, 3), (2, 1), (2, 3, 1)])
def test_masks_and_weights_are_never_broadcast(shape):
    for name, call in (
        ("mask", lambda: validation.mask_array(np.ones(shape, bool), LEAD)),
        ("weights", lambda: validation.weight_array(np.ones(shape), LEAD)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        words = f"{name} has shape {shape}; expected the leading axes {LEAD}"
        assert words in str(error.value)


def test_masks_are_bool_and_weights_are_not():
    assert validation.mask_array(None, LEAD) is None
    assert validation.weight_array(None, LEAD) is None
    with pytest.raises(TypeError, match=r"int32; expected bool.*weights="):
        validation.mask_array(np.ones(LEAD, np.int32), LEAD)
    with pytest.raises(TypeError, match="bool; expected numbers.*mask="):
        validation.weight_array(np.ones(LEAD, bool), LEAD)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_weights_are_refused_where_they_count(bad):
    weights = np.ones(LEAD, np.float32)
    weights[1, 2] = bad
    mask = np.ones(LEAD, bool)
    for given in (None, jnp.asarray(mask), jnp.array([False, True])):
        with pytest.raises(ValueError, match="weights >= 0"):
            validation.weight_array(weights, LEAD, given)
    mask[1, 2] = False
    for given in (jnp.asarray(mask), jnp.array([True, False])):
        validation.weight_array(weights, LEAD, given)
    jax.jit(lambda w: validation.weight_array(w, LEAD))(weights)  # counted, not refused


def test_weights_over_fewer_axes_than_the_mask_are_looked_at_where_any_sample_counts():
    weights = np.array([1.0, np.nan], np.float32)
    mask = jnp.array([[True] * 3, [False] * 3])
    validation.weight_array(weights, LEAD, mask)
    with pytest.raises(ValueError, match="weights >= 0"):
        validation.weight_array(weights, LEAD, mask.at[1, 1].set(True))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32])
def test_flags_are_bool_or_zeros_and_ones(dtype):
    given = np.array([[0, 1, 0], [1, 0, 0]], dtype)
    flags = validation.flags(given, LEAD, "terminated")
    assert flags.dtype == jnp.bool_ and flags.tolist() == given.astype(bool).tolist()
    with pytest.raises(ValueError, match=r"terminated has shape \(2, 3\); expected"):
        validation.flags(given, (3, 2), "terminated")
    with pytest.raises(TypeError, match="terminated is None"):
        validation.flags(None, LEAD, "terminated")


def test_emitted_moments_are_checked_leaf_by_leaf():
    norm = Normalizer({"a": 2, "b": {"c": ()}}, emit="moments")
    x = {"a": jnp.ones((3, 2)), "b": {"c": jnp.ones(3)}}
    extras = norm((), x).rollout_extras
    history = jax.tree.map(lambda v: v[None], extras)
    flat = validation.emitted(norm.spec, history)
    assert [v.shape for v in flat.mean] == [(1, 2), (1,)]
    with pytest.raises(TypeError, match=r"history is a dict.*stacked over time"):
        validation.emitted(norm.spec, x)
    with pytest.raises(ValueError, match=r"history.count has shape \(\)"):
        validation.emitted(norm.spec, extras)
    short = history._replace(M2={**history.M2, "a": jnp.ones((1, 3))})
    with pytest.raises(ValueError, match=r"history.M2\['a'\].*\(1, 3\).*\(1, 2\)"):
        validation.emitted(norm.spec, short)
    other = history._replace(mean={"a": history.mean["a"]})
    with pytest.raises(ValueError, match=r"history\['b'\]\['c'\] is missing"):
        validation.emitted(norm.spec, other)
