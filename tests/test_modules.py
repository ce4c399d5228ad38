# SPDX-License-Identifier: Apache-2.0
"""Laws of the policy graph: what goes in comes back to the same child, unwritten."""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import pickle
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import modules as ours
from nnx_norm.modules import (
    Concat,
    Delay,
    Lift,
    Parallel,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
)
from nnx_norm.normalizer import Normalizer

# Containers of every library at hand that only duck-types its children: each law about
# containers holds for ours, and with theirs around ours and ours around theirs.
LIBRARIES = [ours]
if importlib.util.find_spec("nnx_ppo"):
    LIBRARIES.append(importlib.import_module("nnx_ppo.networks.containers"))
libraries = pytest.mark.parametrize(
    "library", LIBRARIES, ids=[library.__name__ for library in LIBRARIES]
)

B, T, F = 4, 5, 3


class Seen(nnx.Variable):
    """A statistic, to tell from parameters."""


class Tally(StatefulModule):
    """Sum and number of the rows it saw: the smallest stats-bearing module."""

    def __init__(self):
        self.total = Seen(jnp.zeros(F))
        self.rows = Seen(jnp.float32(0))

    def __call__(self, state, x, rollout_extras=None):
        emitted = x if rollout_extras is None else rollout_extras
        loss, metrics = jnp.zeros((), jnp.float32), {"first": x[:, 0]}
        return StatefulModuleOutput(state, x + 1, loss, metrics, emitted)

    def update_statistics(self, rollout_extras, *, mask=None):
        if rollout_extras.shape[-1] != F:
            raise ValueError("history has the wrong number of features")
        valid = jnp.ones(rollout_extras.shape[:-1]) if mask is None else mask
        weight = valid.astype(jnp.float32)
        total = (rollout_extras * weight[..., None]).sum(tuple(range(weight.ndim)))
        self.total.set_value(self.total.get_value() + total)
        self.rows.set_value(self.rows.get_value() + weight.sum())


class Maskless(Tally):
    """As a library's that knows no masks."""

    def update_statistics(self, rollout_extras):  # pyright: ignore
        super().update_statistics(rollout_extras)


class Memory(StatefulModule):
    """The sum of an episode's inputs, and a loss per environment."""

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size, F))

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        state = state + x
        return StatefulModuleOutput(state, state, x[:, 0], {}, rollout_extras)


class Duck:
    """The four methods and nothing else: no nnx, an output of its own kind."""

    def initialize_state(self, batch_size):
        return jnp.zeros(batch_size)

    def reset_state(self, prev_state):
        return prev_state * 0

    def update_statistics(self, rollout_extras):
        pass

    def __call__(self, state, x, rollout_extras=None):
        return SimpleNamespace(
            next_state=state + 1,
            output=x * 2,
            regularization_loss=jnp.asarray(0.0),
            metrics={},
            rollout_extras=None,
        )


def double(x):
    """A function that pickles, unlike jnp.tanh."""
    return 2 * x


def batch(seed=0, *lead):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=(*(lead or (B,)), F)), jnp.float32
    )


def linear(seed=0, features=F):
    return nnx.Linear(F, features, rngs=nnx.Rngs(seed))


def values(module):
    state = nnx.state(module, nnx.Not(nnx.RngKey))  # NumPy takes no keys
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def tallies(module):
    return [m for _, m in nnx.iter_modules(module) if isinstance(m, Tally)]


def rollout(net, xs):
    """A rollout as a training loop does it: the module closed over, extras stacked."""

    def step(state, x):
        out = net(state, x)
        return out.next_state, (out.output, out.rollout_extras)

    return jax.lax.scan(step, net.initialize_state(xs.shape[1]), xs)


def graph():
    """Every kind of module at once."""
    return Sequential(
        [
            Tally(),
            Delay(jnp.zeros(F), 2),
            linear(1),
            Parallel(b=Sequential([Tally(), double]), a=Memory()),
            Concat(b=linear(2, 2), a=Tally()),
        ]
    )


# --- StatefulModuleOutput


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


# --- StatefulModule


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


# --- Routing


