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


@pytest.mark.parametrize("kind", [np.int64, np.uint64, int, np.array])
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**40 + 3, 2**62])
def test_integers_of_64_bits_never_wrap_around(kind, value):
    array = validation.as_array(kind(value), "x")
    assert array.shape == ()
    assert float(array) == pytest.approx(value, rel=1e-7)
    history = np.full((1, 2, 1), value)
    norm = Normalizer(1)
    norm.update_statistics(history)
    assert norm.to_dict()["mean"][0] == pytest.approx(value, rel=1e-7)


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
