# SPDX-License-Identifier: Apache-2.0
"""Real processes over gloo on this machine, and the same calls in one process."""

import hashlib
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from launcher import FAILED, Rank, launch
from ranks import ROLLOUTS, SHAPE, B, T, fold, listed, part, rollout
from support import moments64

from nnx_norm import (
    Normalizer,
    RewardNormalizer,
    RunningMeanStd,
    all_reduce_processes,
    distributed,
    global_arrays,
    local_arrays,
    moments,
)

P = PartitionSpec


@pytest.mark.parametrize(
    "size, devices, end", [(2, 2, "killed"), (4, 1, "raises")], ids=["2x2", "4"]
)
def test_processes_are_one_until_one_leaves(size: int, devices: int, end: str):
    # One launch for all checks: starting up and compiling takes most of the time.
    ranks = launch("ranks:everything", size, end, devices=devices)
    log = "\n".join(rank.output for rank in ranks)
    told = [rank.results() for rank in ranks]
    assert all(results.get("left") == T * B for results in told), log
    for rank, results in enumerate(told):
        assert results["shape"] == [T, B, 3] and results["back"], log
        inputs_are_local(results, rank, size)
        one_goes_on_alone(results, rank, size)
        refuses_as_all_do(results["refusals"], size)
        nobody_drifts_apart(results, size)
    statistics_are_those_of_one_process(told)
    survivors_end_by_themselves(ranks, told, end)


def statistics_are_those_of_one_process(told: list[dict[str, Any]]) -> None:
    norm, rewards = Normalizer(SHAPE), RewardNormalizer(0.9, num_envs=B)
    whole = [rollout(seed) for seed in range(ROLLOUTS)]
    for data in whole:
        fold(norm, rewards, data)
    mask = np.concatenate([data["mask"] for data in whole])
    rows = np.concatenate([data["history"]["a"] for data in whole])[mask]
    right = moments64(rows)
    for name in ("jit", "shard_map", "moments"):
        found = told[0][name]
        close(found, listed(norm))
        assert found["count"] == right.count
        spread = np.sqrt(right.M2 / right.count)
        assert np.all(np.abs(found["mean"]["a"] - right.mean) <= 1e-7 * spread)
        np.testing.assert_allclose(found["M2"]["a"], right.M2, rtol=5e-7)
    close(told[0]["rewards"], listed(rewards))
    for results in told:
        for name in ("jit bits", "rewards bits", "shard_map bits", "moments"):
            assert results[name] == told[0][name]
        assert results["no rows"] == results["shard_map bits"]


def close(found: Any, right: Any) -> None:
    """As far from each other as the bounds on one device's error; all std are > 1."""
    for name, bounds in {"mean": (0, 1e-7), "M2": (5e-7, 0)}.items():
        pairs = zip(*(jax.tree.leaves(d[name]) for d in (found, right)), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=bounds[0], atol=bounds[1])
    assert [found[k] for k in ("count", "skipped")] == [right["count"], 0]


def inputs_are_local(results: dict[str, Any], rank: int, size: int) -> None:
    """Global statistics normalize local inputs, and so do their local copies."""
    norm, x = Normalizer(SHAPE), part(rollout(0)["history"], rank, size)
    norm.load_dict(results["jit"])
    right = norm.normalize(jax.tree.map(lambda v: v[0], x))
    assert results["local"]
    for y in results["forward"]:
        for name in SHAPE:
            np.testing.assert_allclose(y[name], right[name], atol=1e-6)


def refuses_as_all_do(refusals: dict[str, Any], size: int) -> None:
    each = B // size
    others = "process 0" if size == 2 else "processes 0, 2, 3"
    words = {
        "shape": f"local['a']: float32 (4, {each}, 3) on {others}, "
        f"float32 (4, {each - 1}, 3) on process 1",
        "structure": f"local['b']: float32 (4, {each}) on {others}, missing on process",
        "dtype": f"on {others}, int32 (4, {each}) on process 1",
        "type": f"local['b']: float32 (4, {each}) on {others}, str on process 1",
        "axis": f"placement: P(None, 'd') over {{'d': 4}} on {others}, P('d',) over",
        "moments": f"moments.mean: (3,) on {others}, (2,) on process 1",
        "kind": "TypeError: all_reduce_processes got Normalizer; expected Moments",
        "placement": "placement: P(None, 'd') over {'d': 4} on "
        f"{others}, {P()} on process 1",
        "no placement": f"TypeError: placement is {P()!r}; expected a Mesh",
        "setting": f"initial_std: 2.0 on {others}, 3.0 on process 1",
        "frozen": f"frozen: False on {others}, True on process 1",
        "mesh": "mesh: {'d': 4} (Explicit) with devices of digest ",
        "environments": f"environments: None on {others}, 'd' on process 1",
        "features": f"features: None on {others}, 'd' on process 1",
        "unknown axis": f"environments: None on {others}, 'none' on process 1",
        "other values": f"mean: float32 (2,) of digest {digest(3.0)} on {others}, "
        f"float32 (2,) of digest {digest(4.0)} on process 1\nStart or restore every",
        "replicated": f"local['a'] of shape (4, {each}, 3) becomes one of shape (4, ",
        "indivisible": "local has shape (2, 3, 3), which P(None, 'd') over {'d': 4}",
        "no axis": "local['a'] has shape (3,); expected 2 axes or more",
        "global": "local['a'] is an array that is global already, float32 (4, 8, 3)",
    }
    if size == 4:  # a device for each: nothing to divide
        assert refusals.pop("indivisible")[0] == "accepted"
        del words["indivisible"]
    assert refusals.keys() == words.keys()
    for name, (told, seconds) in refusals.items():
        assert words[name] in told and seconds < 10


