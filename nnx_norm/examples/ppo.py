# SPDX-License-Identifier: Apache-2.0
"""Trains a PPO agent with and without normalization, and shows the difference.

Such as `python -m nnx_norm.examples.ppo`, or with `--env Pendulum --compare`, or with
`--env fast --normalize obs`; `--help` lists all.
"""

import argparse
import dataclasses
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nnx_norm.examples.options import VARIANTS, parser

if TYPE_CHECKING:
    from nnx_norm.examples.checkpoints import Checkpoints
    from nnx_norm.examples.training import Settings

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
    except Exception:
        if options.coordinator is None:
            raise
        # The others wait for us, and at an orderly exit we would wait for them.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(f"ppo: {message}", file=sys.stderr)
    return 2


def run(options: argparse.Namespace) -> int:
    """Trains what the options ask for and reports it."""
    from nnx_norm.examples import catalogue, devices, report
    from nnx_norm.examples.checkpoints import Unusable
    from nnx_norm.examples.progress import Progress
    from nnx_norm.examples.training import Interrupted, train

    hosts = options.coordinator, options.processes, options.process
    try:
        mesh = devices.start(options.devices, *hosts)
        saves = open_checkpoints(options)
        options.out.mkdir(parents=True, exist_ok=True)
        settings = decide_settings(options, saves)
        environment = catalogue.make(settings.env, settings.scale)
        devices.refuse_uneven(mesh, settings.hyper("").environments)
    except (catalogue.Unavailable, devices.NotEnough, Unusable, OSError) as error:
        raise Refused(str(error)) from None
    steps = settings.hyper("").steps_per_iteration * settings.seeds
    progress = Progress(steps, sys.stderr if devices.is_first() else io.StringIO())
    every = options.checkpoint_every or 10
    try:
        histories, seconds = train(settings, environment, progress, saves, every, mesh)
    except Interrupted:
        print(farewell(options), file=sys.stderr)
        return 130
    finally:
        progress.finished()

    if not devices.is_first():
        return 0
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


if __name__ == "__main__":
    sys.exit(main())
