# SPDX-License-Identifier: Apache-2.0
"""Laws of the containers: how each composes, under every transform, with Normalizer."""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph import (
    B,
    Duck,
    F,
    Memory,
    T,
    Tally,
    assert_same,
    batch,
    double,
    graph,
    libraries,
    linear,
    rollout,
    values,
)

from nnx_norm.modules import Concat, Delay, Lift, Parallel, Sequential
from nnx_norm.normalizer import Normalizer


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
    ],
)
def test_what_cannot_be_built(build, error, words):
    with pytest.raises(error, match=words):
        build()


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


# --- Transforms


def test_equal_graphs_share_one_trace():
    traces = []

    def run(net, state, x):
        traces.append(1)
        return net(state, x).output

    jitted = nnx.jit(run)
    for seed in range(3):
        net = Sequential(
            [
                linear(seed),
                jax.nn.tanh,
                Delay({"x": jnp.ones(F, jnp.float32)}, 2, float("nan")),
            ]
        )
        net.layers[1] = Parallel(x=Lift(jax.nn.tanh))
        jitted(net, net.initialize_state(B), batch(seed))
    assert len(traces) == 1
    jitted(Sequential([linear(), lambda x: {"x": x}]), [(), ()], batch())
    assert len(traces) == 2


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

    return jax.tree.map(lambda leaf: leaf[0], step(net, jnp.zeros((), jnp.float32))[1])


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


# Some under jit as well: eagerly they would compile one operation after the other.
TRANSFORMS = {
    "jax.jit": jax.jit(forward),
    "closure": by_closure,
    "nnx.jit": nnx.jit(forward),
    "nnx.jit tree": nnx.jit(forward, graph=False),
    "scan": by_scan,
    "nnx.scan": by_nnx_scan,
    "vmap": jax.jit(by_vmap(jax.vmap)),
    "nnx.vmap": nnx.jit(by_vmap(nnx.vmap)),
    "grad": by_grad,
    "remat": jax.jit(jax.checkpoint(forward)),
    "nnx.remat": nnx.jit(nnx.remat(forward)),
    "cond": by_cond,
    "merge": lambda net, *args: forward(nnx.merge(*nnx.split(net)), *args),
    "deepcopy": lambda net, *args: forward(copy.deepcopy(net), *args),
    "pickle": lambda net, *args: forward(pickle.loads(pickle.dumps(net)), *args),
}


@functools.cache
def seasoned():
    """A graph after an update, a state and an input in mid-episode, its forward."""
    net, xs = graph(), batch(0, T, B)
    state, (_, extras) = rollout(net, xs)
    net.update_statistics(extras)
    return net, state, xs[0], forward(net, state, xs[0])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_forward_under_a_transform_is_the_forward_and_writes_nothing(transform):
    net, state, x, expected = seasoned()
    before = values(net)
    got = TRANSFORMS[transform](net, state, x)
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
    net = Sequential([jnp.square, Delay(jnp.zeros(F, jnp.float32), 2), Memory()])

    def last(xs):
        return rollout(net, xs)[1][0][-1].sum()

    grads = jax.grad(last)(batch(0, T, B))
    expected = 2 * np.asarray(batch(0, T, B))
    expected[-2:] = 0  # still in the delay line
    np.testing.assert_allclose(grads, expected, rtol=1e-6)


def test_a_population_of_graphs():
    @nnx.jit
    @nnx.vmap
    def create(key):
        return Sequential([nnx.Linear(F, F, rngs=nnx.Rngs(key)), Tally()])

    nets = create(jax.random.split(jax.random.key(0), 2))
    xs = batch(0, 2, B)

    @nnx.jit
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


def learn(net, xs, **keywords):
    """Two training steps; the extras of the second."""
    for _ in range(2):
        extras = rollout(net, xs)[1][1]
        net.update_statistics(extras, **keywords)
    return extras


def flat(xs):
    return np.asarray(xs).reshape(-1, np.shape(xs)[-1])


@libraries
def test_a_normalizer_behind_a_delay_folds_the_filler_too(library):
    net = library.Sequential(
        [Delay(jnp.zeros(F, jnp.float32), 2, initial_value=7), Normalizer(F)]
    )
    xs = 3 + batch(0, T, B)
    learn(net, xs)
    late = np.concatenate([np.full((2, B, F), 7.0), np.asarray(xs)[:-2]])
    assert_folded(net[1], flat(late), times=2)
    ahead = library.Sequential([Normalizer(F), Delay(jnp.zeros(F, jnp.float32), 2)])
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


def test_a_shared_normalizer_stays_one_through_split_merge_and_a_checkpoint():
    def build() -> Parallel:
        norm = Normalizer(F)
        return Parallel(actor=Sequential([norm, jnp.tanh]), critic=Sequential([norm]))

    def norms(net: Parallel) -> tuple[Normalizer, Normalizer]:
        return net.components["actor"][0], net.components["critic"][0]

    net, xs = build(), batch(0, T, B)
    extras = {"actor": [xs, None], "critic": [xs]}
    net.update_statistics(extras)
    loaded = build()
    nnx.update(loaded, jax.tree.map(np.asarray, nnx.state(net)))
    merged = nnx.merge(*nnx.split(nnx.clone(net)))  # merge alone shares Variables
    for other in (merged, nnx.clone(net), loaded):
        one, two = norms(other)
        assert one is two and one.count == 2 * T * B
        other.update_statistics(extras)
        assert one.count == 4 * T * B
    assert norms(net)[0].count == 2 * T * B


def test_weights_reach_every_normalizer_as_if_it_were_alone():
    xs, weights = batch(0, T, B), np.arange(T * B).reshape(T, B) % 3
    net = Sequential([Parallel(a=Normalizer(F), b=linear(), c=Delay(xs[0, 0], 1))])
    net.update_statistics([{"a": xs, "b": None, "c": None}], weights=weights)
    alone = Normalizer(F)
    alone.update_statistics(xs, weights=weights)
    assert net[0].components["a"].count == alone.count == weights.sum()
    assert_same(values(net[0].components["a"]), values(alone))


def test_a_mask_reaches_every_normalizer():
    """Here the whole training is one program; `learn` by itself compiles its halves."""
    net = Sequential([Normalizer(F), Parallel(a=Normalizer(F), b=linear())])
    xs, mask = batch(0, T, B), np.arange(T * B).reshape(T, B) % 3 > 0
    train_step = nnx.jit(lambda net, xs, mask: learn(net, xs, mask=mask))
    train_step(net, xs, jnp.asarray(mask))
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
