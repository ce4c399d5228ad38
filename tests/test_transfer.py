# SPDX-License-Identifier: Apache-2.0
"""Values find their place: the host's, a mesh's, this process's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_norm import Normalizer, RewardNormalizer, place
from nnx_norm.transfer import (
    copied_like,
    digest,
    moved,
    on_host,
    placed_like,
    spans_processes,
)

MESH = Mesh(np.array(jax.devices()), ("d",))
WHOLE = NamedSharding(MESH, PartitionSpec())
HISTORY = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)


def shardings(module: nnx.Module) -> Any:
    return jax.tree.map(lambda v: v.sharding, nnx.state(module))


def test_what_is_placed_stays_placed_when_it_takes_over_others():
    placed, plain = place(Normalizer(3), MESH), Normalizer(3)
    plain.update_statistics(HISTORY)
    before = shardings(placed)
    update: Any = nnx.jit(Normalizer.update_statistics)
    history = jax.device_put(HISTORY, NamedSharding(MESH, PartitionSpec(None, "d")))
    update(placed, history)
    compiled = update.jitted_fn._cache_size()
    placed.copy_from(plain)
    assert shardings(placed) == before
    update(placed, history)
    assert update.jitted_fn._cache_size() == compiled == 1
    assert placed.count == 2 * plain.count


def test_what_is_on_no_mesh_takes_over_none():
    placed, plain = place(Normalizer(3), MESH), Normalizer(3)
    placed.update_statistics(HISTORY)
    for take in (plain.copy_from, plain.merge_from):
        take(placed)
        for leaf in jax.tree.leaves(nnx.state(plain)):
            assert len(leaf.sharding.device_set) == 1 and not leaf.committed
    assert plain.count == 2 * placed.count
    other = jax.device_put(HISTORY, jax.devices()[1])
    plain.update_statistics(other)  # goes with it, as fresh ones do


def test_running_returns_stay_with_their_environments():
    placed, plain = (RewardNormalizer(0.9, num_envs=8) for _ in range(2))
    place(placed, MESH, environments="d")
    before = shardings(placed)
    plain.update(HISTORY[..., 0], np.zeros((4, 8)))
    placed.copy_from(plain)
    assert shardings(placed) == before and placed.count == 32


@pytest.mark.parametrize("jitted", [False, True])
def test_a_copy_has_buffers_of_its_own(jitted: bool):
    def copy(new: Any, old: Any) -> Any:
        return copied_like(new, old)

    new, old = jnp.ones(3), jnp.zeros(3)
    out = (jax.jit(copy) if jitted else copy)(new, old)
    new.delete()
    assert out.tolist() == [1, 1, 1]


def test_copies_into_every_place_do_not_share_memory():
    wheres = (None, jax.devices()[1], WHOLE)
    for a in wheres:
        for b in wheres:
            new, old = (jax.device_put(np.arange(3.0), where) for where in (a, b))
            out = copied_like(new, old)
            assert (out.sharding, out.committed) == (old.sharding, old.committed)
            new.delete()
            assert out.tolist() == [0, 1, 2]


def test_moving_keeps_what_lies_there():
    there = jax.device_put(jnp.ones(2), WHOLE)
    assert moved(there, WHOLE) is there
    host = np.ones(2)
    out = moved(host, WHOLE)
    host[:] = 0
    assert out.tolist() == [1, 1] and out.sharding == WHOLE
    shape = moved(jax.ShapeDtypeStruct((2,), jnp.float32), WHOLE)
    assert shape.sharding == WHOLE


def test_what_nobody_placed_follows_the_default():
    assert not placed_like(np.ones(2), jnp.ones(2)).committed
    assert not placed_like(np.ones(2), np.ones(2)).committed
    assert placed_like(np.ones(2), jax.device_put(np.ones(2), WHOLE)).sharding == WHOLE


def test_digests_tell_bits():
    assert digest([np.ones(2), np.zeros(1)]) == digest(np.array([1.0, 1.0, 0.0]))
    assert digest(np.float32(0.0)) != digest(np.float32(-0.0))
    assert digest(jnp.ones(2)) == digest(jax.device_put(jnp.ones(2), WHOLE))
    assert digest(jax.ShapeDtypeStruct((2,), jnp.float32)) is None
    told = []
    jax.jit(lambda x: told.append(digest(x)))(jnp.ones(2))
    assert told == [None]


def test_one_process_spans_none():
    assert not spans_processes([jax.device_put(jnp.ones(2), WHOLE), np.ones(2), "text"])
    told = []
    jax.jit(lambda x: told.append(spans_processes(x)))(jnp.ones(1))
    assert told == [False]


def test_the_host_gets_all_devices_parts():
    split = NamedSharding(MESH, PartitionSpec("d"))
    x = jax.device_put(np.arange(8.0), split)
    (host,) = on_host([x])
    assert isinstance(host, np.ndarray) and host.tolist() == list(range(8))
