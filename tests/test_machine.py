# SPDX-License-Identifier: Apache-2.0
"""Sequences of operations against a float64 model, drawn by hypothesis.

Every step of every example compares all statistics with `oracle`. The run of record,
20,000 examples:

    HYPOTHESIS_PROFILE=record pytest -n 2 tests/test_machine.py
"""

import io
import json
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nnx_norm import (
    Normalizer,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    running_mean_std_from_state_dict,
    running_mean_std_to_state_dict,
)
from nnx_norm.moments import Moments
from nnx_norm.statistics import NormalizerStatistics
from nnx_norm.tree import canonicalize
from tests import oracle
from tests.strategies import (
    FLOAT,
    RECORD,
    RULES,
    Kind,
    Samples,
    Settings,
    any_settings,
    copied,
    forms,
    make_samples,
    mappings,
    rollouts,
    samples,
    seeds,
)
from tests.support import bits

two = st.integers(0, 1)
rarely = st.sampled_from([False] * 15 + [True])
forms_of_dict = st.sampled_from(["nested", "flat", "npz", "json"])
KIND = Kind(FLOAT, (2, 3), mask=2)
COMPILED = Kind(FLOAT, (2, 3), weights=2)


@nnx.jit
def update_in_jit(norm: Normalizer, history: Any, given: dict[str, Any]) -> None:
    norm.update_statistics(history, **given)


@partial(jax.jit, static_argnums=0)
def update_split(graphdef: Any, state: Any, history: Any, given: dict[str, Any]) -> Any:
    norm = nnx.merge(graphdef, state)
    norm.update_statistics(history, **given)
    return nnx.state(norm)


def found(norm: Any) -> oracle.Batch:
    """The statistics of a normalizer out of its Variables, joined by NumPy."""
    rest = norm.residual.get_value()

    def joined(name: str) -> list[np.ndarray]:
        pairs = zip(
            jax.tree.leaves(getattr(norm, name).get_value()),
            jax.tree.leaves(rest[name]),
            strict=True,
        )
        out = []
        for leaf, residual in pairs:
            assert leaf.dtype == residual.dtype == np.float32
            assert not leaf.weak_type and not residual.weak_type
            value, low = np.asarray(leaf), np.asarray(residual)
            held = np.where(np.isfinite(value), value, 0)
            assert (np.abs(low) <= np.spacing(np.abs(held)) / 2).all()
            out.append(value.astype(np.float64) + low)
        return out

    count, skipped = float(joined("counter")[0]), float(joined("skipped")[0])
    return oracle.Batch(joined("mean"), joined("M2"), count, count, skipped)


def through(form: str, norm: Any) -> Any:
    """`to_dict` of a normalizer, as it comes back from where it was saved."""
    if form == "nested":
        return norm.to_dict()
    if form == "json":
        text = json.dumps(norm.to_dict(), default=np.ndarray.tolist)
        return json.loads(text)
    d = norm.to_dict(flat=True)
    if form == "flat":
        return d
    file = io.BytesIO()
    np.savez(file, **d)
    file.seek(0)
    with np.load(file) as saved:  # without pickle
        return dict(saved)


def assert_same(module: Any, state: Any) -> None:
    """The module's Variables hold these values, to the last bit (NaN is NaN)."""
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(module, NormalizerStatistics), state
    )


@lru_cache
def checkpointer() -> Any:
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


def by_orbax(state: Any) -> Any:
    """A state saved and restored."""
    with tempfile.TemporaryDirectory() as folder:
        path, saver = Path(folder).resolve() / "state", checkpointer()
        saver.save(path, state)
        saver.wait_until_finished()
        return saver.restore(path, state)


