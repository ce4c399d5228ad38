# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_processes run; start-up costs most, so all in one go."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from launcher import tell

from nnx_norm import (
    Collector,
    Normalizer,
    NormalizerStatistics,
    RewardNormalizer,
    RunningMeanStd,
    check_statistics,
    distributed,
    moments,
)
from nnx_norm.extended import double
from nnx_norm.placement import place
from nnx_norm.processes import global_arrays, local_arrays

SHAPE = {"a": 3, "b": ()}
T, B = 4, 8
ROLLOUTS = 2
P = PartitionSpec
SPLIT = P(None, "d")


def rollout(seed: int) -> dict[str, Any]:
    """The rollout of all processes, far from zero, with its mask, rewards and ends."""
    rng = np.random.default_rng(seed)
    x = {"a": 1e4 + 3 * rng.normal(size=(T, B, 3)), "b": rng.normal(size=(T, B))}
    history = {k: v.astype(np.float32) for k, v in x.items()}
    rewards = rng.normal(size=(T, B)).astype(np.float32)
    flags = rng.random((2, T, B)) < 0.2
    return {"history": history, "mask": ~flags[0], "rewards": rewards, "ends": flags[1]}


def part(tree: Any, rank: int, size: int) -> Any:
    """What one process has of it."""
    each = B // size
    return jax.tree.map(lambda v: v[:, rank * each : (rank + 1) * each], tree)


def fold(norm: Normalizer, rewards: RewardNormalizer, data: dict[str, Any]) -> None:
    """One training step's writes."""
    fold_history(norm, (data["history"], data["mask"]))
    rewards.update(data["rewards"], data["ends"])


def fold_history(norm: Normalizer, data: tuple[Any, Any]) -> None:
    norm.update_statistics(data[0], mask=data[1])


def listed(norm: Any) -> Any:
    """Statistics in full precision, for JSON."""
    keys = ("mean", "M2", "count", "skipped")
    d = norm.to_dict()
    return jax.tree.map(lambda v: np.asarray(v).tolist(), {k: d[k] for k in keys})


def bytes_of(module: Any) -> str:
    """The bits of the replicated statistics of a module."""
    leaves = jax.tree.leaves(nnx.state(module, NormalizerStatistics))
    return "".join(np.asarray(leaf).tobytes().hex() for leaf in leaves)


def refusal(call: Callable[[], Any]) -> tuple[str, float]:
    """What a call says when it refuses, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "accepted", time.monotonic() - start


def everything(rank: int, size: int, end: str) -> None:
    """Every check that needs processes; `end` says how rank 1 leaves."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    mine = [part(rollout(seed), rank, size) for seed in range(ROLLOUTS)]
    whole = [global_arrays(local, mesh) for local in mine]
    tell("shape", whole[0]["history"]["a"].shape)
    pairs = zip(*map(jax.tree.leaves, (local_arrays(whole[0]), mine[0])), strict=True)
    tell("back", all(np.array_equal(a, b) for a, b in pairs))
    norm = updates(mesh, whole)
    forward(norm, mine[0]["history"])
    alone(rank, size, mesh, mine[0])
    tell("moments", listed(united(mine)))
    refusals(rank, mesh, mine[0])
    apart(rank, mesh, mine[0])
    leave(rank, mesh, whole[0]["history"], end)


def updates(mesh: Mesh, whole: list[dict[str, Any]]) -> Normalizer:
    """The same updates under plain jit, and with an axis name under shard_map."""
    plain = place(Normalizer(SHAPE), mesh)
    rewards = place(RewardNormalizer(0.9, num_envs=B), mesh, environments="d")
    named = place(Normalizer(SHAPE, axis_name="d"), mesh)
    under_jit = nnx.jit(fold)
    per_device = nnx.jit(
        nnx.shard_map(fold_history, mesh=mesh, in_specs=(P(), SPLIT), out_specs=P())
    )
    for data in whole:
        under_jit(plain, rewards, data)
        per_device(named, (data["history"], data["mask"]))
    for name, norm in (("jit", plain), ("rewards", rewards), ("shard_map", named)):
        tell(name, listed(norm))
        tell(f"{name} bits", bytes_of(norm))
    nothing = jax.tree.map(jnp.zeros_like, whole[0]["mask"])
    per_device(named, (whole[0]["history"], nothing))
    tell("no rows", bytes_of(named))
    return plain


