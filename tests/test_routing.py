# SPDX-License-Identifier: Apache-2.0
"""Laws of routing: what goes in comes back to the same child, unwritten."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph import (
    LIBRARIES,
    B,
    Duck,
    F,
    Maskless,
    Memory,
    T,
    Tally,
    assert_same,
    batch,
    graph,
    libraries,
    linear,
    ours,
    rollout,
    tallies,
    values,
)

from nnx_norm.modules import (
    Concat,
    Delay,
    Lift,
    Parallel,
    Sequential,
    StatefulModuleOutput,
)


@pytest.mark.parametrize("name", ["Sequential", "Parallel", "Concat"])
def test_losses_add_up_to_strong_float32(name):
    children = {"a": Duck(), "b": jnp.tanh}
    container = getattr(ours, name)
    net = container(list(children.values()) if name == "Sequential" else children)
    x = {"a": batch(), "b": batch()} if name == "Concat" else batch()
    loss = net(net.initialize_state(B), x).regularization_loss
    assert (loss.shape, loss.dtype, loss.weak_type) == ((), jnp.float32, False)


def test_losses_per_environment_and_of_other_dtypes_add_up():
    class Half(Duck):
        def __call__(self, state, x, rollout_extras=None):
            out = super().__call__(state, x, rollout_extras)
            out.regularization_loss = jnp.bfloat16(2)
            return out

    net = Sequential([Memory(), Half()])
    loss = net(net.initialize_state(B), batch()).regularization_loss
    assert_same(loss, batch()[:, 0] + 2)
    assert loss.dtype == jnp.float32
    both = Parallel(one=Memory(), two=Memory())
    out = both(both.initialize_state(B), batch())
    assert_same(out.regularization_loss, 2 * batch()[:, 0])


def test_a_child_is_whatever_has_the_methods():
    net = Sequential([Duck(), Parallel(a=Duck())])
    out = net(net.initialize_state(B), batch())
    assert_same(out.output, {"a": batch() * 4})
    assert_same(
        out.next_state, [jnp.ones(B, jnp.float32), {"a": jnp.ones(B, jnp.float32)}]
    )
    assert_same(net.reset_state(out.next_state), net.initialize_state(B))
    net.update_statistics(out.rollout_extras)


@pytest.mark.parametrize("outer", LIBRARIES, ids=lambda m: "out:" + m.__name__)
@pytest.mark.parametrize("inner", LIBRARIES, ids=lambda m: "in:" + m.__name__)
def test_containers_nest_in_those_of_other_libraries(outer, inner):
    def build():
        heads = inner.Parallel(a=Tally(), b=Delay(jnp.zeros(F, jnp.float32), 1))
        return outer.Sequential([inner.Sequential([Lift(jnp.cos), Tally()]), heads])

    net, xs = build(), batch(0, T, B)
    _, (outputs, extras) = rollout(net, xs)
    seen = np.cos(np.asarray(xs))
    np.testing.assert_allclose(outputs["a"], seen + 2, rtol=1e-6)
    delayed = np.concatenate([np.zeros((1, B, F)), seen[:-1] + 1])
    np.testing.assert_allclose(outputs["b"], delayed, rtol=1e-6)
    for _ in range(2):
        net.update_statistics(extras)
    for tally, expected in zip(tallies(net), (seen, seen + 1), strict=True):
        assert float(tally.rows.get_value()) == 2 * T * B
        total = 2 * expected.sum((0, 1))
        np.testing.assert_allclose(tally.total.get_value(), total, rtol=1e-5)


@libraries
def test_replay_returns_what_came_in_and_hands_each_child_its_own(library):
    handed = []

    class Spy(Tally):
        def __call__(self, state, x, rollout_extras=None):
            handed.append(rollout_extras)
            return super().__call__(state, x, rollout_extras)

    net = library.Sequential(
        [
            Spy(),
            Delay(jnp.zeros(F, jnp.float32), 1),
            library.Parallel(a=Spy(), b=Lift(jnp.tanh)),
        ]
    )
    state, x = net.initialize_state(B), batch()
    emitted = net(state, x).rollout_extras
    assert handed == [None, None]
    told = [batch(1), None, {"a": batch(2), "b": None}]
    assert jax.tree.structure(told) == jax.tree.structure(emitted)
    out = net(state, x + 5, told)
    assert_same(out.rollout_extras, told)
    assert handed[2] is told[0] and handed[3] is told[2]["a"]


def test_a_replay_passes_the_very_object_through():
    net = Parallel(a=Tally(), b=Sequential([jnp.tanh]))
    told = OrderedDict(b=(None,), a=batch(1))
    assert net(net.initialize_state(B), batch(), told).rollout_extras is told


def test_extras_of_stateless_children_still_tell_a_replay():
    net = Sequential([jnp.tanh, Parallel(a=jnp.cos)])
    out = net(net.initialize_state(B), batch())
    assert out.rollout_extras == [None, {"a": None}]
    again = net(net.initialize_state(B), batch(), out.rollout_extras)
    assert again.rollout_extras == [None, {"a": None}]


def test_what_a_child_emits_in_a_replay_is_dropped():
    """A child that emitted nothing is handed None, and may take it for a rollout."""
    net = Parallel(a=Tally(), b=Tally())
    told = {"a": batch(1), "b": None}
    assert net(net.initialize_state(B), batch(), told).rollout_extras is told


def test_every_state_leaf_has_the_batch_axis_and_resets_per_environment():
    net = graph()
    state = net.initialize_state(B)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(state))
    state, _ = rollout(net, batch(0, T, B))
    fresh = net.initialize_state(B)
    done = jnp.array([True, False, True, False])

    def reset(flag, part):
        return jax.lax.cond(flag, net.reset_state, lambda s: s, part)

    after = jax.jit(jax.vmap(reset))(done, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for now, was, new in zip(*map(jax.tree.leaves, (after, state, fresh)), strict=True):
        assert now.dtype == was.dtype
        now, was, new = map(np.asarray, (now, was, new))
        np.testing.assert_array_equal(now[::2], new[::2])
        np.testing.assert_array_equal(now[1::2], was[1::2])


# --- Updates


def test_an_update_reaches_every_child_with_its_own_part():
    net, xs = graph(), batch(0, T, B)
    _, (_, extras) = rollout(net, xs)
    mask = jnp.arange(T * B).reshape(T, B) % 3 != 0
    update = nnx.jit(lambda net, extras, mask: net.update_statistics(extras, mask=mask))
    update(net, extras, mask)
    update(net, extras, ~mask)
    net.update_statistics(extras)
    parts = [extras[0], extras[3]["b"][0], extras[4]["a"]]
    for tally, part in zip(
        [net[0], net[3].components["b"][0], net[4].components["a"]], parts, strict=True
    ):
        assert float(tally.rows.get_value()) == 2 * T * B
        total = 2 * np.asarray(part).sum((0, 1))
        np.testing.assert_allclose(tally.total.get_value(), total, rtol=2e-5, atol=1e-5)


def test_a_mask_drops_rows_in_every_child():
    net, xs = Sequential([Tally(), Parallel(a=Tally(), b=jnp.tanh)]), batch(0, T, B)
    _, (_, extras) = rollout(net, xs)
    mask = jnp.zeros((T, B), bool).at[1, 2].set(True)
    for _ in range(2):
        net.update_statistics(extras, mask=mask)
    for tally, x in ((net[0], xs), (net[1].components["a"], xs + 1)):
        assert float(tally.rows.get_value()) == 2
        np.testing.assert_allclose(tally.total.get_value(), 2 * x[1, 2], rtol=1e-6)


def test_a_mask_is_passed_only_when_given():
    seen = []

    class Keywords(Memory):
        def update_statistics(self, rollout_extras, **kwargs):
            seen.append(kwargs)

    net = Sequential([Keywords(), Parallel(a=Keywords())])
    mask = jnp.ones((T, B), bool)
    net.update_statistics([None, {"a": None}])
    net.update_statistics([None, {"a": None}], mask=mask)
    assert seen[:2] == [{}, {}]
    assert [kwargs["mask"] is mask for kwargs in seen[2:]] == [True, True]


class Sampler(Memory):
    """No statistics: parameters and random keys only."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(F, jnp.float32))
        self.lora = nnx.LoRAParam(jnp.ones(F, jnp.float32))
        self.rngs = nnx.Rngs(0)

    def update_statistics(self, rollout_extras):  # pyright: ignore
        self.told = True


