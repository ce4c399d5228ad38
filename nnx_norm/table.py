# SPDX-License-Identifier: Apache-2.0
"""A table of every normalizer in a model, to read in a terminal or a log."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_norm import concrete
from nnx_norm.inspection import PyTree, features, normalizers, numbers
from nnx_norm.statistics import RunningStatistics

HEADER = ("path", "shape", "count", "skipped", "mean", "std", "dead", "floored")
HEADER += ("nonfinite", "clipped", "drift")


def summary(module: nnx.Module, *, extras: PyTree = None, since: Any = None) -> str:
    """A table of every normalizer in a model, one line for each of its leaves.

    Args:
      module: Any module: a normalizer, a policy graph, a training state. On the host.
      extras: See `metrics`; gives the column `clipped`.
      since: See `metrics`; gives the column `drift`, in standard deviations.

    Returns:
      Lines of text. `mean` and `std` are the least and the greatest over the features;
      `dead`, `floored` and `nonfinite` are numbers of features: never varied, variance
      at most epsilon, not finite. Columns in which nothing stands are left out.

    Raises:
      ValueError: `since` or `extras` don't fit (see `metrics`), or there are no numbers
        yet: inside jit, or of `nnx.eval_shape`.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_norm import Normalizer, Sequential
      >>> model = Sequential([Normalizer(2), jnp.tanh])
      >>> model.update_statistics([jnp.array([[[0.0, 5.0], [4.0, 5.0]]]), None])
      >>> print(summary(model))
      path      shape  count  skipped  mean    std         dead  floored  nonfinite
      layers/0  (2,)   2      0        2 .. 5  0.001 .. 2  1     1        0
    """
    found = normalizers(module)
    for one in found.values():
        concrete.refuse_traced(one.mean.get_value(), "summary")
    lines = [
        _cells(feature) for feature in features(module, extras=extras, since=since)
    ]
    for path, empty in found.items():
        if not jax.tree.leaves(empty.mean.get_value()):
            lines.append(_about(path, empty) | {"shape": "none"})
    if not lines:
        return "no normalizers"
    shown = [name for name in HEADER if any(line[name] for line in lines)]
    table = [shown, *([line[name] for name in shown] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "\n".join(rows)


def _cells(feature: Any) -> dict[str, str]:
    """The text of every column; empty where unknown."""
    number = jax.device_get(numbers(feature))
    cells = _about(feature.path, feature.module) | {
        "shape": str(feature.mean.shape),
        "mean": _range(number["mean_min"], number["mean_max"]),
        "std": _range(number["std_min"], number["std_max"]),
        "clipped": f"{number['clipped']:.2%}" if "clipped" in number else "",
        "drift": f"{number['drift']:.2g}" if "drift" in number else "",
    }
    whole = ("dead", "floored", "nonfinite")
    return cells | {name: f"{number[name]:.0f}" for name in whole}


def _about(path: str, module: Any) -> dict[str, str]:
    """What concerns the whole normalizer."""
    cells = dict.fromkeys(HEADER, "") | {"path": path or type(module).__name__}
    if isinstance(module, RunningStatistics):
        skipped = np.max(module.skipped.get_value())
        count, cells["skipped"] = module.count, _short(skipped)
    else:
        count = module.to_numpy().count
    return cells | {"count": _range(np.min(count), np.max(count))}


def _range(low: Any, high: Any) -> str:
    ends = [_short(low), _short(high)]
    return ends[0] if ends[0] == ends[1] else " .. ".join(ends)


def _short(value: Any) -> str:
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
    return f"{int(value):d}" if whole else f"{value:.4g}"
