# SPDX-License-Identifier: Apache-2.0
"""Under every transform: the forward pass only reads, the update stays in place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from support import EPS, bits, statistics

from nnx_norm import Normalizer, NormalizerStatistics, fold

T, B, F = 3, 2, 4
MEAN, VARIANCE = np.array([1.0, -200.0, 0.1, 7.0]), np.array([4.0, 1e4, 1e-4, 0.0])

COUNT = 1000.125  # not whole, and a step of 1 is seen in the float32 counter


def known(**settings: Any) -> Normalizer:
    norm = Normalizer(F, **settings)
    norm.set_statistics(MEAN, VARIANCE, COUNT)
    return norm


def history(seed: int = 0) -> jax.Array:
    noise = np.random.default_rng(seed).normal(size=(T, B, F))
    return jnp.asarray(MEAN + (1 + np.sqrt(VARIANCE)) * noise, jnp.float32)


X = history()  # [T, B, F]: each transform below normalizes all of it


def step(norm: Normalizer, x: Any) -> tuple[jax.Array, jax.Array]:
    out = norm((), x)
    return out.output, out.rollout_extras


def forward(norm: Normalizer) -> Any:
    return step(norm, X)


def scan_closure(norm: Normalizer) -> Any:
    return jax.lax.scan(lambda c, x: (c, step(norm, x)), 0, X)[1]


def nnx_scan_closure(norm: Normalizer) -> Any:
    return nnx.scan(lambda x: step(norm, x), in_axes=0, out_axes=0)(X)


def nnx_scan_none(norm: Normalizer) -> Any:
    return nnx.scan(step, in_axes=(None, 0), out_axes=0)(norm, X)


def nnx_scan_carried(norm: Normalizer) -> Any:
    axes = nnx.StateAxes({NormalizerStatistics: nnx.Carry})
    return nnx.scan(step, in_axes=(axes, 0), out_axes=0)(norm, X)


def nnx_scan_carry(norm: Normalizer) -> Any:
    def body(norm: Normalizer, x: Any) -> Any:
        return norm, step(norm, x)

    return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(norm, X)[1]


def nnx_vmap(norm: Normalizer) -> Any:
    y, extras = nnx.vmap(step, in_axes=(None, 1), out_axes=1)(norm, X)
    again, _ = nnx.vmap(step, in_axes=(None, 1), out_axes=1)(norm, X)
    np.testing.assert_array_equal(y, again)
    return y, extras


def grad_aux(norm: Normalizer) -> Any:
    def loss(x: Any) -> Any:
        y, extras = step(norm, x)
        return y.sum(), (y, extras)

    return jax.grad(loss, has_aux=True)(X)[1]


def nnx_grad_aux(norm: Normalizer) -> Any:
    def loss(norm: Normalizer) -> Any:
        y, extras = step(norm, X)
        return y.sum(), (y, extras)

    return nnx.grad(loss, has_aux=True)(norm)[1]


def cond(norm: Normalizer) -> Any:
    return jax.lax.cond(X[0, 0, 0] < 1e9, lambda x: step(norm, x), lambda x: (x, x), X)


def nnx_cond(norm: Normalizer) -> Any:
    return nnx.cond(X[0, 0, 0] < 1e9, step, lambda n, x: (x, x), norm, X)


FORWARDS: dict[str, Callable[[Normalizer], Any]] = {
    "eager": forward,
    "jax.jit closure": lambda n: jax.jit(lambda x: step(n, x))(X),
    "jax.jit argument": lambda n: jax.jit(step)(n, X),
    "nnx.jit": lambda n: nnx.jit(step)(n, X),
    "nnx.jit tree": lambda n: nnx.jit(step, graph=False)(n, X),
    "lax.scan closure": scan_closure,
    "nnx.scan closure": nnx_scan_closure,
    "nnx.scan None": nnx_scan_none,
    "nnx.scan StateAxes": nnx_scan_carried,
    "nnx.scan Carry": nnx_scan_carry,
    "vmap closure": lambda n: jax.vmap(lambda x: step(n, x))(X),
    "nnx.vmap": nnx_vmap,
    "lax.map": lambda n: jax.lax.map(lambda x: step(n, x), X, batch_size=2),
    "grad": grad_aux,
    "nnx.grad": nnx_grad_aux,
    "remat": lambda n: jax.checkpoint(lambda x: step(n, x))(X),
    "nnx.remat": lambda n: nnx.remat(step)(n, X),
    "cond": cond,
    "nnx.cond": nnx_cond,
    "scan in nnx.jit": lambda n: nnx.jit(scan_closure)(n),
}


@pytest.mark.parametrize("transform", FORWARDS.values(), ids=FORWARDS.keys())
def test_forward_reads_only_and_gives_the_same_everywhere(transform):
    norm = known(clip=3.0)
    before = bits(norm)
    y, extras = transform(norm)
    assert bits(norm) == before
    right, _ = forward(norm)
    np.testing.assert_allclose(y, right, rtol=4 * EPS, atol=1e-30)
    assert np.asarray(extras).tobytes() == np.asarray(X).tobytes()


def test_emitting_moments_reads_only_too():
    norm = known(emit="moments")
    before = bits(norm)
    _, extras = jax.lax.scan(lambda c, x: (c, step(norm, x)), 0, X)[1]
    _, mapped = jax.vmap(lambda x: step(norm, x))(X)
    assert bits(norm) == before
    for a, b in zip(jax.tree.leaves(extras), jax.tree.leaves(mapped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    norm.update_statistics(extras)
    assert norm.count == COUNT + T * B


def test_eval_shape_gives_shapes():
    y, extras = nnx.eval_shape(step, known(), X)
    for got in (y, extras):
        assert (got.shape, got.dtype) == (X.shape, X.dtype)
    abstract = nnx.eval_shape(lambda: Normalizer({"a": F, "b": ()}))
    shapes = jax.tree.map(lambda v: v.shape, abstract.mean.get_value())
    assert shapes == {"a": (F,), "b": ()}


# Gradients


def test_gradient_to_the_input_is_one_over_std():
    norm = known()
    right = np.broadcast_to(1 / np.asarray(norm.std), X.shape)
    for f in (
        norm.normalize,
        jax.checkpoint(norm.normalize),
        lambda x: norm((), x).output,
        lambda x: jax.vmap(norm.normalize)(x),
    ):
        grad = jax.grad(lambda x, f=f: f(x).sum())(X)
        np.testing.assert_array_equal(grad, right)
    grad = jax.grad(lambda y: norm.denormalize(y).sum())(X)
    np.testing.assert_array_equal(grad, np.broadcast_to(norm.std, X.shape))
    clipped = jax.grad(lambda x: known(clip=1e-3).normalize(x).sum())(X + 100)
    np.testing.assert_array_equal(clipped, 0 * X)


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_statistics_are_constants_to_every_gradient(emit):
    norm = known(emit=emit)
    graphdef, state = nnx.split(norm)

    def loss(state: Any) -> Any:
        module = nnx.merge(graphdef, state)
        out = module((), X)
        y = out.output.sum() + module.denormalize(X).sum() + module.normalize(X).sum()
        return y + sum(jnp.sum(v) for v in jax.tree.leaves(out.rollout_extras))

    for leaf in jax.tree.leaves(jax.grad(loss)(state)):
        assert not np.any(leaf)


def test_no_gradient_leaks_out_of_moments_as_extras():
    norm = Normalizer(F, emit="moments")

    def loss(x: Any) -> Any:
        extras = norm((), x).rollout_extras
        return sum(jnp.sum(v) for v in jax.tree.leaves(extras))

    np.testing.assert_array_equal(jax.grad(loss)(X[0]), 0 * X[0])


class Encoder(nnx.Module):
    """A normalizer of what a layer makes of its input."""

    def __init__(self, **settings: Any):
        self.layer = nnx.Linear(F, F, rngs=nnx.Rngs(0))
        self.norm = Normalizer(F, **settings)


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_what_depends_on_parameters_may_be_folded_inside_a_loss(emit):
    model = Encoder(emit=emit)
    model.norm.set_statistics(0.0, 4.0, 10)

    def loss(model: Encoder, x: Any) -> Any:
        h = model.layer(x)
        out = jax.vmap(lambda h: step(model.norm, h))(h)
        model.norm.update_statistics(out[1])
        return out[0].sum()

    grads = nnx.grad(loss)(model, X)
    right = nnx.grad(lambda m, x: (m.layer(x) / 2).sum())(Encoder(), X)
    chosen = jax.tree.leaves(grads), jax.tree.leaves(right)
    for got, want in zip(*chosen, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert model.norm.count == 10 + T * B
    bits(model)  # no tracer is left


def test_an_optimizer_of_parameters_never_touches_them():
    model = Encoder()
    model.norm.set_statistics(MEAN, VARIANCE, 9)
    before, weights = bits(model.norm), bits(model.layer)
    tx = optax.adamw(0.1, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train(model: Encoder, optimizer: nnx.Optimizer) -> None:
        loss = nnx.grad(lambda m: (step(m.norm, m.layer(X))[0] ** 2).mean())
        optimizer.update(model, loss(model))

    with jax.numpy_dtype_promotion("standard"):  # optax multiplies ints with floats
        for _ in range(10):
            train(model, optimizer)
    assert bits(model.norm) == before and bits(model.layer) != weights
    shapes = [v.shape for v in jax.tree.leaves(nnx.state(optimizer))]
    assert sorted(set(shapes)) == [(), (F,), (F, F)]
    assert shapes.count((F,)) == shapes.count((F, F)) == 2  # mu and nu of the layer


# Updates


def update(norm: Normalizer, data: Any) -> None:
    norm.update_statistics(data)


def split_merge(norm: Normalizer, data: Any) -> None:
    @jax.jit
    def pure(state: Any, data: Any) -> Any:
        module = nnx.merge(graphdef, state)
        module.update_statistics(data)
        return nnx.state(module)

    graphdef, state = nnx.split(norm)
    nnx.update(norm, pure(state, data))


def returned(norm: Normalizer, data: Any) -> None:
    @jax.jit
    def pure(norm: Normalizer, data: Any) -> Any:
        norm.update_statistics(data)
        return nnx.state(norm)

    nnx.update(norm, pure(norm, data))


def in_cond(norm: Normalizer, data: Any) -> None:
    nnx.cond(data[0, 0, 0] < 1e9, update, lambda n, d: None, norm, data)


jitted = nnx.jit(update)
donated = nnx.jit(update, donate_argnums=0)

UPDATES: dict[str, Callable[[Normalizer, Any], None]] = {
    "nnx.jit tree": nnx.jit(update, graph=False),
    "unbound method": nnx.jit(Normalizer.update_statistics),
    "jax.jit split/merge": split_merge,
    "jax.jit returned": returned,
    "nnx.cond": in_cond,
    "donated": donated,
}


def test_an_eager_update_gives_the_statistics_of_a_jitted_one():
    norm, right = known(), known()  # to rounding: XLA fuses more where it sees more
    for seed in range(2):
        update(norm, history(seed))
        jitted(right, history(seed))
    assert norm.count == right.count == COUNT + 2 * T * B
    x, y = norm.to_dict(), right.to_dict()
    np.testing.assert_allclose(x["M2"], y["M2"], rtol=EPS)
    np.testing.assert_allclose(x["mean"], y["mean"], rtol=EPS)


@pytest.mark.parametrize("way", UPDATES.values(), ids=UPDATES.keys())
def test_updates_are_bit_equal_whichever_way_they_are_traced(way):
    norm, right = known(), known()
    for seed in range(2):
        way(norm, history(seed))
        jitted(right, history(seed))
    assert bits(norm) == bits(right)
    assert norm.count == COUNT + 2 * T * B


@pytest.mark.parametrize(
    "change",
    [
        lambda n: None,
        lambda n: n.reset(),
        lambda n: n.set_statistics(0.5, 2.0, 3),
        lambda n: n.copy_from(known()),
        lambda n: n.load_dict(known().to_dict()),
        lambda n: n.update_statistics(history(), mask=jnp.zeros((T, B), bool)),
    ],
    ids=["fresh", "reset", "set_statistics", "copy_from", "load_dict", "no-op"],
)
def test_every_buffer_can_be_donated_after_every_change(change):
    norm, expected = Normalizer(F), Normalizer(F)
    for module in (norm, expected):
        change(module)
    for _ in range(2):
        donated(norm, history())
        jitted(expected, history())
    assert bits(norm) == bits(expected)


def test_writing_through_a_closure_is_refused_and_leaves_no_tracer():
    norm = known()
    before = bits(norm)
    for transform in (jax.jit, nnx.jit, jax.vmap):
        with pytest.raises(TraceContextError, match="NormalizerStatistics"):
            transform(lambda x: norm.update_statistics(x))(X)
        assert bits(norm) == before
    with pytest.raises(TraceContextError, match="NormalizerStatistics"):
        jax.jit(lambda x: norm.set_statistics(x, 1.0, 1))(jnp.zeros(F))
    assert bits(norm) == before
    norm.update_statistics(X)
    assert norm.count == COUNT + T * B


def test_an_exception_behind_an_update_leaves_no_tracer():
    norm = known()
    before = bits(norm)

    @nnx.jit
    def update(norm: Normalizer, x: Any, features: int) -> None:
        norm.update_statistics(x)
        norm.update_statistics(x[..., : F - 1])

    for transform in (update, jax.jit(update), nnx.jit(update, graph=False)):
        with pytest.raises(ValueError, match="history has shape"):
            transform(norm, X, 1)
        assert bits(norm) == before


def test_a_closed_over_normalizer_keeps_the_statistics_of_compilation():
    """The pitfall that the docstring warns of, so that it is known when it ends."""
    norm = known()
    stale, fresh = jax.jit(lambda x: norm.normalize(x)), jax.jit(Normalizer.normalize)
    first = fresh(norm, X)
    np.testing.assert_allclose(stale(X), first, rtol=4 * EPS, atol=1e-30)
    norm.update_statistics(10 * X)
    np.testing.assert_allclose(stale(X), first, rtol=4 * EPS, atol=1e-30)
    assert np.all(np.abs(fresh(norm, X) - first) > 1e-3)


def test_carried_through_a_scan_shapes_and_types_hold():
    norm = Normalizer(1)
    data = jnp.broadcast_to(jnp.array([[[0.0], [2.0]]]), (3, 1, 2, 1))

    def body(norm: Normalizer, data: Any) -> Any:
        norm.update_statistics(data)
        return norm, norm.counter.get_value()

    norm, counts = jax.lax.scan(body, norm, data)
    assert counts.tolist() == [2.0, 4.0, 6.0]
    assert statistics(norm) == ([1.0], [6.0], 6)
    looped = Normalizer(1)
    axes = nnx.StateAxes({...: nnx.Carry})
    nnx.scan(lambda n, d: body(n, d)[1], in_axes=(axes, 0), out_axes=0)(looped, data)
    assert bits(looped) == bits(norm)


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_no_method_changes_a_shape_a_dtype_or_a_weak_type(emit):
    norm = Normalizer({"a": F, "b": ()}, emit=emit)

    def types() -> Any:
        return {path: kind[:3] for path, kind in bits(norm).items()}

    fresh = types()
    assert {(dtype, weak) for dtype, _, weak in fresh.values()} == {("float32", False)}
    data = {"a": X, "b": X[..., 0]}
    extras = jax.vmap(lambda x: norm((), x).rollout_extras)(data)
    norm.update_statistics(extras)
    assert types() == fresh
    norm.set_statistics(mean=1, variance=2, count=3)
    assert types() == fresh
    norm.load_dict(norm.to_dict())
    assert types() == fresh
    norm.copy_from(Normalizer({"a": F, "b": ()}))
    norm.reset()
    assert types() == fresh
    jitted(norm, extras)
    assert types() == fresh


# Tracing


class Counted:
    """`update` under a jit of its own, and how often it was traced."""

    def __init__(self, **settings: Any):
        self.traces = 0
        self.jitted = nnx.jit(self._update, **settings)

    def _update(self, norm: Normalizer, data: Any) -> None:
        self.traces += 1
        update(norm, data)

    def __call__(self, norm: Normalizer, data: Any) -> None:
        self.jitted(norm, data)


@pytest.mark.parametrize("graph", [True, False])
def test_one_trace_serves_all_updates_and_all_equal_normalizers(graph):
    def make() -> Normalizer:
        # Settings of other Python types, a predicate made anew, a tree made anew.
        return Normalizer(
            {"a": (F,), "b": 2},
            clip=5,
            epsilon=np.float32(0.5),  # pyright: ignore[reportArgumentType]
            exclude=lambda path: path == ("b",),
            decay=1,
        )

    count, norm, data = Counted(graph=graph), make(), {"a": X}
    for seed in range(4):
        count(norm, {"a": history(seed)})
    assert count.traces == 1
    count(make(), data)
    count(nnx.clone(norm), data)
    norm.reset()
    count(norm, data)
    norm.set_statistics(1.0, 2.0, 3)
    count(norm, data)
    norm.load_dict(norm.to_dict())
    count(norm, data)
    other = make()
    other.copy_from(norm)
    count(other, data)
    assert count.traces == 1


def test_freezing_and_unfreezing_costs_one_trace_more():
    count, norm = Counted(), known()
    for _ in range(4):
        norm.freeze()
        count(norm, X)
        norm.unfreeze()
        count(norm, X)
    assert count.traces == 2
    assert norm.count == COUNT + 4 * T * B


def test_an_eager_loop_traces_once():
    norm, traces = Normalizer(F), []
    norm.update_statistics(history())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold.moments, "merge", lambda *a: traces.append(1))
        for seed in range(3):  # a new trace would call the patched merge
            norm.update_statistics(history(seed))
    assert not traces and norm.count == 4 * T * B


# Populations


def population(members: int, **settings: Any) -> Normalizer:
    return nnx.vmap(lambda _: Normalizer(F, **settings))(jnp.arange(members))


@pytest.mark.parametrize("emit", ["inputs", "moments"])
def test_members_of_a_population_are_independent(emit):
    members = 2
    norm = population(members, emit=emit)
    singles = [Normalizer(F, emit=emit) for _ in range(members)]

    @nnx.vmap
    def rollout(norm: Normalizer, data: Any) -> Any:
        extras = jax.lax.scan(lambda c, x: (c, step(norm, x)[1]), 0, data)[1]
        norm.update_statistics(extras)
        return step(norm, data)[0]

    for seed in range(2):
        data = jnp.stack([history(seed + 10 * i) * (i + 1) for i in range(members)])
        y = rollout(norm, data)
        for i, single in enumerate(singles):
            _, extras = jax.vmap(lambda x, s=single: step(s, x))(data[i])
            single.update_statistics(extras)
            right = single.normalize(data[i])
            np.testing.assert_allclose(y[i], right, rtol=1e-4, atol=1e-5)
    for name in ("mean", "M2", "variance", "std"):
        right = np.stack([single.to_dict()[name] for single in singles])
        np.testing.assert_allclose(norm.to_dict()[name], right, rtol=1e-6)
    assert norm.count.tolist() == [2 * T * B] * members


def test_a_population_outside_vmap_says_what_is_missing():
    norm = population(2)
    with pytest.raises(ValueError, match=r"\(2, 4\).*expected.*nnx.vmap"):
        norm.normalize(X)
    with pytest.raises(ValueError, match="nnx.vmap"):
        norm.update_statistics(X)


# Sixty-four bits


def test_updates_are_bit_equal_with_and_without_x64():
    norm, wide = known(), known()
    for seed in range(2):
        norm.update_statistics(history(seed))
    with jax.enable_x64(True):
        for seed in range(2):
            wide.update_statistics(history(seed))
        widened = bits(wide)
        np.testing.assert_array_equal(wide.normalize(X), norm.normalize(X))
    assert widened == bits(norm)
