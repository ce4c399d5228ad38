# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training: environments split over devices, all else on each of them.

The training step is the one of a single device, under the same plain `jax.jit`: only
its inputs lie on a mesh, and one line of `loss.learn` says that the rows of a minibatch
are split. XLA adds the communication.
"""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_norm import place
from nnx_norm.distributed import gather_processes
from nnx_norm.examples import checkpoints

AXIS = "devices"
SPLIT = ("episodes.", "network_state")
"""Names in a learner of what has one entry for each environment, `[seeds, B, ...]`."""


class NotEnough(ValueError):
    """There are fewer devices than asked for, or they can't share the environments."""


def start(
    devices: int | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Mesh | None:
    """The mesh to train on; call it before anything asks JAX for its devices.

    Args:
      devices: How many of each process; on CPU so many are made of its cores. None
        takes all if there are several processes, and else is no mesh at all.
      coordinator: `HOST:PORT` of process 0, "auto" for what JAX finds out from a
        cluster, None for a single process.
      processes: Number of processes.
      process: Index of this one.

    Raises:
      NotEnough: A process has fewer devices.
    """
    if devices is not None:
        with suppress(RuntimeError):  # they exist already, and are counted below
            jax.config.update("jax_num_cpu_devices", devices)
    if coordinator is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = None if coordinator == "auto" else coordinator
        jax.distributed.initialize(address, processes, process)
    return None if devices is coordinator is None else mesh_of(devices)


def mesh_of(devices: int | None) -> Mesh:
    """So many devices of every process, in a row."""
    chosen: list[Any] = []
    for process in range(jax.process_count()):
        own = jax.local_devices(process)
        if len(own) < (devices or 1):
            raise NotEnough(f"--devices {devices}: there are only {len(own)}")
        chosen += own[:devices]
    return Mesh(chosen, AXIS)


def refuse_uneven(mesh: Mesh | None, environments: int) -> None:
    """Raises unless every device gets as many environments."""
    if mesh is not None and environments % mesh.size:
        raise NotEnough(
            f"{environments} environments can't be split evenly over {mesh.size} "
            "devices"
        )


def is_first() -> bool:
    """Whether this is the process that writes and tells."""
    return jax.process_index() == 0


def anyone(asked: bool) -> bool:
    """Whether any process was asked; every one calls it at the same point."""
    if jax.process_count() == 1:
        return asked
    return bool(gather_processes(np.array([asked], np.uint32)).any())


def within(mesh: Mesh | None) -> Any:
    """A context in which `split` knows the mesh."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def split(x: Array, axis: int = 0) -> Array:
    """Inside jit: `x` split over the devices along an axis, if there is a mesh."""
    if AXIS not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * axis, AXIS))


def placed(learners: Any, mesh: Mesh | None) -> Any:
    """Stacked learners on a mesh, environments split, all else on every device."""
    if mesh is None:
        return learners
    return restored(learners, checkpoints.to_arrays(learners), mesh)


def restored(template: Any, arrays: Mapping[str, np.ndarray], mesh: Mesh | None) -> Any:
    """Learners of saved arrays, on this mesh whatever they were saved on."""

    def put(name: str, array: np.ndarray) -> Array:
        if mesh is None:
            return jnp.asarray(array)
        spec = PartitionSpec(None, AXIS) if name.startswith(SPLIT) else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: np.array(array[index])
        )

    learners = checkpoints.from_arrays(template, arrays, put)
    if mesh is not None and learners.rewards is not None:
        place(learners.rewards, mesh, environments=AXIS)  # running returns are split
    return learners


def saved(learners: Any, mesh: Mesh | None) -> dict[str, np.ndarray]:
    """Learners as arrays; every process calls it at the same point."""
    if mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        learners = jax.jit(lambda x: x, out_shardings=everywhere)(learners)
    return checkpoints.to_arrays(learners)
