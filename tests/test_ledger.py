# SPDX-License-Identifier: Apache-2.0
"""The learner's book of increments: order, refusals, and what a checkpoint holds."""

import json
from itertools import permutations
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support import bits, statistics

from nnx_norm import (
    Collector,
    Ledger,
    Normalizer,
    NormalizerStatistics,
    Sequential,
    place,
)


def increments(number: int, worker: int = 0) -> list[dict[str, Any]]:
    """Increments of one worker; the k-th one holds k samples of value k."""
    collector = Collector(Normalizer(1), worker)
    for k in range(1, number + 1):
        collector.seen.update_statistics(np.full((k, 1), k, np.float32))
        collector.take()
    return list(collector.pending)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_increments_merge_once_and_in_order_however_they_arrive(order):
    ledger, sent = Ledger(Normalizer(1), 1), increments(3)
    for i in order:  # one ahead of a missing one is not merged: it is sent again
        assert ledger.merge(sent[i]) == (ledger.last(0) == i + 1)
    while ledger.last(0) < 3:
        assert ledger.merge(sent[ledger.last(0)])
    assert [ledger.merge(increment) for increment in sent] == [False] * 3
    rows = np.array([1, 2, 2, 3, 3, 3])
    mean, M2, count = statistics(ledger.model)
    assert count == 6
    np.testing.assert_allclose([mean[0], M2[0]], [rows.mean(), 6 * rows.var()])


def test_workers_are_counted_apart():
    ledger = Ledger(Normalizer(1), 3)
    for worker in (0, 2):
        assert ledger.merge(increments(1, worker)[0])
    assert [ledger.last(worker) for worker in range(3)] == [1, 0, 1]
    assert ledger.model.count == 2


def test_numbers_are_exact_beyond_float32():
    ledger = Ledger(Normalizer(1), 1)
    (increment,) = increments(1)
    for number in (2**24 + 1, 2**24 + 2, 2**40 + 1):
        assert ledger.merge({**increment, "number": number, "after": 0})
        assert ledger.last(0) == number
        assert not ledger.merge({**increment, "number": number, "after": 0})


def test_a_refused_increment_changes_nothing():
    model = Sequential([Normalizer(1), Normalizer(2)])
    ledger, collector = Ledger(model, 1), Collector(model, 0)
    for norm, size in zip(collector.seen.layers, (1, 2), strict=True):
        norm.update_statistics(np.ones((3, size), np.float32))
    good = collector.take()
    before = bits(ledger)
    one, two = good["statistics"].values()
    torn = {"layers/0": one, "layers/1": {**two, "M2": [1.0]}}
    for change, error, words in (
        ({"statistics": {"layers/0": one}}, ValueError, "need the same model"),
        ({"statistics": torn}, ValueError, r"'M2' has shape|M2 has shape \(1,\)"),
        ({"worker": 1}, ValueError, "worker is 1; expected one below 1"),
        ({"worker": "a"}, TypeError, "worker is 'a'; expected an int"),
        ({"number": 1.5}, TypeError, "number is 1.5; expected an int"),
        ({"after": None}, TypeError, "after is None; expected an int"),
        ({"after": -1}, ValueError, "after is -1; expected an int >= 0"),
    ):
        with pytest.raises(error, match=words):
            ledger.merge({**good, **change})
    for other in (3, {"worker": 0}):
        with pytest.raises(TypeError, match="expected what Collector.take gave"):
            ledger.merge(other)  # pyright: ignore[reportArgumentType]
    assert bits(ledger) == before
    assert ledger.merge(good)


def test_checkpoints_hold_statistics_and_numbers(tmp_path):
    def make() -> Ledger:
        return Ledger(Normalizer(1), 2)

    ledger, sent = make(), increments(3, 1)
    for increment in sent[:2]:
        ledger.merge(increment)
    state = nnx.state(ledger, NormalizerStatistics)  # the numbers are among them
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    abstract = nnx.eval_shape(make)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", nnx.state(abstract))
    nnx.update(abstract, restored)
    loaded = make()
    loaded.load_dict(json.loads(json.dumps(ledger.to_dict())))
    for again in (abstract, loaded):
        assert bits(again) == bits(ledger)
        assert [again.merge(increment) for increment in sent] == [False, False, True]
        assert (again.model.count, again.last(1)) == (6, 3)


def test_loading_refuses_other_workers_and_models():
    ledger = Ledger(Normalizer(1), 2)
    before = bits(ledger)
    with pytest.raises(ValueError, match="load_dict got 3 workers; expected 2"):
        ledger.load_dict(Ledger(Normalizer(1), 3).to_dict())
    with pytest.raises(ValueError, match="need the same model"):
        ledger.load_dict(Ledger(Sequential([Normalizer(1)]), 2).to_dict())
    with pytest.raises(TypeError, match="merged is 'a'; expected an int"):
        ledger.load_dict(ledger.to_dict() | {"merged": [1, "a"]})
    collector = Collector(Normalizer(1), 0)
    loads = {"Ledger": ledger.load_dict, "Collector": collector.load_dict}
    others: list[Any] = [{}, 3, {"merged": [1, 2]}, Normalizer(1).to_dict()]
    for name, load in loads.items():
        for other in others:
            with pytest.raises(TypeError, match=f"expected what {name}.to_dict gave"):
                load(other)
    assert bits(ledger) == before


def test_numbers_are_never_split_like_features():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    ledger = place(Ledger(Normalizer(4), 4), mesh, features="d")
    assert ledger.merged.get_value().sharding.is_fully_replicated
    assert not ledger.model.mean.get_value().sharding.is_fully_replicated


def test_numbers_stay_where_they_were_placed():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ledger = Ledger(Normalizer(1), 1)
    nnx.update(ledger, jax.device_put(nnx.state(ledger), placed))
    assert ledger.merge(increments(1)[0])
    assert {leaf.sharding for leaf in jax.tree.leaves(nnx.state(ledger))} == {placed}