class Machine(RuleBasedStateMachine):
    """What all machines share: two modules, their models, and states to go back to."""

    norms: list[Any]
    models: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.models, self.saved = [], [], []

    @invariant()
    def agrees(self) -> None:
        for norm, model in zip(self.norms, self.models, strict=True):
            assert norm.frozen == model.frozen
            oracle.assert_moments(found(norm), model)

    def fresh(self) -> Any:
        """A module like those that are tested."""
        raise NotImplementedError

    def restorable(self) -> bool:
        """Whether Orbax takes the keys of its trees."""
        return True

    @rule(i=two)
    def freeze(self, i: int) -> None:
        self.norms[i].freeze()
        self.models[i].frozen = True

    @rule(i=two)
    def unfreeze(self, i: int) -> None:
        self.norms[i].unfreeze()
        self.models[i].frozen = False

    @rule(i=two)
    def reset(self, i: int) -> None:
        self.norms[i].reset()
        self.models[i].reset()

    @rule(
        i=two,
        mean=st.sampled_from([0.0, 0.1, -1e4, 1e6 + 0.1]),
        variance=st.sampled_from([0.0, 1.0, 1e-4, 1e6]),
        count=st.sampled_from([0, 1, 8, 2**24, 2**31 - 1, 10**12]),
    )
    def set_statistics(self, i: int, mean: float, variance: float, count: int) -> None:
        if count == 0:
            mean = variance = 0.0
        self.norms[i].set_statistics(mean, variance, count)
        self.models[i].set(mean, variance, float(count))

    @rule(i=two)
    def copy(self, i: int) -> None:
        norm, other = self.norms[i], self.norms[1 - i]
        norm.copy_from(other)
        assert_same(norm, nnx.state(other, NormalizerStatistics))
        self.models[i].copy_from(self.models[1 - i])

    @precondition(lambda self: all(m.count < 2**44 for m in self.models))
    @rule(i=two, form=st.sampled_from(["module", "moments", "nested", "json"]))
    def merge(self, i: int, form: str) -> None:
        norm, other = self.norms[i], self.norms[1 - i]
        model, batch = self.models[i], self.models[1 - i].batch()
        if form == "moments":
            s = found(other)
            tree, count = norm.spec.unflatten, cast(jax.Array, np.float64(s.count))
            norm.merge_from(Moments(tree(s.mean), tree(s.M2), count))
            batch = batch._replace(skipped=0)
        else:
            norm.merge_from(other if form == "module" else through(form, other))
        model.fold(batch)

    @rule(i=two, form=forms_of_dict, fresh=st.booleans())
    def save_and_load_dict(self, i: int, form: str, fresh: bool) -> None:
        """Bit for bit, into a new normalizer or over other statistics."""
        norm, model = self.norms[i], self.models[i]
        d, before = through(form, norm), copied(nnx.state(norm, NormalizerStatistics))
        assert d["count"] == norm.count and d["skipped"] == model.skipped
        if fresh:
            self.norms[i] = self.fresh()
            self.norms[i].frozen = norm.frozen
            model.renewed()
        else:
            norm.set_statistics(1.0, 2.0, 3)
        self.norms[i].load_dict(d)
        assert_same(self.norms[i], before)

    @rule(i=two)
    def save(self, i: int) -> None:
        """Keep a state to go back to later."""
        graphdef, state = nnx.split(self.norms[i])
        self.saved.append((graphdef, copied(state), self.models[i].clone()))

    @precondition(lambda self: self.saved)
    @rule(i=two, k=st.integers(0, 9), orbax=rarely, merge=st.booleans())
    def restore(self, i: int, k: int, orbax: bool, merge: bool) -> None:
        graphdef, state, model = self.saved[k % len(self.saved)]
        state = copied(state)
        if orbax and self.restorable():
            state = by_orbax(state)
        self.models[i] = model.clone()
        if merge:
            self.norms[i] = nnx.merge(graphdef, state)
        else:
            self.models[i].frozen = self.norms[i].frozen  # no part of the state
            nnx.update(self.norms[i], state)


