# SPDX-License-Identifier: Apache-2.0
"""Laws of a lifted callable: it is what it lifts, and a forward writes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph import B, F, Tally, assert_same, batch, linear, values

from nnx_norm.lift import Lift
from nnx_norm.modules import Sequential


def test_lift_is_the_function_it_lifts():
    layer = linear()
    for fn in (
        layer,
        jax.nn.tanh,
        nnx.Sequential(layer, jnp.tanh),
        lambda x: x[..., :1],
    ):
        lifted = Lift(fn)
        assert lifted.initialize_state(B) == ()
        out = lifted((), batch())
        assert_same(out.output, fn(batch()))
        assert (out.next_state, out.metrics, out.rollout_extras) == ((), {}, None)
        assert not out.regularization_loss.weak_type
        assert lifted((), batch(), "told").rollout_extras == "told"
        lifted.update_statistics(None, mask=jnp.ones(B, bool))


def test_a_lifted_layer_trains():
    net = Sequential([linear(1), jnp.tanh, Tally()])

    def loss(net):
        return net(net.initialize_state(B), batch()).output.sum()

    grads = nnx.grad(loss)(net)
    assert len(jax.tree.leaves(grads)) == 2
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_a_lifted_partial_keeps_its_arrays_in_sight_of_nnx():
    lifted = Lift(jax.tree_util.Partial(jnp.add, jnp.ones(F, jnp.float32)))
    assert len(jax.tree.leaves(nnx.state(lifted))) == 1
    out = nnx.jit(lambda m, x: m((), x).output)(lifted, batch())
    assert_same(out, batch() + 1)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nnx.BatchNorm(F, rngs=nnx.Rngs(0)),
        lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        lambda: nnx.Sequential(linear(), nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    ],
)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit])
def test_a_lifted_layer_may_read_but_not_write(layer, jit):
    net = Sequential([layer()])
    before = values(net)
    call = jit(lambda net, x: net(net.initialize_state(B), x).output)
    with pytest.raises(ValueError, match=r"Lift: .* wrote fn/.* eval\(\)"):
        call(net, batch())
    net.eval()
    assert_same(values(net), before)
    assert call(net, batch()).shape == (B, F)


@pytest.mark.parametrize(
    ("fn", "words"),
    [(Tally(), "Tally, which has a state"), (3, "int; expected a call")],
)
def test_what_cannot_be_lifted(fn, words):
    with pytest.raises(TypeError, match=words):
        Lift(fn)


def test_a_callable_that_cannot_be_static_is_refused_by_name():
    @dataclasses.dataclass
    class Scale:
        by: float

        def __call__(self, x):
            return x * self.by

    with pytest.raises(TypeError, match="Scale, which is not hashable"):
        Sequential([Scale(2.0)])