@libraries
def test_sequential_composes(library):
    net = library.Sequential([Tally(), Memory(), Lift(jnp.square)])
    x = batch()
    out = net(net.initialize_state(B), x)
    np.testing.assert_allclose(out.output, (np.asarray(x) + 1) ** 2, rtol=1e-6)
    out = net(out.next_state, x)
    np.testing.assert_allclose(out.output, (2 * (np.asarray(x) + 1)) ** 2, rtol=1e-5)
    assert out.regularization_loss.shape == (B,)
    assert_same(out.metrics, {0: {"first": x[:, 0]}, 1: {}, 2: {}})
    assert_same(out.rollout_extras, [x, None, None])


@libraries
def test_parallel_gives_all_the_same_input(library):
    net = library.Parallel({"z": Lift(jnp.square), "a": Memory()})
    x = batch()
    out = net(net.initialize_state(B), x)
    assert_same(out.output, {"z": x * x, "a": x})
    assert_same(out.next_state, {"z": (), "a": x})
    assert_same(out.rollout_extras, {"z": None, "a": None})
    assert set(out.metrics) == {"z", "a"}


@libraries
def test_concat_gives_each_its_entry_and_joins(library):
    net = library.Concat(z=Lift(jnp.square), a=Tally())
    x, y = batch(1), batch(2)
    out = net(net.initialize_state(B), {"a": y, "z": x})
    assert_same(out.output, jnp.concatenate([x * x, y + 1], -1))
    assert_same(out.rollout_extras, {"a": y, "z": None})


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
    assert_same(out.next_state, [jnp.ones(B), {"a": jnp.ones(B)}])
    assert_same(net.reset_state(out.next_state), net.initialize_state(B))
    net.update_statistics(out.rollout_extras)