class NormalizerMachine(Machine):
    """Two normalizers of one structure, with settings of their own."""

    settings: Settings

    def fresh(self) -> Any:
        return self.settings.fresh()

    def restorable(self) -> bool:
        return "/" not in self.settings.layout.names()

    @initialize(settings=any_settings(), form=forms, mapping=mappings)
    def make(self, settings: Settings, form: str, mapping: str) -> None:
        self.settings = settings
        self.add(settings.make(form, mapping))
        self.add(settings.fresh())

    def add(self, norm: Normalizer) -> None:
        self.norms.append(norm)
        given = RULES[self.settings.rule]
        model = oracle.Statistics.empty(
            self.settings.features,
            skip=norm.nonfinite == "skip",
            decay=given.get("decay"),
            max_count=given.get("max_count"),
        )
        self.models.append(model)

    def tree(
        self, leaves: Any, lead: tuple[int, ...], mapping: str, out: bool = True
    ) -> Any:
        other = np.full((*lead, 4), 7, np.uint8) if out else None
        return self.settings.layout.build(leaves, other, mapping)

    @rule(i=two, data=st.data(), mapping=mappings, out=st.booleans())
    def update(self, i: int, data: st.DataObject, mapping: str, out: bool) -> None:
        """Fold a history, as inputs or as emitted moments."""
        s = data.draw(samples(self.settings.features), "samples")
        self.update_by(i, s, "eager", mapping, out)

    update_once_more = update

    @precondition(lambda self: self.settings.jit)
    @rule(i=two, data=st.data(), way=st.sampled_from(["nnx.jit", "split"]))
    def update_compiled(self, i: int, data: st.DataObject, way: str) -> None:
        s = data.draw(samples(self.settings.features, [COMPILED]), "samples")
        if s.weights is not None and self.settings.emit == "inputs":
            s.weights[0, 0] = data.draw(st.sampled_from([0.5, -1.0, np.nan]))
        self.update_by(i, s, way, "dict", True)

    def update_by(self, i: int, s: Samples, way: str, mapping: str, out: bool) -> None:
        if self.settings.emit == "moments":
            self.update_by_moments(i, s, way, mapping)
            return
        history = self.tree(s.leaves, s.lead, mapping, out)
        self.fold(i, history, {"mask": s.mask, "weights": s.weights}, way)
        self.models[i].update(s.leaves, s.weight())

    def update_by_moments(self, i: int, s: Samples, way: str, mapping: str) -> None:
        norm, model, steps = self.norms[i], self.models[i], []
        for t in range(s.lead[0]):
            x = self.tree([v[t] for v in s.leaves], s.lead[1:], mapping)
            steps.append(norm((), x).rollout_extras)
        if not steps:
            return
        history = jax.tree.map(lambda *v: jnp.stack(v), *steps)
        self.fold(i, history, {}, way)
        if not s.leaves:
            return
        one = [
            oracle.moments([v[t] for v in s.leaves], np.ones(s.lead[1:]), model.skip)
            for t in range(s.lead[0])
        ]
        model.fold(oracle.united(one, model.skip))

    def fold(self, i: int, history: Any, given: dict[str, Any], way: str) -> None:
        norm = self.norms[i]
        given = {k: v for k, v in given.items() if v is not None}
        if way == "nnx.jit":
            update_in_jit(norm, canonicalize(history), given)
        elif way == "split":
            graphdef, state = nnx.split(norm)
            new = update_split(graphdef, state, canonicalize(history), given)
            nnx.update(norm, new)
        else:
            norm.update_statistics(history, **given)

    @precondition(lambda self: self.settings.emit == "inputs")
    @rule(i=two, seed=seeds, offset=st.sampled_from([0.0, 1e4]))
    def update_in_two_parts(self, i: int, seed: int, offset: float) -> None:
        """Workers fold a half each; merged they are the whole."""
        norm, model, features = self.norms[i], self.models[i], self.settings.features
        s = make_samples(KIND, features, seed, offset, 1.0, "none")
        assert s.mask is not None
        history = self.tree(s.leaves, s.lead, "dict")
        for mask in (s.mask, ~s.mask):
            worker, part = self.settings.fresh(), model.clone()
            part.reset()
            part.frozen = False
            worker.update_statistics(history, mask=mask)
            part.update(s.leaves, mask.astype(np.float64))
            norm.merge_from(worker)
            model.fold(part.batch())

    @precondition(lambda self: "pair" not in self.settings.layout.kinds())
    @precondition(lambda self: "observation" not in self.settings.layout.kinds())
    @rule(i=two, form=forms_of_dict)
    def rebuild_from_dict(self, i: int, form: str) -> None:
        norm = self.norms[i]
        new = Normalizer.from_dict(through(form, norm))
        assert_same(new, nnx.state(norm, NormalizerStatistics))
        new.frozen = norm.frozen
        assert nnx.graphdef(new) == nnx.graphdef(norm)  # so it doesn't compile anew
        self.norms[i] = new

    @rule(
        i=two,
        seed=seeds,
        offset=st.sampled_from([0.0, 1e4]),
        dtype=st.sampled_from(["float32", "float16", "int8"]),
        mapping=mappings,
    )
    def forward(
        self, i: int, seed: int, offset: float, dtype: str, mapping: str
    ) -> None:
        """Writes nothing, gives what NumPy gives, and can be undone."""
        norm, model = self.norms[i], self.models[i]
        kind = Kind((dtype, "float32"), (3,))
        s = make_samples(kind, self.settings.features, seed, offset, 1.0, "none")
        x, before = self.tree(s.leaves, s.lead, mapping), bits(norm)
        out = norm((), x)
        y, back = out.output, norm.denormalize(out.output)
        assert bits(norm) == before
        assert jax.tree.structure(y) == jax.tree.structure(canonicalize(x))
        ys, backs = norm.spec.flatten(y, "y"), norm.spec.flatten(back, "y")
        std = model.std(norm.epsilon, norm.initial_std)
        for k, leaf in enumerate(s.leaves):
            assert ys[k].dtype == (
                leaf.dtype if "float" in str(leaf.dtype) else FLOAT[0]
            )
            self.compare(norm, leaf, ys[k], backs[k], model.mean[k], std[k])

    def compare(
        self, norm: Normalizer, x: Any, y: Any, back: Any, mean: Any, std: Any
    ) -> None:
        if not (np.isfinite(mean).all() and np.isfinite(std).all()):
            return
        kind = jnp.finfo(y.dtype)
        eps, largest = float(kind.eps), float(kind.max)
        x, y, back = (np.asarray(v).astype(np.float64) for v in (x, y, back))
        right = (x - mean) / std
        # The stored mean's own error, see `oracle.assert_moments`.
        rounding = (1e-7 * std + 2.0**-40 * np.abs(mean)) / std
        inside = np.abs(right) < (norm.clip or 6e4) * (1 - 2 * eps)
        if norm.clip:
            right = np.clip(right, -norm.clip, norm.clip)
        error = np.abs(y - right)
        held = np.abs(right) < 6e4
        assert (error <= 4 * eps * np.abs(right) + 2 * rounding)[held].all()
        rounded = 4 * eps * (np.abs(x - mean) + std + np.abs(x))
        # Far off, float16 knows the way back to more than it can hold: infinity.
        inside &= np.abs(x) + rounded < largest
        assert (np.abs(back - x) <= rounded)[inside].all()

    @precondition(lambda self: self.settings.features)
    @rule(i=two, k=st.integers(0, 99))
    def refuse(self, i: int, k: int) -> None:
        """A call that raises has changed nothing."""
        norm = self.norms[i]
        before = bits(norm)
        call = BAD[sorted(BAD)[k % len(BAD)]]
        with pytest.raises((ValueError, TypeError)):
            call(self, norm)
        assert bits(norm) == before


