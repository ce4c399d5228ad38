# SPDX-License-Identifier: Apache-2.0
"""Laws of the module: its output is a pytree with names, its methods have defaults."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from nnx_norm.modules import Delay, Lift, Sequential
from nnx_norm.stateful import StatefulModule, StatefulModuleOutput


def test_output_has_the_fields_of_the_contract_in_order():
    names = [field.name for field in dataclasses.fields(StatefulModuleOutput)]
    assert names == [
        "next_state",
        "output",
        "regularization_loss",
        "metrics",
        "rollout_extras",
    ]
    assert StatefulModuleOutput(1, 2, 3, 4).rollout_extras is None


def test_output_is_frozen_and_replaced():
    out = StatefulModuleOutput((), 1, 2, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.output = 3  # pyright: ignore
    for changed in (out.replace(output=5), dataclasses.replace(out, output=5)):
        assert (changed.output, changed.regularization_loss) == (5, 2)
    assert out.output == 1
    with pytest.raises(TypeError):
        out.replace(outputs=5)


def test_output_is_a_pytree_with_named_leaves():
    out = StatefulModuleOutput([1], 2, 3, {"m": 4}, (5, None))
    leaves, treedef = jax.tree.flatten_with_path(out)
    assert [leaf for _, leaf in leaves] == [1, 2, 3, 4, 5]
    assert jax.tree_util.keystr(leaves[1][0]) == ".output"
    sentinel = object()
    again = jax.tree.unflatten(treedef, [sentinel] * 5)
    assert again.output is sentinel and again.rollout_extras == (sentinel, None)
    assert jax.tree.map(lambda _: None, out).next_state == [None]


def test_output_passes_transforms():
    out = jax.jit(lambda x: StatefulModuleOutput((), x, x.sum(), {}))(jnp.ones(2))
    assert isinstance(out, StatefulModuleOutput) and out.output.tolist() == [1, 1]


def test_a_module_needs_a_call_and_has_defaults_for_the_rest():
    with pytest.raises(TypeError, match="abstract"):
        StatefulModule()  # pyright: ignore

    class Identity(StatefulModule):
        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(state, x, jnp.float32(0), {}, rollout_extras)

    module = Identity()
    assert module.initialize_state(7) == ()
    state = object()
    assert module.reset_state(state) is state
    assert module.update_statistics(None, mask=None) is None  # pyright: ignore


@pytest.mark.parametrize(
    "module", [Delay(jnp.zeros(1), 1), Lift(jnp.tanh), Sequential([jnp.tanh])]
)
def test_a_forgotten_state_is_told_from_a_forgotten_x(module):
    words = rf"{type(module).__name__} was called with one argument.*module\(state, x\)"
    with pytest.raises(TypeError, match=words):
        module(jnp.ones((1, 1)))