@pytest.mark.parametrize("outer", LIBRARIES, ids=lambda m: "out:" + m.__name__)
@pytest.mark.parametrize("inner", LIBRARIES, ids=lambda m: "in:" + m.__name__)
def test_containers_nest_in_those_of_other_libraries(outer, inner):
    def build():
        heads = inner.Parallel(a=Tally(), b=Delay(jnp.zeros(F), 1))
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
        [Spy(), Delay(jnp.zeros(F), 1), library.Parallel(a=Spy(), b=Lift(jnp.tanh))]
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

    after = jax.vmap(reset)(done, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for now, was, new in zip(*map(jax.tree.leaves, (after, state, fresh)), strict=True):
        assert now.dtype == was.dtype
        np.testing.assert_array_equal(now[::2], new[::2])
        np.testing.assert_array_equal(now[1::2], was[1::2])


def test_concat_joins_in_the_given_order_whatever_happens_to_the_module():
    """nnx sorts a Dict's keys in a transform: z, a, m became a, m, z after one jit."""
    net = Concat(z=jnp.negative, a=jnp.square, m=Tally())
    x = {name: batch(i) for i, name in enumerate("zam")}
    state = net.initialize_state(B)
    expected = jnp.concatenate([-x["z"], x["a"] ** 2, x["m"] + 1], -1)
    run = nnx.jit(lambda net, x: net(state, x).output)
    for _ in range(2):
        np.testing.assert_allclose(net(state, x).output, expected, rtol=1e-6)
        np.testing.assert_allclose(run(net, x), expected, rtol=1e-6)
    for other in (copy.deepcopy(net), nnx.merge(*nnx.split(net)), nnx.clone(net)):
        assert list(other(state, x).output[0]) == list(net(state, x).output[0])


@pytest.mark.parametrize("name", ["items", "keys", "values", "get", "a b", "", "a/b.c"])
def test_a_component_may_have_any_name(name):
    net = Parallel({name: Tally(), "other": double})
    net = pickle.loads(pickle.dumps(nnx.merge(*nnx.split(net))))
    out = net(net.initialize_state(B), batch())
    net.update_statistics(out.rollout_extras)
    assert set(out.output) == {name, "other"}
    assert float(net.components[name].rows.get_value()) == B


def test_children_can_be_reached_and_replaced():
    layers = [Tally(), Memory()]
    net = Sequential(layer for layer in layers)
    assert len(net) == 2 and list(net) == layers
    assert net[0] is layers[0] and net[-1] is net.layers[1] is layers[1]
    heads = Parallel(a=Memory())
    heads.components["a"] = Tally()
    heads.components["b"] = Duck()
    out = heads(heads.initialize_state(B), batch())
    assert_same(out.output, {"a": batch() + 1, "b": batch() * 2})


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
        self.kernel = nnx.Param(jnp.ones(F))
        self.lora = nnx.LoRAParam(jnp.ones(F))
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
    good, bad = batch(0, T, B), jnp.ones((T, B, F + 1))
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


def any_of(value: Any) -> Any:
    """Hides a type from the checker, where it is the wrong one on purpose."""
    return value


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Sequential([]), ValueError, "no layers"),
        (lambda: Sequential(any_of(linear())), TypeError, "Linear; expected a list"),
        (lambda: Sequential({"a": linear()}), TypeError, "dict; expected a list"),
        (lambda: Sequential([jnp.tanh, 3]), TypeError, "int; expected a callable"),
        (lambda: Sequential([nnx.Linear]), TypeError, "class Linear; pass an inst"),
        (lambda: Sequential([Tally]), TypeError, "class Tally; pass an instance"),
        (lambda: Parallel(), ValueError, "Parallel got no components"),
        (lambda: Concat({}), ValueError, "Concat got no components"),
        (lambda: Parallel({"a": jnp.tanh}, b=jnp.tanh), ValueError, "not both"),
        (
            lambda: Parallel(any_of({0: jnp.tanh})),
            TypeError,
            r"keys \[0\]; expected strings",
        ),
        (lambda: Parallel(any_of([jnp.tanh])), TypeError, "list; expected a dict"),
        (lambda: Concat(a=None), TypeError, "NoneType; expected a callable"),
        (lambda: Lift(any_of(Tally())), TypeError, "Tally, which has a state"),
        (lambda: Lift(any_of(3)), TypeError, "int; expected a callable"),
    ],
)
def test_what_cannot_be_built(build, error, words):
    with pytest.raises(error, match=words):
        build()


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


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ([()], ValueError),
        ([(), (), ()], ValueError),
        ((), ValueError),
        (None, TypeError),
        ({0: (), 1: ()}, TypeError),
    ],
)
def test_sequential_refuses_parts_that_do_not_fit(state, error):
    net = Sequential([jnp.tanh, Lift(jnp.cos)])
    with pytest.raises(error, match="state is .*expected a list of 2"):
        net(state, batch())
    with pytest.raises(error, match="state is .*expected a list of 2"):
        net.reset_state(state)
    with pytest.raises(error, match="rollout_extras is .*expected a list of 2"):
        net.update_statistics(state)
    if state is not None:
        with pytest.raises(error, match="rollout_extras is .*expected a list of 2"):
            net(net.initialize_state(B), batch(), state)


@pytest.mark.parametrize("container", [Parallel, Concat])
@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"a": ()}, ValueError),
        ({"a": (), "b": (), "c": ()}, ValueError),
        ({}, ValueError),
        (None, TypeError),
        ([(), ()], TypeError),
    ],
)
def test_named_containers_refuse_parts_that_do_not_fit(container, state, error):
    net = container(b=jnp.tanh, a=jnp.cos)
    x = {"a": batch(), "b": batch()}
    with pytest.raises(error, match="state is .*expected a dict of 'b', 'a'"):
        net(state, x)
    with pytest.raises(error, match="state is .*expected a dict"):
        net.reset_state(state)
    with pytest.raises(error, match="rollout_extras is .*expected a dict"):
        net.update_statistics(state)
    if state is not None:
        with pytest.raises(error, match="rollout_extras is .*expected a dict"):
            net(net.initialize_state(B), x, state)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (batch(), TypeError),
        ({"a": batch()}, ValueError),
        ({"a": batch(), "b": batch(), "extra": batch()}, ValueError),
    ],
)
def test_concat_refuses_an_input_that_does_not_fit(x, error):
    net = Concat(a=jnp.tanh, b=jnp.tanh)
    with pytest.raises(error, match="the input is .*expected a dict of 'a', 'b'"):
        net(net.initialize_state(B), x)


