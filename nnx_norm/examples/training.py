# SPDX-License-Identifier: Apache-2.0
"""Trains each variant for several seeds side by side, and records it."""

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from nnx_norm.examples import devices
from nnx_norm.examples.algorithm import train_step
from nnx_norm.examples.checkpoints import Checkpoints, Saved
from nnx_norm.examples.environments import Environment
from nnx_norm.examples.learner import Hyperparameters, Learner, new_learner
from nnx_norm.examples.progress import Progress

History = dict[str, np.ndarray]
"""Metrics of one variant, each `[iterations, seeds, ...]`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides a run's numbers."""

    env: str = "MountainCarContinuous-v0"
    scale: tuple[float, ...] = ()
    variants: tuple[str, ...] = ("none", "obs+reward")
    seeds: int = 5
    steps: int = 150_000
    epochs: int = Hyperparameters.epochs
    learning_rate: float = Hyperparameters.learning_rate

    def hyper(self, variant: str) -> Hyperparameters:
        """What PPO is run with for one variant."""
        return Hyperparameters(
            normalize=variant, epochs=self.epochs, learning_rate=self.learning_rate
        )

    @property
    def iterations(self) -> int:
        """Training steps for each variant: whole rollouts, at least `steps`."""
        return -(-self.steps // Hyperparameters().steps_per_iteration)


class Interrupted(Exception):
    """Training was asked to stop and did, after a whole training step."""


def train(
    settings: Settings,
    environment: Environment,
    progress: Progress,
    saves: Checkpoints | None = None,
    save_every: int = 10,
    mesh: Mesh | None = None,
) -> tuple[dict[str, History], dict[str, dict[str, float]]]:
    """Trains every variant, from the newest checkpoint on if there is one.

    Args:
      settings: What to train.
      environment: The environment `settings.env` names, in its units.
      progress: Where to tell how it goes.
      saves: Where to save the state and to look for one to continue from.
      save_every: Training steps between two checkpoints.
      mesh: Devices to split the environments over; None trains on one. Not part of
        the settings: a run can go on with others.

    Returns:
      The history of each variant, and the seconds that this call spent on it.

    Raises:
      Interrupted: On Ctrl-C or SIGTERM, after saving the state to `saves`.
    """
    saved = saves.latest() if saves else None
    histories: dict[str, History] = saved.histories if saved else {}
    seconds = {}
    # Positions count the states of a run, each variant's first and last included.
    per_variant = settings.iterations + 1
    with stop_request() as stop_requested:
        for index, variant in enumerate(settings.variants):
            begin = index * per_variant
            if saved and saved.position >= begin + settings.iterations:
                continue  # done when that checkpoint was written
            progress.compiling(variant)
            clock = [time.perf_counter()]
            run = VariantRun(settings, variant, environment, mesh)
            if saved and saved.position >= begin:
                run.restore(saved, histories[variant])
            while run.iteration < settings.iterations:
                if devices.anyone(stop_requested()):
                    break
                metrics = run.step()
                if len(clock) == 1:  # the first step, which had to be compiled
                    clock.append(time.perf_counter())
                    progress.training(variant, settings.iterations, run.iteration - 1)
                progress.advance(metrics)
                if saves is not None and run.iteration % save_every == 0:
                    saves.save(run.state(begin, histories))
            if saves is not None:
                saves.save(run.state(begin, histories))
            progress.finished()
            if run.iteration < settings.iterations:
                raise Interrupted
            histories[variant] = run.history
            clock.append(time.perf_counter())
            compiling, training = np.diff(clock).tolist()
            seconds[variant] = {"compiling": compiling, "training": training}
    return histories, seconds


class VariantRun:
    """One variant on its way: learners of all seeds and what they have shown."""

    def __init__(
        self,
        settings: Settings,
        variant: str,
        environment: Environment,
        mesh: Mesh | None = None,
    ):
        self._settings, self._variant, self._mesh = settings, variant, mesh
        self._static = {"environment": environment, "hyper": settings.hyper(variant)}
        self._records: list[dict[str, np.ndarray]] = []
        learners = new_learners(jnp.arange(settings.seeds), **self._static)
        self.learners = devices.placed(learners, mesh)

    def step(self) -> dict[str, np.ndarray]:
        """One training step of every seed; returns its metrics."""
        with devices.within(self._mesh):
            self.learners, metrics = train_steps(self.learners, **self._static)
        self._records.append(jax.tree.map(np.asarray, metrics))
        return self._records[-1]

    @property
    def iteration(self) -> int:
        """Training steps done."""
        return len(self._records)

    @property
    def history(self) -> History:
        """What was recorded so far."""
        if not self._records:
            return {}
        return jax.tree.map(lambda *rows: np.stack(rows), *self._records)

    def state(self, begin: int, earlier: dict[str, History]) -> Saved:
        """What a checkpoint needs, at a position counted from `begin`."""
        return Saved(
            position=begin + self.iteration,
            learners=devices.saved(self.learners, self._mesh),
            histories={**earlier, self._variant: self.history},
            about=dataclasses.asdict(self._settings),
        )

    def restore(self, saved: Saved, history: History) -> None:
        """Continues where a checkpoint was written."""
        self.learners = devices.restored(self.learners, saved.learners, self._mesh)
        self._records = [
            dict(zip(history, row, strict=True))
            for row in zip(*history.values(), strict=True)
        ]


@functools.partial(jax.jit, static_argnames=("environment", "hyper"))
def new_learners(
    seeds: Array, environment: Environment, hyper: Hyperparameters
) -> Learner:
    """One learner for each seed, stacked along a leading axis."""
    return jax.vmap(lambda seed: new_learner(jax.random.key(seed), environment, hyper))(
        seeds
    )


@functools.partial(jax.jit, static_argnames=("environment", "hyper"))
def train_steps(
    learners: Learner, environment: Environment, hyper: Hyperparameters
) -> tuple[Learner, dict[str, Array]]:
    """`train_step` for every seed at once."""
    return jax.vmap(lambda learner: train_step(learner, environment, hyper))(learners)


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a wish that is asked for.

    The second one acts at once.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, ask) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield lambda: asked
    finally:
        restore()
