# SPDX-License-Identifier: Apache-2.0
"""What came out: a table, a picture of the learning curves, all numbers as JSON."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nnx_norm.examples.environments import Environment
from nnx_norm.examples.learner import Hyperparameters
from nnx_norm.examples.training import History, Settings

# Okabe and Ito's colours, told apart by every kind of eye; lines differ as well.
STYLES = {
    "none": ("#000000", ":"),
    "obs": ("#E69F00", "-."),
    "reward": ("#56B4E9", "--"),
    "obs+reward": ("#0072B2", "-"),
}
STATISTIC = "#009E73"
FEATURES_SHOWN = 6
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.titlesize": 10,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def final_returns(history: History) -> np.ndarray:
    """Each seed's return at the end: a mean over its environments' last episodes."""
    return history["return"][-1].astype(np.float64)


def has_diverged(history: History) -> bool:
    """Whether some seed's losses were not finite at the end."""
    return not np.isfinite(history.get("policy_loss", np.zeros(1))[-1]).all()


def table(
    settings: Settings, environment: Environment, histories: Mapping[str, History]
) -> str:
    """Median, least and greatest return over the seeds, for each variant."""
    width = max(len("normalize"), *map(len, histories))
    rows = [
        title(settings, environment),
        "",
        f"{'normalize':{width}}  {'median':>9}  {'min':>9}  {'max':>9}",
    ]
    for variant, history in histories.items():
        final = final_returns(history)
        numbers = [np.median(final), np.min(final), np.max(final)]
        rows.append("  ".join([f"{variant:{width}}", *(f"{x:9.1f}" for x in numbers)]))
    diverged = [variant for variant in histories if has_diverged(histories[variant])]
    if diverged:
        rows.append(f"diverged, losses are not finite: {', '.join(diverged)}")
    unfinished = [variant for variant in histories if variant not in diverged]
    if any(np.isnan(final_returns(histories[v])).any() for v in unfinished):
        rows.append("nan: some environment has not finished an episode yet")
    for variant, history in histories.items():
        if "skipped" in history and np.any(history["skipped"][-1]):
            skipped = np.max(history["skipped"][-1])
            rows.append(f"{variant}: {skipped:.0f} observations were not finite")
    return "\n".join(rows)


def file_name(settings: Settings, environment: Environment) -> str:
    """Of the picture and the JSON, without its ending."""
    return environment.name + ("-scaled" if settings.scale else "")


def title(settings: Settings, environment: Environment) -> str:
    """What was trained, for how long, how often."""
    steps = steps_so_far(settings)[-1]
    seeds = "1 seed" if settings.seeds == 1 else f"{settings.seeds} seeds"
    scale = ""
    if settings.scale:
        scale = " x (" + ", ".join(f"{factor:g}" for factor in settings.scale) + ")"
    return f"PPO on {environment.name}{scale}, {steps:,} steps, {seeds}"