@pytest.mark.parametrize(
    "odd", [lambda x: x[:2], lambda x: x.sum(), lambda x: x[:, 0], lambda x: {"y": x}]
)
def test_concat_refuses_outputs_that_cannot_be_joined(odd):
    net = Concat(a=jnp.tanh, b=odd)
    with pytest.raises(ValueError, match=r"shapes \{'a': \(4, 3\), 'b':"):
        net(net.initialize_state(B), {"a": batch(), "b": batch()})


# --- Lift


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
    lifted = Lift(jax.tree_util.Partial(jnp.add, jnp.ones(F)))
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


def test_a_callable_that_cannot_be_static_is_refused_by_name():
    @dataclasses.dataclass
    class Scale:
        by: float

        def __call__(self, x):
            return x * self.by

    with pytest.raises(TypeError, match="Scale, which is not hashable"):
        Sequential([Scale(2.0)])


def test_equal_graphs_share_one_trace():
    traces = []

    def run(net, state, x):
        traces.append(1)
        return net(state, x).output

    jitted = nnx.jit(run)
    for seed in range(3):
        net = Sequential(
            [linear(seed), jax.nn.tanh, Delay({"x": jnp.ones(F)}, 2, float("nan"))]
        )
        net.layers[1] = Parallel(x=Lift(jax.nn.tanh))
        jitted(net, net.initialize_state(B), batch(seed))
    assert len(traces) == 1
    jitted(Sequential([linear(), lambda x: {"x": x}]), [(), ()], batch())
    assert len(traces) == 2


# --- Delay


Point = namedtuple("Point", "pos vel")
SAMPLES = {
    "array": jnp.zeros(F),
    "scalar": jnp.zeros(()),
    "int": jnp.zeros((2, 2), jnp.int32),
    "bool": np.zeros(2, bool),
    "bfloat16": jnp.zeros(F, jnp.bfloat16),
    "float64": np.zeros(F),
    "spec": jax.ShapeDtypeStruct((F,), jnp.float32),
    "tree": {"b": (jnp.zeros(2), None), "a": jnp.zeros((), jnp.uint8)},
    "ordered": OrderedDict(b=jnp.zeros(2), a=OrderedDict(c=jnp.zeros(1, bool))),
    "point": Point(jnp.zeros(2), OrderedDict(x=jnp.zeros(1))),
    "empty": {},
}


def series(sample, *lead):
    """Inputs like `sample`, every value told apart as far as its dtype can."""
    rng = np.random.default_rng(0)

    def leaf(s):
        drawn = rng.integers(0, 2 if s.dtype == bool else 200, (*lead, *s.shape))
        return jnp.asarray(drawn.astype(s.dtype))

    return jax.tree.map(leaf, sample)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("name", SAMPLES)
def test_delay_is_a_shift_in_time(name, k):
    sample = SAMPLES[name]
    delay, xs = Delay(sample, k, initial_value=1), series(sample, T, B)

    def step(state, x):
        out = delay(state, x)
        return out.next_state, out.output

    state, outputs = jax.lax.scan(step, delay.initialize_state(B), xs, length=T)
    assert state["idx"].tolist() == [T % k] * B and state["idx"].dtype == jnp.int32
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(plain(xs)), strict=True)
    for got, x in pairs:
        filler = np.ones((min(k, T), *x.shape[1:]))
        expected = np.concatenate([filler, np.asarray(x, np.float64)])[:T]
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float64), expected)


def plain(tree):
    return jax.tree.map(
        lambda n: {k: plain(v) for k, v in n.items()} if isinstance(n, dict) else n,
        tree,
        is_leaf=lambda n: isinstance(n, dict),
    )