def forward(norm: Normalizer, history: Any) -> None:
    """Local inputs through global statistics, and through local ones."""
    x = jax.tree.map(lambda v: v[0], history)
    mine = nnx.clone(norm)
    nnx.update(mine, local_arrays(nnx.state(norm)))
    normalize = nnx.jit(Normalizer.normalize)
    ys = [normalize(norm, x), normalize(mine, x)]
    tell("forward", [jax.tree.map(lambda v: np.asarray(v).tolist(), y) for y in ys])
    tell("local", all(leaf.is_fully_addressable for leaf in jax.tree.leaves(ys[1])))


def alone(rank: int, size: int, mesh: Mesh, mine: dict[str, Any]) -> None:
    """A process that goes on without the others, with returns that were split."""
    rewards = place(RewardNormalizer(0.9, num_envs=B), mesh, environments="d")
    nnx.jit(RewardNormalizer.update)(
        rewards, *(global_arrays(mine[k], mesh) for k in ("rewards", "ends"))
    )
    check_statistics(rewards)  # of returns this process has a part
    own = RewardNormalizer(0.9, num_envs=B // size)
    nnx.update(own, local_arrays(nnx.state(rewards)))
    check_statistics(own)
    returns = np.asarray(own.running_return.get_value()).tolist()
    own.update(mine["rewards"], mine["ends"])
    tell("alone", [own.count, returns])


def united(mine: list[dict[str, Any]]) -> Normalizer:
    """Moments united outside jit, from histories that stay where they are."""
    norm = Normalizer(SHAPE)
    lift = jax.jit(lambda x, mask: moments.from_batch(x, axes=(0, 1), mask=mask))
    for data in mine:
        with double():
            batch = lift(data["history"], data["mask"])
            batch = distributed.all_reduce_processes(batch)
        norm.merge_from(batch)
    return norm


def refusals(rank: int, mesh: Mesh, mine: dict[str, Any]) -> None:
    """What rank 1 does otherwise, all ranks refuse; then they go on."""
    x, odd = mine["history"], rank == 1
    fewer = jax.tree.map(lambda v: v[:, 1:], x)
    ints = {**x, "b": x["b"].astype(np.int32)}
    text = {**x, "b": "text"}
    spec: Any = P()
    reverse = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: global_arrays(fewer if odd else x, mesh),
        "structure": lambda: global_arrays({"a": x["a"]} if odd else x, mesh),
        "dtype": lambda: global_arrays(ints if odd else x, mesh),
        "type": lambda: global_arrays(text if odd else x, mesh),
        "axis": lambda: global_arrays(x, mesh, axis=0 if odd else 1),
        "moments": lambda: distributed.all_reduce_processes(
            moments.zeros(2 if odd else 3)
        ),
        "kind": lambda: distributed.all_reduce_processes(
            Normalizer(2)  # pyright: ignore[reportArgumentType]
        ),
        "placement": lambda: global_arrays(x, spec if odd else mesh),
        "no placement": lambda: global_arrays(x, spec),
        "setting": lambda: place(Normalizer(1, initial_std=2.0 + odd), mesh),
        "frozen": lambda: place(frozen(odd), mesh),
        "mesh": lambda: place(Normalizer(1), reverse if odd else mesh),
        "environments": lambda: place(
            RewardNormalizer(0.9, num_envs=B), mesh, environments="d" if odd else None
        ),
        "features": lambda: place(Normalizer(8), mesh, features="d" if odd else None),
        "unknown axis": lambda: place(
            Normalizer(1), mesh, environments="none" if odd else None
        ),
        "other values": lambda: place(set_to(3.0 + odd), mesh),
        "replicated": lambda: global_arrays(x, NamedSharding(mesh, P())),
        "indivisible": lambda: global_arrays(np.ones((2, 3, 3)), mesh),
        "no axis": lambda: global_arrays({"a": np.ones(3)}, mesh),
        "global": lambda: global_arrays(global_arrays(x, mesh), mesh),
    }
    tell("refusals", {name: refusal(call) for name, call in calls.items()})