def numbers(
    settings: Settings,
    environment: Environment,
    histories: Mapping[str, History],
    seconds: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Everything measured, ready for JSON. Only `seconds` differs between reruns."""
    hyper = dataclasses.asdict(settings.hyper(""))
    del hyper["normalize"]  # each variant's own
    return {
        "settings": dataclasses.asdict(settings),
        "hyperparameters": hyper,
        "features": environment.features,
        "steps": steps_so_far(settings).tolist(),
        "variants": {
            variant: {
                "final": plain(final_returns(history)),
                "median": plain(np.median(final_returns(history))),
                "min": plain(np.min(final_returns(history))),
                "max": plain(np.max(final_returns(history))),
                "history": {name: plain(values) for name, values in history.items()},
            }
            for variant, history in histories.items()
        },
        "seconds": dict(seconds),
    }


def plain(values: Any) -> Any:
    """Nested lists of floats, None for what is not finite: JSON knows no NaN."""
    values = np.asarray(values, np.float64)
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return plain.tolist()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that is either the old one or the new one, never half of it."""
    beside = path.with_suffix(".json.part")
    beside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(beside, path)


def write_picture(
    path: Path,
    settings: Settings,
    environment: Environment,
    histories: Mapping[str, History],
) -> None:
    """Learning curves, and beside them the normalizer at work."""
    with matplotlib.rc_context(RC):
        draw(settings, environment, histories).savefig(path, dpi=130)


def draw(
    settings: Settings, environment: Environment, histories: Mapping[str, History]
) -> Figure:
    """The figure of `write_picture`."""
    observed = [variant for variant in histories if "mean" in histories[variant]]
    rewarded = [variant for variant in histories if "reward_std" in histories[variant]]
    features = environment.features[:FEATURES_SHOWN] if observed else ()
    columns = 2 if len(features) in (2, 4) else 3
    rows = -(-len(features) // columns)
    # No pyplot: a figure alone needs no display and touches no global state.
    figure = Figure(figsize=(11, 4.2 + 2.1 * rows), layout="constrained")
    figure.suptitle(title(settings, environment), fontsize=13)
    grid = figure.add_gridspec(2 + rows, 6)

    aside = bool(observed) + bool(rewarded)
    returns = figure.add_subplot(grid[:2, : 4 if aside else 6])
    draw_returns(returns, settings, histories)
    beside = [
        figure.add_subplot(grid[2 * i // aside : 2 * (i + 1) // aside, 4:])
        for i in range(aside)
    ]
    if observed:
        draw_drift(beside[0], settings, {v: histories[v] for v in observed})
    if rewarded:
        draw_reward_std(beside[-1], settings, {v: histories[v] for v in rewarded})
    for i, name in enumerate(features):
        row, column = divmod(i, columns)
        width = 6 // columns
        place = grid[2 + row, width * column : width * (column + 1)]
        axes = figure.add_subplot(place)
        draw_feature(axes, settings, observed[-1], histories[observed[-1]], i, name)
    return figure


def draw_returns(
    axes: Axes, settings: Settings, histories: Mapping[str, History]
) -> None:
    """Median over the seeds as a line, the whole range as a band."""
    for variant, history in histories.items():
        # Until every environment of every seed has finished an episode only the
        # early finishers would show; those rows hold NaN and are not drawn.
        values = history["return"]
        final = np.median(values[-1])
        end = "no result yet" if np.isnan(final) else f"{final:.1f}"
        draw_seeds(axes, settings, variant, values, f"{variant} → {end}")
    axes.set_title("last completed episodes: median and range of the seeds", pad=26)
    axes.set_ylabel("return")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)


def draw_drift(
    axes: Axes, settings: Settings, histories: Mapping[str, History]
) -> None:
    """How far each update moves the mean."""
    for variant, history in histories.items():
        drift = history["drift"].copy()
        drift[0] = np.nan  # the first update moves it from nowhere
        draw_seeds(axes, settings, variant, drift, variant)
    if any(np.any(history["drift"][1:] > 0) for history in histories.values()):
        axes.set_yscale("log")  # of one update alone there is nothing to show
    axes.set_title("drift of the observations' mean")
    axes.set_ylabel("std per update")
    axes.legend()


def draw_reward_std(
    axes: Axes, settings: Settings, histories: Mapping[str, History]
) -> None:
    """What rewards are divided by."""
    for variant, history in histories.items():
        draw_seeds(axes, settings, variant, history["reward_std"], variant)
    axes.set_title("std of the running return")
    axes.set_ylabel("rewards are divided by")
    axes.set_ylim(bottom=0)
    axes.legend()


def draw_feature(
    axes: Axes, settings: Settings, variant: str, history: History, i: int, name: str
) -> None:
    """One feature's mean as a line and one standard deviation around it."""
    mean = np.median(history["mean"][..., i], axis=1)
    std = np.median(history["std"][..., i], axis=1)
    x, unit = steps_axis(settings)
    axes.plot(x, mean, color=STATISTIC, label="mean")
    axes.fill_between(
        x, mean - std, mean + std, color=STATISTIC, alpha=0.2, lw=0, label="± std"
    )
    axes.set_title(f"{name} ({variant})")
    axes.set_xlabel(unit)
    axes.set_xlim(0, x[-1])
    if i == 0:
        axes.legend(loc="lower right")


def draw_seeds(
    axes: Axes, settings: Settings, variant: str, values: np.ndarray, label: str
) -> None:
    """Median and range of `[iterations, seeds]` over the seeds."""
    color, line = STYLES[variant]
    x, unit = steps_axis(settings)
    low, high = np.min(values, axis=1), np.max(values, axis=1)
    axes.plot(x, np.median(values, axis=1), line, color=color, lw=1.8, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0)
    axes.set_xlabel(unit)
    axes.set_xlim(0, x[-1])


def steps_axis(settings: Settings) -> tuple[np.ndarray, str]:
    """`steps_so_far` in a handy unit, and its name."""
    steps = steps_so_far(settings)
    if steps[-1] >= 2_000_000:
        return steps / 1e6, "environment steps (millions)"
    return steps / 1e3, "environment steps (thousands)"


def steps_so_far(settings: Settings) -> np.ndarray:
    """Environment steps of each seed at the end of each iteration."""
    per_iteration = Hyperparameters().steps_per_iteration
    return per_iteration * np.arange(1, settings.iterations + 1)
