# SPDX-License-Identifier: Apache-2.0
"""Workers and a learner: every sample once, whoever stops, resumes or sends again."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st
from support import assert_moments, bits, statistics

from nnx_norm import Collector, Ledger, Normalizer, RewardNormalizer, Sequential

WORKERS = 2


def through_json(d: Any) -> Any:
    return json.loads(json.dumps(d))


class Fleet:
    """A learner, its workers, what they have saved, and which samples went where.

    Samples are the integers 0, 1, 2, ...; an increment is known by what is in it.
    """

    def __init__(self) -> None:
        self.ledger = Ledger(Normalizer(1), WORKERS)
        self.collectors = [Collector(self.ledger.model, w) for w in range(WORKERS)]
        self.samples = 0
        self.seen: list[list[int]] = [[] for _ in range(WORKERS)]  # and not taken
        self.content: dict[str, list[int]] = {}  # of increments
        self.merged: list[int] = []
        self.taken: set[int] = set()
        self.at_risk: set[int] = set()  # a worker stopped and had not saved them
        self.saves = [(c.to_dict(), []) for c in self.collectors]
        self.saved: tuple[Any, list[int]] = (self.ledger.to_dict(), [])

    def see(self, worker: int) -> None:
        rows = list(range(self.samples, self.samples + 2))
        self.samples += 2
        self.collectors[worker].seen.update_statistics(
            np.asarray(rows, np.float32)[:, None]
        )
        self.seen[worker] += rows

    def take(self, worker: int) -> None:
        increment = self.collectors[worker].take()
        self.content[json.dumps(increment)] = self.seen[worker]
        self.taken |= set(self.seen[worker])
        self.seen[worker] = []

    def send(self, worker: int) -> None:
        for increment in self.collectors[worker].pending:
            self.arrive(increment)

    def send_backwards(self, worker: int) -> None:
        for increment in reversed(self.collectors[worker].pending):
            self.arrive(increment)

    def arrive(self, increment: dict[str, Any]) -> None:
        if self.ledger.merge(through_json(increment)):
            self.merged += self.content[json.dumps(increment)]

    def save(self, _: int) -> None:
        self.saved = through_json(self.ledger.to_dict()), list(self.merged)
        for worker, collector in enumerate(self.collectors):
            collector.acknowledge(self.ledger.last(worker))

    def resume_learner(self, _: int) -> None:
        self.ledger = Ledger(Normalizer(1), WORKERS)
        self.ledger.load_dict(self.saved[0])
        self.merged = list(self.saved[1])

    def save_worker(self, worker: int) -> None:
        saved = through_json(self.collectors[worker].to_dict())
        self.saves[worker] = saved, list(self.seen[worker])

    def resume_worker(self, worker: int) -> None:
        old = self.collectors[worker]
        self.at_risk |= set(self.seen[worker])
        for increment in old.pending:
            self.at_risk |= set(self.content[json.dumps(increment)])
        new = Collector(self.ledger.model, worker)
        new.load_dict(self.saves[worker][0])
        new.catch_up(self.ledger.last(worker))
        self.collectors[worker] = new
        saved, rows = self.saves[worker]
        unknown = self.ledger.last(worker) <= saved["number"]
        self.seen[worker] = list(rows) if unknown else []


EVENTS = "see take send send_backwards save resume_learner save_worker resume_worker"
steps = st.tuples(st.sampled_from(EVENTS.split()), st.integers(0, WORKERS - 1))
SEEN, WORKER_SAVED = [("see", 0), ("take", 0), ("send", 0)], [("save_worker", 0)]


@given(st.lists(steps, max_size=40))
# The learner resumes from before increments that were merged: they come again.
@example([*SEEN, ("save", 0), *SEEN, *SEEN, ("resume_learner", 0), ("send", 0)])
# A worker resumes: what it had seen by its save, the learner has got since.
@example([("see", 0), *WORKER_SAVED, *SEEN, ("resume_worker", 0), *SEEN])
# Nothing was sent since: it is still to be sent.
@example([("see", 0), *WORKER_SAVED, ("see", 0), ("resume_worker", 0), *SEEN])
# What it had taken and not sent by its save is sent, too.
@example([*SEEN[:2], *WORKER_SAVED, ("resume_worker", 0), *SEEN])
# Both resume, and the increments between are gone for good: the next ones still count.
@example([*SEEN, ("resume_worker", 0), ("resume_learner", 0), *SEEN])
def test_no_sample_counts_twice_and_none_is_lost(events: list[tuple[str, int]]):
    fleet = Fleet()
    for name, worker in events:
        getattr(fleet, name)(worker)
        assert fleet.ledger.model.count == len(fleet.merged)
    for worker in range(WORKERS):
        fleet.take(worker)
        fleet.send(worker)
    merged = fleet.merged
    assert len(set(merged)) == len(merged)
    assert fleet.taken - set(merged) <= fleet.at_risk
    if merged:
        assert_moments(fleet.ledger.model, np.array(merged)[:, None], rtol=1e-10)


def test_rounds_of_workers_count_what_they_add():
    # Merging whole totals gives 20, 80, 260.
    learner, rng = Normalizer(3), np.random.default_rng(0)
    ledger = Ledger(learner, WORKERS)
    collectors = [Collector(learner, worker) for worker in range(WORKERS)]
    rows = np.asarray(1e4 + rng.normal(size=(3, WORKERS, 10, 3)), np.float32)
    for k, data in enumerate(rows):
        for worker, collector in enumerate(collectors):
            norm = Normalizer(3)
            norm.load_dict(learner.to_dict())
            out = norm((), jnp.asarray(data[worker]))
            collector.seen.update_statistics(out.rollout_extras)
            assert ledger.merge(collector.take())
        assert learner.count == 20 * (k + 1)
    assert_moments(learner, rows.reshape(-1, 3), rtol=1e-7)


@pytest.mark.parametrize(
    "way",
    [lambda d: d, through_json, lambda d: pickle.loads(pickle.dumps(d))],
    ids=["as it is", "JSON", "pickle"],
)
def test_increments_travel_exactly(way: Callable[[Any], Any]):
    model = Sequential([Normalizer({"a": 2, "off": 1}, exclude=["off"]), lambda x: x])
    collector, ledger = Collector(model, 1), Ledger(model, 2)
    row = np.array([[1 / 3, 1e6], [0.1, -1e-6]], np.float32)
    collector.seen.layers[0].update_statistics({"a": row, "off": None})
    right = collector.seen.layers[0].to_dict()
    increment = way(collector.take())
    assert list(increment["statistics"]) == ["layers/0"]
    assert ledger.merge(increment) and ledger.last(1) == 1 and ledger.last(0) == 0
    d = model.layers[0].to_dict()
    assert d["count"] == 2 and d["mean"]["off"] is None
    for key in ("mean", "M2"):
        np.testing.assert_array_equal(d[key]["a"], right[key]["a"])


def test_what_is_skipped_and_weighed_comes_along():
    learner = Normalizer(1)
    collector, ledger = Collector(learner, 0), Ledger(learner, 1)
    x = np.array([[1.0], [np.nan], [3.0]], np.float32)
    collector.seen.update_statistics(x, weights=np.array([0.5, 1.0, 0.25]))
    assert ledger.merge(through_json(collector.take()))
    assert (learner.count, learner.to_dict()["skipped"]) == (0.75, 1)


def test_settings_that_stop_or_forget_are_the_learners():
    learner = Normalizer(1, max_count=3)
    learner.freeze()
    collector, ledger = Collector(learner, 0), Ledger(learner, 1)
    for _ in range(3):
        collector.seen.update_statistics(np.ones((2, 1), np.float32))
    assert collector.seen.count == 6 and learner.frozen
    assert ledger.merge(collector.take()) and learner.count == 0  # frozen: dropped
    learner.unfreeze()
    collector.seen.update_statistics(np.ones((4, 1), np.float32))
    assert ledger.merge(collector.take()) and learner.count == 4
    collector.seen.update_statistics(np.ones((4, 1), np.float32))
    assert ledger.merge(collector.take()) and learner.count == 4  # folded, then stopped
    assert ledger.last(0) == 3
    forgetting = Collector(Normalizer(1, decay=0.5), 0)
    for _ in range(2):
        forgetting.seen.update_statistics(np.ones((2, 1), np.float32))
    assert forgetting.seen.count == 4


def test_running_returns_stay_with_the_environments():
    learner, whole = (RewardNormalizer(0.5, num_envs=1) for _ in range(2))
    collector, ledger = Collector(learner, 0), Ledger(learner, 1)
    for reward in (1.0, 2.0, 4.0):
        step = jnp.full((1, 1), reward), jnp.zeros((1, 1), bool)
        whole.update(*step)
        collector.seen.update(*step)
        assert ledger.merge(collector.take())
    right, found = whole.to_dict(), learner.to_dict()
    assert found["count"] == 3
    np.testing.assert_allclose(found["mean"], right["mean"], rtol=1e-12)
    np.testing.assert_allclose(found["M2"], right["M2"], rtol=1e-12)


def test_taking_leaves_the_model_and_its_parameters_alone():
    model = Sequential([Normalizer(2), nnx.Linear(2, 1, rngs=nnx.Rngs(0))])
    before = bits(model)
    collector = Collector(model, 0)

    def fold(seen: Any, x: Any) -> None:
        state = seen.initialize_state(3)
        seen.update_statistics(seen(state, x).rollout_extras)

    nnx.jit(fold)(collector.seen, jnp.ones((3, 2), jnp.float32))
    collector.take()
    assert bits(model) == before and collector.seen.layers[0].count == 0


def test_a_worker_is_saved_whole():
    collector = Collector(Normalizer(1), 1)
    collector.seen.update_statistics(np.array([[1.0], [2.0]], np.float32))
    collector.take()
    collector.seen.update_statistics(np.array([[5.0]], np.float32))
    again = Collector(Normalizer(1), 1)
    again.load_dict(through_json(collector.to_dict()))
    pickled = pickle.loads(pickle.dumps(collector))
    for other in (again, pickled):
        assert other.pending == collector.pending and other.number == 1
        assert statistics(other.seen) == statistics(collector.seen)
    assert again.take() == pickled.take() == collector.take()
    with pytest.raises(ValueError, match="load_dict got worker 1; expected 0"):
        Collector(Normalizer(1), 0).load_dict(collector.to_dict())


def test_a_model_without_normalizers_is_refused():
    with pytest.raises(ValueError, match="Linear has no Normalizer"):
        Collector(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), 0)
    with pytest.raises(ValueError, match="worker is -1"):
        Collector(Normalizer(1), -1)


@pytest.mark.parametrize("method", ["acknowledge", "catch_up"])
@pytest.mark.parametrize("number", [True, 1.0, "1", None, -1])
def test_numbers_of_increments_are_numbers(method: str, number: Any):
    collector = Collector(Normalizer(1), 0)
    collector.take()
    before = collector.to_dict()
    with pytest.raises((TypeError, ValueError), match="number is"):
        getattr(collector, method)(number)
    assert collector.to_dict() == before


def test_what_was_never_taken_is_not_acknowledged():
    collector = Collector(Normalizer(1), 0)
    for _ in range(2):
        collector.take()
    with pytest.raises(ValueError, match=r"last .* here is 2.* catch_up\(3\) first"):
        collector.acknowledge(3)
    assert len(collector.pending) == 2
    collector.acknowledge(2)
    collector.acknowledge(0)  # an old answer that comes late
    assert collector.pending == ()
    collector.catch_up(7)
    collector.acknowledge(7)  # as the learner answers a worker that came back