def test_mappings_of_every_kind_are_one_structure():
    delay = Delay(SAMPLES["ordered"], 1)
    x = series(SAMPLES["ordered"], B)
    state = delay.initialize_state(B)
    outputs = []
    for given_x in (x, plain(x), nnx.Dict(b=x["b"], a=nnx.Dict(c=x["a"]["c"]))):
        out = delay(delay(state, given_x).next_state, given_x)
        assert jax.tree.structure(out.next_state) == jax.tree.structure(state)
        outputs.append(out.output)
    assert type(outputs[0]) is dict
    for output in outputs:
        assert_same(output, plain(x))


@hypothesis.given(
    k=st.integers(1, 4),
    resets=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), max_size=12),
)
def test_each_environment_is_delayed_since_its_own_reset(k, resets):
    delay = Delay(jnp.zeros(()), k, initial_value=-1)
    state = delay.initialize_state(2)
    episodes = [[], []]
    for t, flags in enumerate(resets):
        for b in range(2):
            episodes[b] = [] if flags[b] else episodes[b]
        fresh = delay.reset_state(state)
        state = jax.tree.map(
            lambda new, old, flags=flags: jnp.stack(
                [new[b] if flags[b] else old[b] for b in range(2)]
            ),
            fresh,
            state,
        )
        out = delay(state, jnp.array([t, 100 + t], jnp.float32))
        state = out.next_state
        for b, past in enumerate(episodes):
            assert float(out.output[b]) == (past[-k] if len(past) >= k else -1)
            past.append(t + 100 * b)


def test_delay_emits_nothing_and_costs_nothing():
    out = Delay(jnp.zeros(F), 1)(Delay(jnp.zeros(F), 1).initialize_state(B), batch())
    loss = out.regularization_loss
    assert (out.rollout_extras, out.metrics) == (None, {})
    assert (loss.shape, loss.dtype, loss.weak_type) == ((), jnp.float32, False)


@pytest.mark.parametrize(
    ("k", "error"),
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)],
)
def test_delay_refuses_what_is_no_number_of_steps(k, error):
    with pytest.raises(error, match=f"k_steps is {k}"):
        Delay(jnp.zeros(F), k)
    assert Delay(jnp.zeros(F), np.int64(2)).k_steps == 2  # pyright: ignore


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (jnp.int32, float("nan")),
        (jnp.int32, float("inf")),
        (jnp.int32, 0.5),
        (jnp.uint8, 256),
        (jnp.uint8, -1),
        (bool, 2),
        (jnp.float16, 1e6),
        (jnp.float16, -65521),
    ],
)
def test_delay_refuses_an_initial_value_that_does_not_fit(dtype, value):
    sample = {"fine": jnp.zeros((0,), jnp.bfloat16), "odd": np.zeros(F, dtype)}
    with pytest.raises(ValueError, match=r"sample_input\['odd'\].*initial_value"):
        Delay(sample, 1, initial_value=value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (jnp.float32, float("nan")),
        (jnp.bfloat16, float("-inf")),
        (jnp.float32, 0.1),
        (jnp.int32, 2**31 - 1),
        (jnp.uint8, 255.0),
        (bool, 1),
        (jnp.int8, np.int64(-128)),
        (jnp.float32, jnp.float32(2)),
    ],
)
def test_delay_keeps_an_initial_value_that_fits(dtype, value):
    delay = Delay(jnp.zeros(F, dtype), 2, initial_value=value)
    state = delay.initialize_state(B)
    expected = np.full((B, 2, F), np.asarray(value)).astype(dtype)
    assert state["buffer"].dtype == dtype
    np.testing.assert_array_equal(state["buffer"], expected)
    np.testing.assert_array_equal(delay.reset_state(state)["buffer"], expected)


def test_delay_judges_an_initial_value_by_the_dtype_that_jax_keeps():
    sample = np.zeros(F)  # float64, which a buffer has only in 64-bit mode
    with pytest.raises(ValueError, match="dtype float32, which can't hold"):
        Delay(sample, 1, initial_value=1e300)
    with jax.enable_x64(True):
        state = Delay(sample, 1, initial_value=1e300).initialize_state(B)
        assert float(state["buffer"].max()) == 1e300


@pytest.mark.parametrize("value", ["0", [0.0], None, jnp.zeros(2), 1j])
def test_delay_refuses_an_initial_value_that_is_no_number(value):
    with pytest.raises(TypeError, match="initial_value"):
        Delay(jnp.zeros(F), 1, initial_value=value)


