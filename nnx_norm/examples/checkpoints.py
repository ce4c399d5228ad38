# SPDX-License-Identifier: Apache-2.0
"""The whole state of a training run on disk, written by Orbax."""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

KEPT = 3


class Saved(NamedTuple):
    """What a checkpoint holds."""

    position: int
    learners: dict[str, np.ndarray]
    histories: dict[str, dict[str, np.ndarray]]
    about: dict[str, Any]


class Unusable(Exception):
    """A directory that holds something else; its text is the whole message."""


class Checkpoints:
    """The last few states of one run, in a directory of its own.

    Orbax writes a checkpoint beside the others and renames it when it is
    complete, so that a process killed while writing leaves the older ones
    whole and nothing that looks like a newer one. Of several processes each reads for
    itself, in a directory that all see, and the first one writes.
    """

    def __init__(self, directory: str | Path):
        """Look into a directory, which need not exist yet.

        Raises:
          Unusable: It is a file, or there are numbered folders that no run wrote:
            the oldest would be deleted like old checkpoints.
        """
        # Orbax tells of every save and restore.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.directory = Path(directory).absolute()
        refuse_foreign(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        own = jax.process_index()
        alone: Any = {}  # without Orbax's own ways of waiting for other processes
        if jax.process_count() > 1:
            alone["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=own,
                active_processes={own},
                barrier_sync_key_prefix=f"process{own}",
            )
        self._writes = own == 0
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "about": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=self._writes,
                create=False,
                **alone,
            ),
        )

    def __bool__(self) -> bool:
        return bool(self._manager.all_steps())

    def save(self, saved: Saved) -> None:
        """Writes a checkpoint and forgets the oldest beyond `KEPT`."""
        if not self._writes:
            return
        if saved.position in self._manager.all_steps():
            return  # stopped right after this very state was saved
        state = {"learners": saved.learners, "histories": saved.histories}
        self._manager.save(
            saved.position,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(saved.about)
            ),
        )

    def latest(self) -> Saved | None:
        """The newest checkpoint that can be read; newer ones are put aside.

        Raises:
          Unusable: There are some, but none that can be read; nothing has changed.
        """
        damaged = []
        for position in sorted(self._manager.all_steps(), reverse=True):
            try:
                saved = self._read(position)
            except Exception as error:  # whatever a damaged file makes Orbax say
                first_line = str(error).partition("\n")[0][:200]
                told = f"checkpoint {position} is damaged, going back: {first_line}"
                print(told, file=sys.stderr)
                damaged.append(position)
            else:
                self._put_aside(damaged)
                return saved
        if damaged:
            raise Unusable(
                f"none of the checkpoints {damaged} in {self.directory} can be read; "
                "they were left as they are: choose another directory"
            )
        return None

    def _put_aside(self, positions: list[int]) -> None:
        """Keeps damaged checkpoints under a name that is none, so theirs is free."""
        for position in positions if self._writes else ():
            beside = f"damaged-{position}-{time.time_ns()}"
            (self.directory / str(position)).rename(self.directory / beside)
        if positions:
            self._manager.reload()

    def _read(self, position: int) -> Saved:
        tree = self._manager.item_metadata(position)["state"].tree
        # NumPy templates: what comes back is placed on no device, in no sharding.
        template = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), tree)
        read = self._manager.restore(
            position,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(template), about=ocp.args.JsonRestore()
            ),
        )
        state = read["state"]
        return Saved(position, state["learners"], state["histories"], read["about"])


def refuse_foreign(directory: Path) -> None:
    """Raises unless a directory is empty of all that could be taken for checkpoints."""
    if directory.exists() and not directory.is_dir():
        raise Unusable(f"{directory} is a file; expected a directory for checkpoints")
    numbered = [path for path in directory.glob("*") if path.name.isdecimal()]
    foreign = [p.name for p in numbered if not (p / "state").exists()]
    if foreign:
        raise Unusable(
            f"{directory} holds {sorted(foreign)}, which no run wrote there: choose "
            "another directory"
        )


def to_arrays(tree: Any) -> dict[str, np.ndarray]:
    """A pytree's leaves by their paths, as NumPy arrays; keys as their bits."""
    return {
        name: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for name, leaf in named_leaves(tree)
    }


def from_arrays(
    template: Any,
    arrays: Mapping[str, np.ndarray],
    put: Callable[[str, np.ndarray], Array] = lambda name, array: jnp.asarray(array),
) -> Any:
    """The inverse of `to_arrays`, given a pytree of the same kind.

    Args:
      template: Such a pytree; only its structure is used, and which leaves are keys.
      arrays: What `to_arrays` gave.
      put: Makes a JAX array of each, where it shall lie.
    """

    def restored(name: str, like: Array) -> Array:
        array = put(name, arrays[name])
        return jax.random.wrap_key_data(array) if is_key(like) else array

    leaves = [restored(name, leaf) for name, leaf in named_leaves(template)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def named_leaves(tree: Any) -> list[tuple[str, Array]]:
    """Every leaf with a name made of its path."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if leaf.size  # Orbax can't store an empty array
    ]


def is_key(leaf: Array) -> bool:
    """Whether a leaf is a typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