def _leaves(machine: NormalizerMachine, lead: tuple[int, ...], wrong: int = 0) -> Any:
    features = machine.settings.features
    leaves = [np.ones((*lead, *shape), np.float32) for shape in features]
    leaves[wrong] = np.ones((*lead, 5), np.float32)
    return machine.tree(leaves, lead, "dict")


def _right(machine: NormalizerMachine) -> Any:
    features = machine.settings.features
    leaves = [np.ones((2, 3, *shape), np.float32) for shape in features]
    return machine.tree(leaves, (2, 3), "dict")


BAD: dict[str, Any] = {
    "features": lambda m, n: n.update_statistics(_leaves(m, (2, 3))),
    "no leading axis": lambda m, n: n.update_statistics(
        m.tree([np.ones(s, np.float32) for s in m.settings.features], (), "dict")
    ),
    "complex": lambda m, n: n.update_statistics(
        jax.tree.map(lambda v: v.astype(complex), _right(m))
    ),
    "text": lambda m, n: n.update_statistics(
        jax.tree.map(lambda v: v.astype(str), _right(m))
    ),
    "mask of floats": lambda m, n: n.update_statistics(
        _right(m), mask=np.ones((2, 3), np.float32)
    ),
    "mask of another shape": lambda m, n: n.update_statistics(
        _right(m), mask=np.ones(3, bool)
    ),
    "negative weight": lambda m, n: n.update_statistics(
        _right(m), weights=np.asarray([1.0, -1.0], np.float32)
    ),
    "bool weights": lambda m, n: n.update_statistics(
        _right(m), weights=np.ones(2, bool)
    ),
    "another tree": lambda m, n: n.update_statistics({"zz": _right(m)}),
    "forward features": lambda m, n: n((), _leaves(m, (3,))),
    "normalize features": lambda m, n: n.normalize(_leaves(m, ())),
    "negative variance": lambda m, n: n.set_statistics(0, -1, 1),
    "negative count": lambda m, n: n.set_statistics(0, 1, -1),
    "not finite": lambda m, n: n.set_statistics(np.nan, 1, 1),
    "no count": lambda m, n: n.load_dict(
        {k: v for k, v in n.to_dict().items() if k != "count"}
    ),
    "no mean": lambda m, n: n.load_dict(
        {k: v for k, v in n.to_dict(flat=True).items() if "mean" not in k}
    ),
    "itself": lambda m, n: n.merge_from(n),
    "another structure": lambda m, n: n.copy_from(Normalizer({"q": 7})),
    "merge another": lambda m, n: n.merge_from(Normalizer({"q": 7})),
    "no normalizer": lambda m, n: n.copy_from({}),
}