@pytest.mark.parametrize("sample", [(3,), {"a": 3}, "text"])
def test_delay_refuses_a_sample_of_shapes(sample):
    with pytest.raises(TypeError, match=r"sample_input.*expected an array"):
        Delay(sample, 1)


@pytest.mark.parametrize(
    ("vel", "came"),
    [
        (jnp.zeros((B, F + 1)), r"float32 of shape \(4, 4\)"),
        (jnp.zeros((B, 1)), r"float32 of shape \(4, 1\)"),  # would broadcast
        (jnp.zeros(F), r"float32 of shape \(3,\)"),
        (jnp.zeros((1, F)), r"float32 of shape \(1, 3\)"),
        (jnp.zeros((B, F), jnp.int32), "int32"),
        (jnp.zeros((B, F), jnp.bfloat16), "bfloat16"),
        (jnp.zeros((B, F), bool), "bool"),
    ],
)
def test_delay_refuses_a_leaf_that_does_not_fit_its_buffer(vel, came):
    delay = Delay({"pos": jnp.zeros(F), "vel": jnp.zeros(F)}, 2)
    x = {"pos": batch(), "vel": vel}
    words = rf"x\['vel'\] is {came}.* takes float32 of shape \(4, 3\)"
    if "(" not in came:
        words = rf"x\['vel'\] is {came} of shape \(4, 3\).* takes float32"
    with pytest.raises(ValueError, match=words):
        delay(delay.initialize_state(B), x)


def test_delay_takes_weak_types_and_numpy():
    delay = Delay(jnp.zeros(()), 1)
    state = delay.initialize_state(1)
    assert jnp.asarray([1.0]).dtype == jnp.float32
    weak = jnp.broadcast_to(jnp.asarray(2.0), (1,))
    for x in (weak, np.full(1, 2.0)):
        out = delay(delay(state, x).next_state, x)
        assert out.output.tolist() == [2.0] and not out.output.weak_type


def test_delay_refuses_another_structure_or_state():
    delay = Delay({"a": jnp.zeros(F)}, 2)
    state = delay.initialize_state(B)
    for x in (batch(), {"b": batch()}, {"a": (batch(),)}, {"a": None}):
        with pytest.raises(ValueError, match="Delay: x has the structure"):
            delay(state, x)
    longer = Delay({"a": jnp.zeros(F)}, 3).initialize_state(B)
    with pytest.raises(ValueError, match=r"state\['buffer'\]\['a'\] has shape"):
        delay(longer, {"a": batch()})
    other = Delay(jnp.zeros(F), 2).initialize_state(B)
    with pytest.raises(ValueError, match=r"state\['buffer'\] has the structure"):
        delay(other, {"a": batch()})


def test_an_error_says_where_in_the_graph():
    net = Sequential([jnp.tanh, Parallel(a=Delay(jnp.zeros(F + 1), 1))])
    with pytest.raises(ValueError, match="Delay: x is float32") as error:
        net(net.initialize_state(B), batch())
    assert error.value.__notes__ == ["in components['a']", "in layers[1]"]


# --- Transforms


def forward(net, state, x):
    out = net(state, x)
    return out.next_state, out.output, out.regularization_loss, out.rollout_extras


def by_scan(net, state, x):
    def step(carry, _):
        return carry, forward(net, state, x)

    return jax.tree.map(lambda leaf: leaf[0], jax.lax.scan(step, 0, None, length=2)[1])


def by_nnx_scan(net, state, x):
    @nnx.scan(in_axes=(None, nnx.Carry), out_axes=(nnx.Carry, 0), length=2)
    def step(net, carry):
        return carry, forward(net, state, x)

    return jax.tree.map(lambda leaf: leaf[0], step(net, jnp.zeros(()))[1])


def by_vmap(vmap):
    def run(net, state, x):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (state, x))
        out = vmap(forward, in_axes=(None, 0, 0))(net, *stacked)
        return jax.tree.map(lambda leaf: leaf[1], out)

    return run


