# SPDX-License-Identifier: Apache-2.0
"""The options of the PPO example's command line."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = ("none", "obs", "reward", "obs+reward")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    # Settings have no default here: what was left out can come from a checkpoint.
    cli = argparse.ArgumentParser(
        prog="python -m nnx_norm.examples.ppo",
        description="Trains a PPO agent for several seeds at once and reports its "
        "return. Without --normalize and --compare it compares `none` and "
        "`obs+reward`.",
    )
    add = cli.add_argument
    add(
        "--env",
        metavar="NAME",
        help="MountainCarContinuous (the default), Pendulum, MountainCar, Acrobot or "
        "CartPole; with nnx-norm[brax] installed also fast and inverted_pendulum",
    )
    add(
        "--normalize",
        choices=VARIANTS,
        help="train this variant alone (or beside those of --compare)",
    )
    add(
        "--compare",
        nargs="*",
        choices=VARIANTS,
        metavar="VARIANT",
        help="train these variants and draw them into one picture (no name: all four)",
    )
    add("--seeds", type=positive(int), help="seeds trained side by side (default: 5)")
    add(
        "--steps",
        type=positive(int_of_float),
        help="environment steps for each variant and seed (default: 150000)",
    )
    add("--epochs", type=positive(int), help="passes over each rollout (default: 4)")
    add("--learning-rate", type=positive(float), help="of Adam (default: 3e-4)")
    add(
        "--scale",
        type=factors,
        metavar="A,B,...",
        help="factors for the observation's features, such as 1,1,57.3 for Pendulum "
        "with its velocity in degrees; if the first is negative, --scale=-1,1,1",
    )
    add("--quick", action="store_true", help="3 seeds and 80000 steps: a first look")
    add(
        "--out",
        type=folder,
        default=Path("results"),
        help="folder for the picture and the JSON (default: results)",
    )
    add(
        "--checkpoint",
        type=folder,
        metavar="DIR",
        help="save the whole state there now and then, and on Ctrl-C",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the run in --checkpoint DIR, or begin it if there is none yet",
    )
    add(
        "--checkpoint-every",
        type=positive(int),
        metavar="N",
        help="training steps between two checkpoints (default: 10)",
    )
    add(
        "--devices",
        type=positive(int),
        metavar="N",
        help="split the environments over N devices (of each process); on CPU so many "
        "are made",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="train in several processes, started alike; where process 0 listens, or "
        "'auto' to ask the cluster (SLURM, Open MPI, TPU pod)",
    )
    add("--processes", type=positive(int), metavar="N", help="number of processes")
    add("--process", type=int, metavar="I", help="index of this one, from 0")
    return cli


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argument type that refuses zero and less, and what is not finite."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not between 0 and infinity")
        return value

    parse.__name__ = "number"  # what argparse calls it in its complaints
    return parse


def int_of_float(text: str) -> int:
    """A whole number that may be written as 3e5."""
    value = float(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(value)


def factors(text: str) -> tuple[float, ...]:
    """Finite numbers between commas."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(
            f"{text} are not finite numbers with commas between them, such as 1,1,57.3"
        )
    return values


def folder(text: str) -> Path:
    """A path that is not empty, as an unset variable of a shell would make it."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; for here write .")
    return Path(text)