class RewardMachine(Machine):
    """Two reward normalizers of one gamma."""

    @initialize(
        gamma=st.sampled_from([0.5, 0.99, 1.0] if RECORD else [0.5]),
        shape=st.sampled_from([(), (2,)] if RECORD else [()]),
        nonfinite=st.sampled_from(["skip", "propagate"]),
        clip=st.sampled_from([None, 1.5]),
    )
    def make(
        self, gamma: float, shape: tuple[int, ...], nonfinite: str, clip: float | None
    ) -> None:
        self.shape = shape
        self.fresh = lambda: RewardNormalizer(  # pyright: ignore
            gamma, shape=shape, num_envs=2, nonfinite=nonfinite, clip=clip
        )
        for _ in range(2):
            self.norms.append(self.fresh())
            model = oracle.Returns.empty([shape], gamma=gamma, skip=nonfinite == "skip")
            model.running = np.zeros((2, *shape))
            self.models.append(model)

    @invariant()
    def returns_agree(self) -> None:
        for norm, model in zip(self.norms, self.models, strict=True):
            running = np.asarray(norm.running_return.get_value())
            assert running.dtype == np.float32
            np.testing.assert_allclose(running, model.running, rtol=2e-7)

    @rule(i=two, data=st.data())
    def update(self, i: int, data: st.DataObject) -> None:
        r = data.draw(rollouts(self.shape), "rollout")
        (rewards,) = r.rewards
        self.norms[i].update(rewards, r.terminated, r.truncated, r.mask)
        done = r.terminated.astype(bool)
        done = done if r.truncated is None else done | r.truncated
        valid = np.ones_like(done) if r.mask is None else r.mask
        self.models[i].update_returns(rewards, done, valid)

    update_once_more = update

    @rule(i=two, seed=seeds, dtype=st.sampled_from(["float32", "int8"]))
    def normalize(self, i: int, seed: int, dtype: str) -> None:
        """Writes nothing, never centres, and can be undone inside the clip."""
        norm, model = self.norms[i], self.models[i]
        kind, before = Kind((dtype, dtype), (3,)), bits(norm)
        (r,) = make_samples(kind, [self.shape], seed, 1.0, 1.0, "none").leaves
        y = norm.normalize(r)
        back = np.asarray(norm.denormalize(y))
        assert bits(norm) == before and y.dtype == np.float32
        if not np.isfinite(model.M2[0]).all():
            return
        known = (model.count >= 2) & (model.M2[0] != 0)
        (std,) = model.std(norm.epsilon, 1.0)
        right = r / np.where(known, std, 1.0)
        inside = np.abs(right) < (norm.clip or np.inf) * (1 - 1e-6)
        np.testing.assert_allclose(back[inside], r[inside], rtol=1e-6)
        if norm.clip:
            right = np.clip(right, -norm.clip, norm.clip)
        np.testing.assert_allclose(y, right, rtol=1e-6)

    @rule(i=two, k=st.integers(0, 5))
    def refuse(self, i: int, k: int) -> None:
        norm = self.norms[i]
        before, ends = bits(norm), np.zeros((5, 2), bool)
        rewards = np.ones((5, 2, *self.shape), np.float32)
        calls = [
            lambda: norm.update(rewards[0], ends[0]),
            lambda: norm.update(rewards, ends[:4]),
            lambda: norm.update(rewards, ends, ends.T),
            lambda: norm.update(rewards, ends, mask=ends.astype(int)),
            lambda: norm.update(rewards.astype(complex), ends),
            lambda: norm.update({"a": rewards}, ends),
        ]
        with pytest.raises((ValueError, TypeError)):
            calls[k]()
        assert bits(norm) == before