def by_cond(net, state, x):
    return jax.lax.cond(
        x.sum() < jnp.inf,
        lambda: forward(net, state, x),
        lambda: jax.tree.map(jnp.zeros_like, forward(net, state, x)),
    )


def by_grad(net, state, x):
    def loss(net, x):
        out = forward(net, state, x)
        return out[1].sum(), out

    return nnx.grad(loss, argnums=1, has_aux=True)(net, x)[1]


def by_closure(net, state, x):
    return jax.jit(lambda state, x: forward(net, state, x))(state, x)


TRANSFORMS = {
    "jax.jit": jax.jit(forward),
    "closure": by_closure,
    "nnx.jit": nnx.jit(forward),
    "nnx.jit tree": nnx.jit(forward, graph=False),
    "scan": by_scan,
    "nnx.scan": by_nnx_scan,
    "vmap": by_vmap(jax.vmap),
    "nnx.vmap": by_vmap(nnx.vmap),
    "grad": by_grad,
    "remat": jax.checkpoint(forward),
    "nnx.remat": nnx.remat(forward),
    "cond": by_cond,
    "merge": lambda net, *args: forward(nnx.merge(*nnx.split(net)), *args),
    "deepcopy": lambda net, *args: forward(copy.deepcopy(net), *args),
    "pickle": lambda net, *args: forward(pickle.loads(pickle.dumps(net)), *args),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_forward_under_a_transform_is_the_forward_and_writes_nothing(transform):
    net, xs = graph(), batch(0, 3, B)
    state, (_, extras) = rollout(net, xs)
    net.update_statistics(extras)
    before = values(net)
    expected = forward(net, state, xs[0])
    got = TRANSFORMS[transform](net, state, xs[0])
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert_same(values(net), before)


def test_eval_shape_knows_the_forward():
    net = graph()
    state = net.initialize_state(B)
    shapes = jax.eval_shape(functools.partial(forward, net), state, batch())
    out = forward(net, state, batch())
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype), out
    )
    abstract = nnx.eval_shape(graph)
    assert jax.tree.structure(nnx.state(abstract)) == jax.tree.structure(nnx.state(net))


def test_a_state_is_a_scan_carry_and_gradients_flow_through_time():
    """What went into a delay at step 0 has its gradient when it comes out."""
    net = Sequential([jnp.square, Delay(jnp.zeros(F), 2), Memory()])

    def last(xs):
        return rollout(net, xs)[1][0][-1].sum()

    grads = jax.grad(last)(batch(0, T, B))
    expected = 2 * np.asarray(batch(0, T, B))
    expected[-2:] = 0  # still in the delay line
    np.testing.assert_allclose(grads, expected, rtol=1e-6)


def test_a_population_of_graphs():
    @nnx.vmap
    def create(key):
        return Sequential([nnx.Linear(F, F, rngs=nnx.Rngs(key)), Tally()])

    nets = create(jax.random.split(jax.random.key(0), 2))
    xs = batch(0, 2, B)

    @nnx.vmap
    def act(net, x):
        out = net(net.initialize_state(B), x)
        net.update_statistics([None, out.rollout_extras[1][None]])
        return out.output

    for _ in range(2):
        assert act(nets, xs).shape == (2, B, F)
    assert nets[1].rows.get_value().tolist() == [2 * B, 2 * B]


# --- With the Normalizer: it folds the rows it saw, wherever it stands


