# SPDX-License-Identifier: Apache-2.0
"""Cost of uniting devices: collectives and bytes per update, and weak scaling.

    python -m benchmarks.bench_devices [--quick] [--json PATH] [--markdown PATH]

On CPU the eight devices are made of the cores there are, and share them: how times grow
with their number then says nothing about a machine with eight accelerators. What holds
everywhere is what is sent, and what the collective adds to the same work without it.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import command, harness, machine, report
from benchmarks.harness import Call, Case
from nnx_norm import Normalizer, place

P = PartitionSpec
AXIS = "devices"
SIZES = (1, 2, 4, 8)
WIDTHS = (64, 17, 3, 3, 4)  # of the leaves of a tree, as a robot observes them

Update = Callable[[Any, Any], Any]
Tree = dict[str, Any]

ALONE, MAPPED = "no collective", "shard_map, axis_name"
JITTED, TWO_PASS = "plain jit, sharded", "two-pass, per leaf"

OPERATION = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
ARRAY = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")


def history(mesh: Mesh, widths: Sequence[int], steps: int, environments: int) -> Tree:
    """`[T, B, F]` for every leaf, so many environments on each device."""
    rng, split = np.random.default_rng(0), NamedSharding(mesh, P(None, AXIS))
    shape = (steps, environments * mesh.size)
    return {
        f"leaf{i:02}": jax.device_put(
            rng.normal(3, 2, (*shape, width)).astype(np.float32), split
        )
        for i, width in enumerate(widths)
    }


def ours(
    mesh: Mesh, widths: Sequence[int], axis_name: str | None
) -> tuple[Normalizer, Update]:
    """Statistics on the mesh, and their update."""
    shapes = {f"leaf{i:02}": width for i, width in enumerate(widths)}

    def update(norm: Normalizer, x: Tree) -> Normalizer:
        norm.update_statistics(x)
        return norm

    norm = Normalizer(shapes, axis_name=axis_name)
    norm.set_statistics(3.0, 4.0, 10_000)  # those of the data, as after some updates
    return place(norm, mesh), update


def two_pass(_: None, x: Tree) -> Any:
    """What is usually written: a mean over devices, then a variance, leaf by leaf."""

    def one(x: jax.Array) -> Any:
        n = lax.psum(jnp.full((), x.shape[0] * x.shape[1], jnp.float32), AXIS)
        mean = lax.psum(jnp.sum(x, axis=(0, 1)), AXIS) / n
        return mean, lax.psum(jnp.sum((x - mean) ** 2, axis=(0, 1)), AXIS), n

    return jax.tree.map(one, x)


def contender(name: str, mesh: Mesh, widths: Sequence[int]) -> tuple[Any, Update]:
    """The state of a contender and its update, to be jitted."""
    split = P(None, AXIS)
    if name == JITTED:
        return ours(mesh, widths, None)
    over = partial(jax.shard_map, mesh=mesh)
    if name == TWO_PASS:
        return None, over(two_pass, in_specs=(P(), split), out_specs=P())
    if name == MAPPED:
        norm, update = ours(mesh, widths, AXIS)
        return norm, over(update, in_specs=(P(), split), out_specs=P())
    norm, update = ours(mesh, widths, None)

    def alone(norm: Normalizer, x: Tree) -> Any:
        return jax.tree.map(lambda v: v[None], update(norm, x))

    return norm, over(alone, in_specs=(P(), split), out_specs=P(AXIS))


def mesh_of(size: int) -> Mesh:
    """The first devices, in a row."""
    return Mesh(jax.devices()[:size], AXIS)


def call(
    name: str, size: int, widths: Sequence[int], steps: int, environments: int
) -> Call:
    """One compiled update, to be timed."""
    mesh = mesh_of(size)
    state, update = contender(name, mesh, widths)
    x, run = history(mesh, widths, steps, environments), jax.jit(update)
    return lambda: jax.tree.leaves(run(state, x))


def case(size: int, widths: Sequence[int], steps: int, environments: int) -> Case:
    """All contenders on so many devices."""
    names = (ALONE, MAPPED, JITTED, TWO_PASS)
    contenders = {
        name: partial(call, name, size, widths, steps, environments) for name in names
    }
    return Case(f"{size} device{'s' * (size > 1)}", contenders, ALONE)


def sent(name: str, size: int, widths: Sequence[int]) -> dict[str, int]:
    """Collectives in the compiled program of one update, and their operands' bytes.

    Those of a careful read stand in the body of a loop, which most updates never enter.
    """
    mesh = mesh_of(size)
    state, update = contender(name, mesh, widths)
    x = history(mesh, widths, 2, 2)
    program = str(jax.jit(update).lower(state, x).compile().as_text())
    rarely, always = program.split("\nENTRY ")
    figures = {}
    for kind, part in (("always", always), ("rarely", rarely)):
        found = OPERATION.findall(part)
        arrays = [array for shapes, _ in found for array in ARRAY.findall(shapes)]
        figures[f"{kind}_collectives"] = len(found)
        figures[f"{kind}_bytes"] = sum(map(nbytes, arrays))
    return figures


def nbytes(array: tuple[str, str, str]) -> int:
    """Of an array as XLA writes its type, such as `f32[8,3]`."""
    _, bits, shape = array
    return int(bits or 8) // 8 * math.prod(map(int, filter(None, shape.split(","))))


def main() -> None:
    """Run from the command line."""
    args = command.timing_parser(__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", max(SIZES))  # before there are any
    described = machine.describe()
    count = len(jax.devices())
    sizes = [size for size in SIZES if size <= count and not (args.quick and size == 4)]
    most, shape = sizes[-1], (4, 16) if args.quick else (32, 128)
    widths = WIDTHS[-2:] if args.quick else WIDTHS * 4
    names = (MAPPED, JITTED, TWO_PASS)
    communication = {name: sent(name, most, widths) for name in names}
    rounds = args.rounds or (5 if args.quick else 31)
    timed = [case(size, widths, *shape) for size in sizes]
    timed = [c for c in timed if not args.only or c.name in args.only]
    results = {c.name: harness.measure(c, rounds, args.seed) for c in timed}
    per_device = "x".join(map(str, shape))
    columns = [ALONE, *names]
    rows = []
    for name, found in results.items():
        by_name = {row["contender"]: row for row in found}
        share = 1 - by_name[MAPPED]["speed"]
        times = [report.number(by_name[c]["wall_ms"]) for c in columns]
        rows.append([name, *times, f"{share:.0%}"])
    tables = [
        report.table(
            [
                f"an update of {len(widths)} leaves, {most} devices",
                *("collectives", "bytes", "if read again: collectives", "bytes"),
            ],
            [[n, *figures.values()] for n, figures in communication.items()],
        ),
        report.table(
            [f"ms, {per_device} on each", *columns, "the collective's share"], rows
        ),
    ]
    figures = {"machine": described, "rounds": rounds, "communication": communication}
    title = "Devices"
    if str(described["device"]).startswith("cpu"):
        title = f"Devices, made of {described['cores']} cores"
    command.publish(args, title, tables, figures | {"results": results})


if __name__ == "__main__":
    main()