def full(stats: RunningMeanStd, name: str) -> np.ndarray:
    """A statistic of a port out of its three Variables, much faster than `to_numpy`."""
    value = np.asarray(getattr(stats, name).get_value(), np.float64)
    for rest in (stats.residual, stats.tail):
        value = value + np.asarray(rest.get_value()[name], np.float64)
    return value


class PortMachine(RuleBasedStateMachine):
    """A `RunningMeanStd`, or a `RewardRunningMeanStd`, against float64 buffers."""

    @initialize(
        shape=st.sampled_from([(2,), None]),
        ema_decay=st.sampled_from([None, 0.75]),
        initial_count=st.sampled_from([1, 0]),
        reward=st.booleans(),
    )
    def make(
        self,
        shape: tuple[int, ...] | None,
        ema_decay: float | None,
        initial_count: int,
        reward: bool,
    ) -> None:
        given: Any = {"ema_decay": ema_decay, "initial_count": initial_count}
        if reward:
            self.stats = RewardRunningMeanStd(shape, gamma=0.5, **given)
        else:
            self.stats = RunningMeanStd(shape, **given)
        self.model = oracle.Buffers(None, np.ones(()), float(initial_count), ema_decay)
        if shape is not None:
            self.model.shape(shape)
        self.returns: np.ndarray | None = None
        self.saved: list[Any] = []

    @invariant()
    def agrees(self) -> None:
        stats, model = self.stats, self.model
        assert stats.is_lazy == (model.mean is None)
        assert full(stats, "count") == model.count
        if model.mean is None:
            return
        held = [full(stats, "mean"), full(stats, "var")]
        with np.errstate(invalid="ignore"):
            std = np.sqrt(model.var)
            near = 1e-7 * std + 2.0**-50 * model.writes * (std + np.abs(model.mean))
        oracle.assert_close([held[0]], [model.mean], [near], 1.0)
        about_var = 5e-7 * model.var + near * (2 * std + near)
        oracle.assert_close([held[1]], [model.var], [about_var], 1.0)

    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        kinds = [Kind(("float32", ""), (n,)) for n in ((4, 1, 0) if RECORD else (4,))]
        kinds += [Kind(("int8", ""), (4,))] * RECORD
        (x,) = data.draw(samples([(2,)], kinds), "samples").leaves
        self.stats.record_moments(x)
        self.model.record(x)

    @precondition(lambda self: isinstance(self.stats, RewardRunningMeanStd))
    @rule(seed=seeds, n=st.sampled_from([4, 1] if RECORD else [4]))
    def record_reward(self, seed: int, n: int) -> None:
        kind = Kind(("float32", ""), (n,))
        (reward,) = make_samples(kind, [(2,)], seed, 1.0, 1.0, "none").leaves
        ended = np.random.default_rng(seed).random(n) < 0.3
        assert isinstance(self.stats, RewardRunningMeanStd)
        self.stats.record_reward(reward, ended)
        if self.returns is None or len(self.returns) != n:
            self.returns = np.zeros((n, 2))
        history = np.where(ended[:, None], 0.0, self.returns)
        self.returns = 0.5 * history + reward
        self.model.record(self.returns.astype(np.float32))

    record_once_more = record

    @rule(
        mean=st.sampled_from([0.1, -1e4]),
        var=st.sampled_from([0.0, 0.3, 1e6]),
        count=st.sampled_from([0, 3, 2**31, 10**12]),
    )
    def update_from_moments(self, mean: float, var: float, count: int) -> None:
        self.stats.update_from_moments(np.full(2, mean), np.full(2, var), count)
        self.model.shape((2,))
        self.model.fold(np.full(2, mean), np.full(2, var), float(count))

    @rule(seed=seeds)
    def normalize(self, seed: int) -> None:
        before = bits(self.stats)
        kind = Kind(("float32", ""), (3,))
        (x,) = make_samples(kind, [(2,)], seed, 0.0, 1.0, "none").leaves
        y = self.stats(x)
        back = np.asarray(self.stats.normalize(y, un_norm=True))
        assert bits(self.stats) == before
        model = self.model
        mean, var = (0.0, 1.0) if model.mean is None else (model.mean, model.var)
        if isinstance(self.stats, RewardRunningMeanStd):
            mean = 0.0
        if np.isfinite(mean).all() and np.isfinite(var).all():
            std = np.sqrt(var + 1e-5)
            near = 1e-6 * (np.abs(x - mean) / std + 1)
            assert (np.abs(np.asarray(y) - (x - mean) / std) <= near).all()
            assert (np.abs(back - x) <= 1e-6 * (np.abs(x) + np.abs(mean) + std)).all()

    @rule()
    def save(self) -> None:
        graphdef, state = nnx.split(self.stats)
        self.saved.append((graphdef, copied(state), self.model.clone(), self.returns))

    @precondition(lambda self: self.saved)
    @rule(k=st.integers(0, 9))
    def restore(self, k: int) -> None:
        graphdef, state, model, self.returns = self.saved[k % len(self.saved)]
        self.stats, self.model = nnx.merge(graphdef, copied(state)), model.clone()

    @rule()
    def move(self) -> None:
        assert self.stats.to(jax.devices()[0]) is self.stats

    @precondition(lambda self: self.model.mean is not None)
    @precondition(lambda self: np.isfinite(self.model.var).all())
    @rule(lazy=st.booleans())
    def through_state_dict(self, lazy: bool) -> None:
        """Every bit comes back, whether the shape was known or not."""
        saved, before = (
            running_mean_std_to_state_dict(self.stats),
            self.stats.to_numpy(),
        )
        new = RunningMeanStd(None if lazy else (2,))
        running_mean_std_from_state_dict(new, saved)
        for a, b in zip(new.to_numpy(), before, strict=True):
            np.testing.assert_array_equal(a, b)

    @rule(k=st.integers(0, 4))
    def refuse(self, k: int) -> None:
        if self.stats.is_lazy:
            return
        before, stats = bits(self.stats), self.stats
        calls = [
            lambda: stats.record_moments(np.ones((4, 3), np.float32)),
            lambda: stats.record_moments(np.ones((2, 2, 2), np.float32)),
            lambda: stats.update_from_moments(np.zeros(2), np.array([1.0, -1.0]), 1),
            lambda: stats.update_from_moments(np.zeros(3), np.ones(3), 1),
            lambda: stats.normalize(np.ones((4, 2), complex)),
        ]
        with pytest.raises((ValueError, TypeError)):
            calls[k]()
        assert bits(stats) == before


def case(machine: Any, share: int) -> Any:
    """A test of six steps an example; four shares are a few hundred, or the record."""
    examples = share * max(hypothesis.settings().max_examples, 60)
    machine.TestCase.settings = hypothesis.settings(
        max_examples=examples, stateful_step_count=6
    )
    return machine.TestCase


TestNormalizer = case(NormalizerMachine, 2)
TestReward = case(RewardMachine, 1)
TestPort = case(PortMachine, 1)