def assert_folded(norm, rows, times=1):
    """`norm` has the statistics of `rows`, `[N, *feat]`, seen `times` times."""
    rows = np.asarray(rows, np.float64)
    assert norm.count == times * len(rows)
    np.testing.assert_allclose(
        norm.mean.get_value(), rows.mean(0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(norm.variance, rows.var(0), rtol=1e-5, atol=1e-6)


@nnx.jit
def train_step(net, xs, keywords):
    extras = rollout(net, xs)[1][1]
    net.update_statistics(extras, **keywords)
    return extras


def learn(net, xs, **keywords):
    """Two training steps; the extras of the second."""
    train_step(net, xs, keywords)
    return train_step(net, xs, keywords)


def flat(xs):
    return np.asarray(xs).reshape(-1, np.shape(xs)[-1])


@libraries
def test_a_normalizer_behind_a_delay_folds_the_filler_too(library):
    net = library.Sequential([Delay(jnp.zeros(F), 2, initial_value=7), Normalizer(F)])
    xs = 3 + batch(0, T, B)
    learn(net, xs)
    late = np.concatenate([np.full((2, B, F), 7.0), np.asarray(xs)[:-2]])
    assert_folded(net[1], flat(late), times=2)
    ahead = library.Sequential([Normalizer(F), Delay(jnp.zeros(F), 2)])
    learn(ahead, xs)
    assert_folded(ahead[0], flat(xs), times=2)


@libraries
def test_a_normalizer_after_an_encoder_folds_what_the_encoder_gave(library):
    encoder = linear(1, 2)
    net = library.Sequential([Lift(encoder), Normalizer(2)])
    xs = batch(0, T, B)
    learn(net, xs)
    assert_folded(net[1], flat(encoder(xs)), times=2)
    state = net.initialize_state(B)
    out = np.asarray(net(state, xs[0]).output, np.float64)
    seen = np.asarray(encoder(xs), np.float64)
    expected = (seen[0] - seen.mean((0, 1))) / seen.std((0, 1))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@libraries
def test_normalizers_inside_parallel_and_concat_fold_their_own(library):
    split = Lift(lambda x: {"pos": x[:, :1], "vel": 5 * x[:, 1:]})
    join = library.Concat(vel=Normalizer(2), pos=Normalizer(1))
    heads = library.Parallel(norm=Normalizer(F), raw=Lift(jnp.negative))
    net = library.Sequential([split, join, heads])
    xs = batch(0, T, B)
    extras = learn(net, xs)
    assert_folded(join.components["pos"], flat(xs[..., :1]), times=2)
    assert_folded(join.components["vel"], flat(5 * xs[..., 1:]), times=2)
    assert heads.components["norm"].count == 2 * T * B
    assert extras[1]["vel"].shape == (T, B, 2) and extras[2]["raw"] is None


def test_a_normalizer_twice_in_one_graph_folds_each_place():
    """Behind a normalizer that has seen the data comes data of mean 0 and std 1."""
    net = Sequential([Normalizer(F), jnp.tanh, Normalizer(F)])
    extras = learn(net, 4 + batch(0, T, B))
    assert net[0].count == net[2].count == 2 * T * B
    assert_folded(net[0], flat(extras[0]), times=2)
    assert not np.allclose(net[0].mean.get_value(), net[2].mean.get_value())


def test_a_normalizer_shared_by_two_heads_counts_what_each_saw():
    norm = Normalizer(F)
    heads = Parallel(actor=Sequential([norm, linear()]), critic=Sequential([norm]))
    xs = batch(0, T, B)
    learn(heads, xs)
    assert_folded(norm, flat(xs), times=4)
    once = Sequential([norm := Normalizer(F), Parallel(actor=linear(), critic=jnp.cos)])
    learn(once, xs)
    assert_folded(norm, flat(xs), times=2)


def test_a_mask_reaches_every_normalizer():
    net = Sequential([Normalizer(F), Parallel(a=Normalizer(F), b=linear())])
    xs, mask = batch(0, T, B), np.arange(T * B).reshape(T, B) % 3 > 0
    learn(net, xs, mask=jnp.asarray(mask))
    assert_folded(net[0], np.asarray(xs)[mask], times=2)
    assert net[1].components["a"].count == 2 * mask.sum()


def test_normalizers_are_updated_all_or_none():
    net = Sequential([Normalizer(F), Parallel(a=Normalizer(F), b=Normalizer(F))])
    extras = learn(net, batch(0, T, B))
    before = values(net)
    wrong = [extras[0], {"a": extras[1]["a"], "b": extras[1]["b"][..., :1]}]
    with pytest.raises(ValueError, match="shape"):
        net.update_statistics(wrong)
    assert_same(values(net), before)
    net.update_statistics(extras)
    assert net[0].count == net[1].components["b"].count == 3 * T * B