def set_to(mean: float) -> Normalizer:
    norm = Normalizer(2)
    norm.set_statistics(mean, 1.0, 7)
    return norm


def frozen(flag: bool) -> Normalizer:
    norm = Normalizer(2)
    if flag:
        norm.freeze()
    return norm


def apart(rank: int, mesh: Mesh, mine: dict[str, Any]) -> None:
    """What only one process has, and the statistics of all."""
    x, odd, norm = mine["rewards"][..., None], rank == 1, place(set_to(3.0), mesh)
    rewards = place(RewardNormalizer(0.9, num_envs=x.shape[1]), mesh)
    port = place(RunningMeanStd(1), mesh)
    one = place(Normalizer(1), mesh)
    before = bytes_of(norm)
    calls: dict[str, Callable[[], Any]] = {
        "history": lambda: one.update_statistics(x),
        "rewards": lambda: rewards.update(mine["rewards"], mine["ends"]),
        "port": lambda: port.record_moments(x[0]),
        "port moments": lambda: port.update_from_moments(0.0 + odd, 1.0, 3),
        "merge": lambda: norm.merge_from(set_to(4.0 + odd)),
        "merge dict": lambda: norm.merge_from(set_to(4.0 + odd).to_dict()),
        "set": lambda: norm.set_statistics(4.0 + odd, 1.0, 7),
        "load": lambda: norm.load_dict(set_to(4.0 + odd).to_dict()),
        "copy": lambda: norm.copy_from(set_to(4.0 + odd)),
    }
    tell("apart", {name: refusal(call) for name, call in calls.items()})
    tell("unchanged", bytes_of(norm) == before and not one.count)

    norm.merge_from(set_to(3.0))  # the same everywhere
    copied, merged = Normalizer(2), Normalizer(2)
    copied.copy_from(norm)
    merged.merge_from(norm)
    collector = Collector(one, rank)
    collector.seen.update_statistics(x)
    tell("together", [v.count for v in (norm, copied, merged, collector.seen)])
    arrays = jax.tree.leaves(nnx.state([copied, merged, collector.seen]))
    tell("taken here", all(v.is_fully_addressable for v in arrays))

    nnx.jit(Normalizer.update_statistics)(one, x)  # which nobody can see
    tell("drifted", refusal(lambda: place(one, mesh)))


def leave(rank: int, mesh: Mesh, history: Any, end: str) -> None:
    """Rank 1 goes in the middle of an update; what do the others see?"""
    going = False

    def pass_on(x: Any) -> Any:
        if going and rank == 1 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def fold(norm: Normalizer, x: Any) -> None:
        shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
        norm.update_statistics(jax.pure_callback(pass_on, shapes, x))

    specs = {"mesh": mesh, "in_specs": (P(), SPLIT), "out_specs": P()}
    update = nnx.jit(nnx.shard_map(fold, **specs, check_vma=False))
    norm = place(Normalizer(SHAPE, axis_name="d"), mesh)
    update(norm, history)  # compiles, so that all ranks are there at the same time
    tell("left", norm.count)
    going, start = True, time.monotonic()
    if rank == 1 and end == "raises":
        raise RuntimeError("an environment broke")
    try:
        update(norm, history)
        jax.block_until_ready(nnx.state(norm))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # either, as it comes
        tell("lost", [str(error), time.monotonic() - start])
        time.sleep(rank == 0)  # it hosts the service whose end aborts the others
        raise
