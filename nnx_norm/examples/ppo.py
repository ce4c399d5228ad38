# SPDX-License-Identifier: Apache-2.0
"""Trains a PPO agent with and without normalization, and shows the difference.

Such as `python -m nnx_norm.examples.ppo`, or with `--env Pendulum --compare`, or with
`--env fast --normalize obs`; `--help` lists all.
"""

import argparse
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_norm.examples.checkpoints import Checkpoints
    from nnx_norm.examples.training import Settings

VARIANTS = ("none", "obs", "reward", "obs+reward")
QUICK = {"seeds": 3, "steps": 80_000}


class Refused(Exception):
    """Something the user has to change; its text is the whole message."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except ModuleNotFoundError as error:
        # Hence no such import at the top of this file: here it becomes a sentence.
        message = (
            f"needs {error.name}, which is not installed: "
            "pip install 'nnx-norm[examples]'"
        )
    except Refused as error:
        message = str(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"ppo: {message}", file=sys.stderr)
    return 2


def run(options: argparse.Namespace) -> int:
    """Trains what the options ask for and reports it."""
    from nnx_norm.examples import catalogue, report
    from nnx_norm.examples.checkpoints import Unusable
    from nnx_norm.examples.progress import Progress
    from nnx_norm.examples.training import Interrupted, train

    try:
        saves = open_checkpoints(options)
        options.out.mkdir(parents=True, exist_ok=True)
        settings = decide_settings(options, saves)
        environment = catalogue.make(settings.env, settings.scale)
    except (catalogue.Unavailable, Unusable, OSError) as error:
        raise Refused(str(error)) from None
    progress = Progress(settings.hyper("").steps_per_iteration * settings.seeds)
    try:
        histories, seconds = train(
            settings, environment, progress, saves, options.checkpoint_every or 10
        )
    except Interrupted:
        print(farewell(options), file=sys.stderr)
        return 130
    finally:
        progress.finished()

    print("\n" + report.table(settings, environment, histories) + "\n")
    name = report.file_name(settings, environment)
    numbers = report.numbers(settings, environment, histories, seconds)
    report.write_json(options.out / f"{name}.json", numbers)
    picture = options.out / f"{name}.png"
    report.write_picture(picture, settings, environment, histories)
    print(f"wrote {picture} and {name}.json")
    return 0


def open_checkpoints(options: argparse.Namespace) -> "Checkpoints | None":
    """Where to save the state, if anywhere."""
    from nnx_norm.examples.checkpoints import Checkpoints

    if options.checkpoint is None:
        if options.resume:
            raise Refused("--resume needs --checkpoint DIR, the run to continue")
        if options.checkpoint_every is not None:
            raise Refused("--checkpoint-every needs --checkpoint DIR")
        return None
    saves = Checkpoints(options.checkpoint)
    if saves and not options.resume:
        raise Refused(
            f"{options.checkpoint} holds a run already: add --resume to continue it, "
            "or choose another directory"
        )
    return saves


def decide_settings(
    options: argparse.Namespace, saves: "Checkpoints | None"
) -> "Settings":
    """A checkpoint's settings, or else what was asked for, filled with defaults."""
    from nnx_norm.examples import catalogue
    from nnx_norm.examples.training import Settings

    fields = {field.name for field in dataclasses.fields(Settings)}
    given: dict[str, Any] = dict(QUICK) if options.quick else {}
    given |= {name: value for name, value in vars(options).items() if value is not None}
    given = {name: value for name, value in given.items() if name in fields}
    if "env" in given:
        given["env"] = catalogue.find(given["env"])
    variants = chosen_variants(options)
    if variants:
        given["variants"] = variants
    saved = saves.latest() if saves else None
    if saved is None:
        if saves is not None and options.resume:
            print(f"nothing to continue in {options.checkpoint} yet", file=sys.stderr)
        return Settings(**given)
    about: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in saved.about.items()
    }
    for name, value in given.items():
        if value != about[name]:
            raise Refused(
                f"{options.checkpoint} was trained with {name} {about[name]}, not "
                f"{value}: leave that out to continue it, or choose another directory"
            )
    print(f"continuing {options.checkpoint}", file=sys.stderr)
    return Settings(**about)


def chosen_variants(options: argparse.Namespace) -> tuple[str, ...]:
    """The variants asked for, in a fixed order; none if that was left open."""
    chosen = set(options.compare or ())
    if options.compare == []:
        chosen = set(VARIANTS)
    if options.normalize:
        chosen.add(options.normalize)
    return tuple(variant for variant in VARIANTS if variant in chosen)


def farewell(options: argparse.Namespace) -> str:
    """What to say after Ctrl-C."""
    if options.checkpoint is None:
        return "stopped; nothing was saved (--checkpoint DIR would)"
    directory, out = (
        shlex.quote(str(path)) for path in (options.checkpoint, options.out)
    )
    return (
        "stopped and saved; continue with: python -m nnx_norm.examples.ppo "
        f"--checkpoint {directory} --resume --out {out}"
    )


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


if __name__ == "__main__":
    sys.exit(main())