class Foreign(Sampler):
    """A container of another library, with statistics two levels down."""

    def __init__(self):
        super().__init__()
        self.children = nnx.List([nnx.Dict(tally=Tally())])


PART = batch(0, T, B)
# Where a child sits, a graph with it there, and extras for that graph.
PLACES = {
    "layers[1]": (lambda child: Sequential([Tally(), child]), [PART, PART]),
    "components['b']": (
        lambda child: Parallel(a=Tally(), b=child),
        {"a": PART, "b": PART},
    ),
    "layers[1].components['b'].layers[0]": (
        lambda child: Sequential([Tally(), Concat(a=Tally(), b=Sequential([child]))]),
        [PART, {"a": PART, "b": [PART]}],
    ),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("child", [Maskless, Foreign])
def test_a_mask_that_would_get_lost_is_refused_before_anything_changes(where, child):
    build, extras = PLACES[where]
    net = build(child())
    net.update_statistics(extras)
    before = values(net)
    with pytest.raises(TypeError, match="mask would get lost") as error:
        net.update_statistics(extras, mask=jnp.ones((T, B), bool))
    assert str(error.value).startswith(f"{where} is {child.__name__}")
    assert "['Seen']" in str(error.value)
    assert_same(values(net), before)
    net.update_statistics(extras)  # without one all is well
    assert max(float(tally.rows.get_value()) for tally in tallies(net)) == 2 * T * B


class Weighted(Tally):
    """Takes weights as `Normalizer` does."""

    def update_statistics(self, rollout_extras, *, mask=None, weights=None):
        valid = (
            jnp.ones((T, B), jnp.float32) if mask is None else mask.astype(jnp.float32)
        )
        super().update_statistics(
            rollout_extras, mask=valid if weights is None else valid * weights
        )


def test_weights_are_routed_like_the_mask_and_never_get_lost():
    weights, mask = jnp.full((T, B), 0.5), jnp.ones((T, B), bool).at[0].set(False)
    net = Sequential([Weighted(), Parallel(a=Sampler(), b=Weighted())])
    net.update_statistics([PART, {"a": None, "b": PART}], weights=weights, mask=mask)
    rows = [float(tally.rows.get_value()) for tally in tallies(net)]
    assert rows == [(T - 1) * B / 2] * 2
    net = Sequential([Weighted(), Parallel(a=Tally())])
    before = values(net)
    with pytest.raises(TypeError, match="takes no weights.*would get lost") as error:
        net.update_statistics([PART, {"a": PART}], weights=weights)
    assert str(error.value).startswith("layers[1].components['a'] is Tally")
    assert_same(values(net), before)


@pytest.mark.parametrize("where", PLACES)
def test_a_child_without_statistics_is_called_without_the_mask(where):
    build, extras = PLACES[where]
    net = build(child := Sampler())
    for _ in range(2):
        net.update_statistics(extras, mask=jnp.zeros((T, B), bool).at[0].set(True))
    assert child.told
    assert [float(tally.rows.get_value()) for tally in tallies(net)] == (
        [2.0 * B] * len(tallies(net))
    )


@libraries
def test_a_container_that_takes_no_mask_is_judged_by_what_it_owns(library):
    class Their(library.Sequential):
        def update_statistics(self, rollout_extras):
            super().update_statistics(rollout_extras)

    mask = jnp.ones((T, B), bool)
    net = Sequential([Tally(), Their([Tally()])])
    with pytest.raises(TypeError, match=r"layers\[1\] is Their"):
        net.update_statistics([PART, [PART]], mask=mask)
    assert float(tallies(net)[0].rows.get_value()) == 0
    net = Sequential([Tally(), Their([Lift(linear())])])
    net.update_statistics([PART, [None]], mask=mask)
    assert float(tallies(net)[0].rows.get_value()) == T * B


@pytest.mark.parametrize("mask", [None, jnp.ones((T, B), bool)])
def test_a_child_that_refuses_takes_back_what_others_folded(mask):
    net = Sequential([Tally(), Parallel(a=Tally(), b=Tally())])
    good, bad = batch(0, T, B), jnp.ones((T, B, F + 1), jnp.float32)
    net.update_statistics([good, {"a": good, "b": good}])
    before = values(net)
    with pytest.raises(ValueError, match="wrong number") as error:
        net.update_statistics([good, {"a": good, "b": bad}], mask=mask)
    assert error.value.__notes__ == ["in components['b']", "in layers[1]"]
    assert_same(values(net), before)

    @nnx.jit
    def update(net):
        with pytest.raises(ValueError, match="wrong number"):
            net.update_statistics([good, {"a": good, "b": bad}], mask=mask)

    update(net)
    assert_same(values(net), before)


def test_a_module_shared_by_two_parents_folds_what_each_saw():
    shared = Tally()
    heads = Parallel(a=Sequential([shared, linear()]), b=Sequential([jnp.cos, shared]))
    _, (_, extras) = rollout(heads, batch(0, T, B))
    for graph_mode in (True, False):
        with nnx.set_graph_mode(graph_mode):
            heads.update_statistics(extras, mask=jnp.ones((T, B), bool))
    assert float(shared.rows.get_value()) == 4 * T * B
    # The structure that counts once: ahead of both heads.
    once = Sequential([shared := Tally(), Parallel(a=linear(), b=jnp.cos)])
    _, (_, extras) = rollout(once, batch(0, T, B))
    for _ in range(2):
        once.update_statistics(extras)
    assert float(shared.rows.get_value()) == 2 * T * B


# --- Errors


def test_a_child_that_cannot_be_lifted_is_named():
    with pytest.raises(TypeError) as error:
        Sequential([jnp.tanh, Sequential([jnp.tanh])[0], 3])
    assert error.value.__notes__ == ["in layers[2]"]
    with pytest.raises(TypeError) as error:
        Parallel(a=jnp.tanh, b=3)
    assert error.value.__notes__ == ["in components['b']"]


def test_a_module_without_all_methods_is_named():
    class Half(nnx.Module):
        def initialize_state(self, batch_size):
            return ()

        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(state, x, 0.0, {})

    with pytest.raises(TypeError, match=r"layers\[0\] is Half.*update_statistics"):
        Sequential([Half()])


def test_an_error_says_where_in_the_graph():
    net = Sequential([jnp.tanh, Parallel(a=Delay(jnp.zeros(F + 1, jnp.float32), 1))])
    with pytest.raises(ValueError, match="Delay: x is float32") as error:
        net(net.initialize_state(B), batch())
    assert error.value.__notes__ == ["in components['a']", "in layers[1]"]