def digest(mean: float) -> str:
    bits = np.full(2, mean, np.float32).tobytes()
    return hashlib.blake2b(bits, digest_size=6).hexdigest()


def nobody_drifts_apart(results: dict[str, Any], size: int) -> None:
    others = "process 0" if size == 2 else "processes 0, 2, 3"
    said = {name: told for name, (told, _) in results["apart"].items()}
    alone = ("history", "rewards", "port")
    for name in alone:
        assert "is this process's alone" in said[name]
    assert "history of shape (4, " in said["history"]
    for name in said.keys() - set(alone):
        assert f"on {others}, some of digest" in said[name], name
        assert said[name].startswith("ValueError"), name
    assert results["unchanged"] and results["taken here"]
    assert results["together"] == [14, 14, 14, T * B // size]
    assert "of digest" in results["drifted"][0] and "mean" in results["drifted"][0]


def one_goes_on_alone(results: dict[str, Any], rank: int, size: int) -> None:
    """With the statistics of all, and the running returns of its environments."""
    rewards, data = RewardNormalizer(0.9, num_envs=B), rollout(0)
    rewards.update(data["rewards"], data["ends"])
    count, returns = results["alone"]
    right = rewards.running_return.get_value()
    np.testing.assert_allclose(
        returns, part(np.asarray(right)[None], rank, size)[0], rtol=1e-6
    )
    assert count == T * B + T * B // size


def survivors_end_by_themselves(ranks: list[Rank], told: Any, end: str) -> None:
    lost = ranks[1]
    assert lost.status == (-9 if end == "killed" else FAILED)
    for rank, results in zip(ranks, told, strict=True):
        if rank is not lost:
            assert not rank.killed and rank.seconds - lost.seconds < 30
            if rank.status == FAILED:
                assert "lost" in results, rank.output
                message, seconds = results["lost"]
                assert "Gloo all-reduce failed" in message and "by peer" in message
                assert seconds < 30
            else:  # on a busy machine the service may be the first to notice
                assert rank.status == -signal.SIGABRT
                assert "indicates that another task died" in rank.output


# One process


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    assert jax.device_count() > 1
    return jax.make_mesh((jax.device_count(),), ("d",))


def test_in_one_process_it_is_a_device_put(mesh):
    x = {"a": np.ones((2, 16, 3)), "m": np.ones((2, 16), bool), "n": None}
    found = global_arrays(x, mesh)
    split = NamedSharding(mesh, P(None, "d"))
    assert {leaf.sharding for leaf in jax.tree.leaves(found)} == {split}
    np.testing.assert_array_equal(found["a"], x["a"])
    assert found["n"] is None and found["a"].dtype == jnp.asarray(x["a"]).dtype
    rows = global_arrays({"a": jnp.ones((16, 3))}, mesh, axis=0)
    assert rows["a"].sharding == NamedSharding(mesh, P("d"))
    placed = global_arrays(np.ones((2, 3)), NamedSharding(mesh, P()))
    assert placed.is_fully_replicated
    assert local_arrays(found)["a"] is found["a"]


def test_meshes_of_several_axes_split_over_all_of_them():
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    found = global_arrays(np.ones((3, 8, 2), np.float32), mesh)
    assert {s.data.shape for s in found.addressable_shards} == {(3, 2, 2)}


def test_buffers_of_the_caller_may_be_written_at_once(mesh):
    # Without a copy JAX went on reading the NumPy memory of some of them.
    for _ in range(8):
        x = np.ones((512, 64, 16), np.float32)
        found = global_arrays(x, NamedSharding(mesh, P("d")))
        x[:] = 7
        assert float(found.max()) == 1


@pytest.mark.parametrize(
    "leaf, error, words",
    [
        (np.ones((2, 3)), ValueError, r"local\['x'\] has shape \(2, 3\), which P"),
        (np.ones(8), ValueError, r"local\['x'\] has shape \(8,\); expected 2 axes"),
        (np.array([["a"]]), TypeError, r"local\['x'\] is .*; expected a local array"),
        ("text", TypeError, r"local\['x'\] is str; expected a local array of numbers"),
        (jax.random.key(0), TypeError, r"local\['x'\] is key<"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(mesh, leaf, error, words):
    with pytest.raises(error, match=words):
        global_arrays({"x": leaf}, mesh)


@pytest.mark.parametrize("placement", [None, P("d"), "d"])
def test_what_is_no_placement_is_refused(placement):
    with pytest.raises(TypeError, match="placement is .*; expected a Mesh over"):
        global_arrays(np.ones((2, 8)), placement)


@pytest.mark.parametrize("count", [0, 3])
def test_one_process_keeps_its_moments(count):
    batch = moments.from_batch(np.arange(2.0 * count).reshape(count, 2))
    out = all_reduce_processes(batch)
    assert float(out.count) == count
    np.testing.assert_array_equal(out.mean, batch.mean)
    np.testing.assert_array_equal(out.M2, batch.M2)


def test_united_moments_fold_into_the_ports_too():
    m = all_reduce_processes(moments.from_batch(jnp.array([[0.0], [2.0]])))
    stats = RunningMeanStd((1,), initial_count=0)
    stats.update_from_moments(m.mean, m.M2 / m.count, m.count)
    found = [float(np.sum(v)) for v in stats.to_numpy()[:3]]
    assert found == [1.0, 1.0, 2.0]


def test_processes_tell_apart_trees_of_another_order():
    told = {0: {"a": "()", "b": "()"}, 1: {"b": "()", "a": "()"}}
    assert "The leaves come in another order" in distributed._disagreement(told)
    told[1]["a"] = "(1,)"
    found = distributed._disagreement(told)
    assert "  a: () on process 0, (1,) on process 1" in found and "order" not in found
