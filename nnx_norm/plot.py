# SPDX-License-Identifier: Apache-2.0
"""Pictures of normalizers over a training run; needs matplotlib (`nnx-norm[plot]`)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from nnx_norm import concrete
from nnx_norm.inspection import features, normalizers

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "nnx_norm.plot needs matplotlib: pip install 'nnx-norm[plot]'", name=error.name
    ) from error

# Okabe and Ito's colours, told apart by every kind of eye.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.titlesize": 10,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Point(NamedTuple):
    """One leaf at one moment.

    Attributes:
      step: When, in the caller's unit.
      mean: float array `[features]`.
      std: What each is divided by, the same shape.
      clipped: Share of the inputs beyond the clip, or NaN.
    """

    step: float
    mean: np.ndarray
    std: np.ndarray
    clipped: float


class Recorder:
    """Keeps the statistics of every normalizer in a model, to draw them later.

    Attributes:
      points: What was recorded, a list for each leaf by its path.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm import Normalizer
      >>> norm, recorder = Normalizer(2), Recorder()
      >>> for step in range(3):
      ...     norm.update_statistics(jnp.array([[[0.0, step], [2.0, step]]]))
      ...     recorder.add(norm, step)
      >>> recorder.points["Normalizer"][-1].mean.tolist()
      [1.0, 1.0]
      >>> figure = recorder.figure()  # figure.savefig("normalizers.png")
      >>> len(figure.axes)
      3
    """

    def __init__(self) -> None:
        self.points: dict[str, list[Point]] = {}

    def add(self, module: nnx.Module, step: float, *, extras: Any = None) -> None:
        """Record the statistics of now; on the host, usually after an update.

        Args:
          module: Any module with normalizers in it; the same one every time.
          step: When, in any unit: updates or environment steps.
          extras: As in `metrics`: gives the share of inputs beyond the clip.

        Raises:
          ValueError: `extras` don't fit, this is inside jit, or a leaf has another
            number of features than before; nothing has been recorded then.
        """
        new: dict[str, Point] = {}
        for one in normalizers(module).values():
            concrete.refuse_traced(one.mean.get_value(), "Recorder.add")
        for feature in features(module, extras=extras):
            arrays = feature.mean, feature.std, feature.clipped
            mean, std, clipped = jax.device_get(arrays)
            share = np.nan if clipped is None else float(clipped)
            point = Point(float(step), np.ravel(mean), np.ravel(std), share)
            path = feature.path or type(feature.module).__name__
            before = self.points.get(path, [point])[-1].mean
            if before.shape != point.mean.shape:
                raise ValueError(
                    f"{path} has {point.mean.size} features, and had {before.size} at "
                    "the point before: take a new Recorder for another model."
                )
            new[path] = point
        for path, point in new.items():
            self.points.setdefault(path, []).append(point)

    def figure(
        self,
        *,
        unit: str = "step",
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> Figure:
        """Draw mean, standard deviation, drift and clip share over training.

        A row for each leaf. Up to six features are drawn one by one, the mean with a
        band of one standard deviation; of more the median and the range.

        Args:
          unit: What `step` counts, for the axis.
          names: Names of the features, all of them, by path of the leaf.

        Returns:
          A figure of its own (no pyplot), for `savefig` or a notebook.

        Raises:
          ValueError: Nothing was recorded, or names are of no leaf that was, or not as
            many as its features.
        """
        if not self.points:
            raise ValueError("Nothing to draw: call add after an update first.")
        for path, labels in (names or {}).items():
            if path not in self.points:
                raise ValueError(
                    f"names has {path!r}; expected paths of leaves: {[*self.points]}."
                )
            size = self.points[path][-1].mean.size
            if isinstance(labels, str) or len(labels) != size:
                raise ValueError(
                    f"names[{path!r}] is {labels!r}; expected a list of {size} names."
                )
        rows = len(self.points)
        with rc_context(STYLE):
            figure = Figure(figsize=(12, 0.6 + 2.6 * rows), layout="constrained")
            grid = figure.subplots(rows, 3, squeeze=False, sharex="col")
            for axes, (path, points) in zip(grid, self.points.items(), strict=True):
                labels = (names or {}).get(path)
                _draw_mean(axes[0], points, path, labels)
                _draw_std(axes[1], points)
                _draw_movement(axes[2], points)
            for axes in grid[-1]:
                axes.set_xlabel(unit)
        return figure


def _draw_mean(
    axes: Axes, points: list[Point], path: str, labels: Sequence[str] | None
) -> None:
    x, mean, std = _over_time(points)
    if mean.shape[1] <= len(COLOURS):
        names = labels or [f"feature {i}" for i in range(mean.shape[1])]
        for i, (color, name) in enumerate(zip(COLOURS, names, strict=False)):
            low, high = mean[:, i] - std[:, i], mean[:, i] + std[:, i]
            axes.plot(x, mean[:, i], color=color, label=name)
            axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
        if mean.shape[1] > 1 or labels:
            axes.legend(fontsize=7, frameon=False)
        axes.set_title(f"{path}: mean ± std")
    else:
        _draw_range(axes, x, mean)
        axes.set_title(f"{path}: mean of {mean.shape[1]} features")


def _draw_std(axes: Axes, points: list[Point]) -> None:
    x, _, std = _over_time(points)
    if std.shape[1] <= len(COLOURS):
        for color, column in zip(COLOURS, std.T, strict=False):
            axes.plot(x, column, color=color)
    else:
        _draw_range(axes, x, std)
    _scale(axes, std)
    axes.set_title("std")


def _draw_range(axes: Axes, x: np.ndarray, values: np.ndarray) -> None:
    """Median as a line, half of the features in one band and all in another."""
    levels = np.nanpercentile(values, [0, 25, 50, 75, 100], axis=1)
    for low, high, name in ((0, 4, "all"), (1, 3, "half")):
        axes.fill_between(
            x, levels[low], levels[high], color=COLOURS[0], alpha=0.2, lw=0, label=name
        )
    axes.plot(x, levels[2], color=COLOURS[0], label="median")
    axes.legend(fontsize=7, frameon=False)


def _draw_movement(axes: Axes, points: list[Point]) -> None:
    """The largest movement of a mean since the point before, and what was clipped."""
    x, mean, std = _over_time(points)
    drift = np.max(np.abs(np.diff(mean, axis=0)) / std[1:], axis=1, initial=0)
    if log := _scale(axes, drift):
        drift = np.where(drift > 0, drift, np.nan)  # none at all is off a log scale
    axes.plot(x[1:], drift, color=COLOURS[0], label="drift, in std")
    if not log:
        axes.set_ylim(*_from_zero(drift))
    axes.set_ylabel("drift, in std", color=COLOURS[0])
    axes.set_title("drift since the point before")
    clipped = np.array([point.clipped for point in points])
    if np.isfinite(clipped).any():
        share = axes.twinx()
        share.plot(x, 100 * clipped, color=COLOURS[5], ls="--", label="clipped, %")
        share.set_ylim(*_from_zero(clipped))
        share.set_ylabel("clipped, % (dashed)", color=COLOURS[5])
        share.grid(False)
        share.spines["right"].set_visible(True)
        axes.set_title("drift since the point before; share clipped")


def _scale(axes: Axes, values: np.ndarray) -> bool:
    """A logarithmic axis where values differ by much, with numbers as one says them.

    Returns:
      Whether it is one. A linear axis tells more of less, and shows a zero.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    spread = positive.max() / positive.min() if positive.size else 1.0
    if spread < 3:
        axes.ticklabel_format(axis="y", useOffset=False)
        return False
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if spread < 100 else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    return True


def _from_zero(values: np.ndarray) -> tuple[float, float | None]:
    """Limits of an axis from zero up; of nothing but zeros, with a line to be seen."""
    return (0.0, None) if np.any(values > 0) else (-0.05, 1.0)


def _over_time(points: list[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps `[n]`, means and stds `[n, features]`."""
    x = np.array([point.step for point in points])
    return x, np.stack([p.mean for p in points]), np.stack([p.std for p in points])
