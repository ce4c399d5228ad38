# SPDX-License-Identifier: Apache-2.0
"""Statistics of nnx-ppo, Brax, Acme and Flax's BatchNorm, in and out."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nnx_norm import imported, moved, sources
from nnx_norm.conventions import ADDED_TO_VARIANCE, FLOORED
from nnx_norm.imported import Module
from nnx_norm.moved import Moved, exported, field, float64, number, optional

PyTree = Any

SMALLEST_STD = 1e-6
"""`std_min_value`, the default of Brax and Acme."""


def from_nnx_ppo(source: Any, *, into: Module | None = None) -> Any:
    """The statistics of nnx-ppo's `Normalizer`, to normalize as it does.

    Its formula is ours, its epsilon a floor of the variance, too. Its float32 counter
    stands still at 2**24, where the samples that it lost are lost.

    Args:
      source: An `nnx_ppo` `Normalizer`, or its state as a mapping.
      into: A module to fill in place, of which the settings stay: a `Normalizer` or a
        `RunningMeanStd`. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`.

    Example:
      >>> saved = {"mean": np.ones(1), "M2": np.full(1, 40.0), "counter": 10.0}
      >>> from_nnx_ppo(saved).normalize(np.float32([5.0])).tolist()
      [2.0]
    """
    sources.expect(source, "from_nnx_ppo")
    count = number(field(source, "counter"))
    epsilon = number(optional(source, "epsilon", 1e-6))
    M2 = float64(field(source, "M2"))
    variance = jax.tree.map(lambda s: s / max(count, 1e-30), M2)
    found = moved.moved(field(source, "mean"), variance, count, FLOORED, epsilon)
    if count == 0:
        std = jax.tree.map(lambda v: np.full(v.shape, imported.INITIAL_STD), M2)
        found = found._replace(std=std)
    return imported.normalizer(found, into, epsilon)


def to_nnx_ppo(module: Any) -> dict[str, Any]:
    """The Variables of nnx-ppo's `Normalizer`, for `nnx.update(theirs, ...)`.

    Its epsilon is 1e-6 and it divides by 10 before any sample; clip, residuals and the
    rest stay behind.

    Args:
      module: A `Normalizer` or a `RunningMeanStd`.

    Returns:
      `mean`, `M2` and `counter`, float32.

    Raises:
      ValueError: The module divides by less than 1e-3.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_nnx_ppo(norm)["M2"].tolist()
      [40.0]
    """
    out = exported(module)
    if out.count == 0:
        M2 = jax.tree.map(np.zeros_like, out.mean)
    else:
        variance = moved.variance_for(out, FLOORED, 1e-6)
        M2 = jax.tree.map(lambda v: v * out.count, variance)
    return _float32({"mean": out.mean, "M2": M2, "counter": out.count})


def from_brax(
    source: Any, *, clip: float | None = None, into: Module | None = None
) -> Any:
    """The statistics of Brax's `RunningStatisticsState`, to normalize as it does.

    It divides by its `std`, which has its bounds and `std_eps` in it. Where they show,
    they are folded into the variance and fade as samples come. In the mode "ema" the
    variance is another estimate of the same; folding goes on as in "welford". What it
    passes through, integers, is normalized here: `exclude` it in `into`.

    Args:
      source: A `RunningStatisticsState`, `params[0]` of what training returns, or what
        a checkpoint has of it, as a mapping.
      clip: The `max_abs_value` that its `normalize` is called with.
      into: As in `from_nnx_ppo`; its own clip stays. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`.

    Example:
      >>> saved = {
      ...     "mean": np.ones(1), "std": np.full(1, 2.0), "count": {"hi": 1, "lo": 4},
      ...     "summed_variance": np.full(1, 4.0 * (2**32 + 4)),
      ... }
      >>> norm = from_brax(saved)
      >>> norm.count, norm.normalize(np.float32([5.0])).tolist()
      (4294967300, [2.0])
    """
    return _of_brax(source, "from_brax", clip, into)


def _of_brax(source: Any, importer: str, clip: Any, into: Module | None) -> Any:
    sources.expect(source, importer)
    count = _count(field(source, "count"))
    summed = float64(field(source, "summed_variance"))
    n = max(count, 1e-30) if number(optional(source, "mode", 0)) != 1 else 1.0
    mean, std = float64(field(source, "mean")), float64(field(source, "std"))
    variance = moved.not_negative(jax.tree.map(lambda s: s / n, summed), mean)
    found = Moved(mean, variance, std, count)
    return imported.normalizer(found, into, SMALLEST_STD**2, clip=clip)


def to_brax(module: Any) -> dict[str, Any]:
    """The fields of a Brax `RunningStatisticsState` that normalizes as a module does.

    `RunningStatisticsState(**fields | {"count": UInt64(**fields["count"])})` makes one.
    Its next update finds `std` anew, without our epsilon. Fractions of the count are
    rounded; the clip is an argument of its `normalize`.

    Args:
      module: A `Normalizer` or a `RunningMeanStd`.

    Returns:
      `mean`, `std` and `summed_variance`, float32, `count` as a dict of `hi` and `lo`,
      `std_eps` and `mode`.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=2**32 + 4)
      >>> fields = to_brax(norm)
      >>> fields["std"].tolist(), int(fields["count"]["hi"]), int(fields["count"]["lo"])
      ([2.0], 1, 4)
    """
    hi, lo = divmod(int(np.rint(exported(module).count)), 2**32)
    count = {"hi": np.uint32(hi), "lo": np.uint32(lo)}
    return to_acme(module) | {"count": count, "std_eps": 0.0, "mode": 0}


def from_acme(
    source: Any, *, clip: float | None = None, into: Module | None = None
) -> Any:
    """The statistics of Acme's `RunningStatisticsState`, to normalize as it does.

    Brax's have come from there: see `from_brax`. Leaves that its config leaves out have
    the mean 0 and the divisor 1; here they are folded unless they are excluded.

    Args:
      source: A `RunningStatisticsState`, or a mapping of its fields.
      clip: The `max_abs_value` that its `normalize` is called with.
      into: As in `from_brax`. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`.

    Example:
      >>> saved = {
      ...     "mean": np.ones(1), "std": np.full(1, 2.0), "count": 10.0,
      ...     "summed_variance": np.full(1, 40.0),
      ... }
      >>> from_acme(saved, clip=1.5).normalize(np.float32([5.0])).tolist()
      [1.5]
    """
    return _of_brax(source, "from_acme", clip, into)


def to_acme(module: Any) -> dict[str, Any]:
    """The fields of an Acme `RunningStatisticsState`; see `to_brax`.

    Args:
      module: A `Normalizer` or a `RunningMeanStd`.

    Returns:
      `mean`, `std` and `summed_variance`, float32, and `count`, a float.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_acme(norm)["summed_variance"].tolist(), to_acme(norm)["count"]
      ([40.0], 10.0)
    """
    out = exported(module)
    summed = jax.tree.map(lambda v: v * out.count, out.variance)
    fields = {"mean": out.mean, "std": out.std, "summed_variance": summed}
    return _float32(fields) | {"count": float(out.count)}


def from_flax_batch_norm(
    source: Any,
    *,
    count: float,
    epsilon: float = 1e-5,
    into: Module | None = None,
) -> Any:
    """The running statistics of Flax's `BatchNorm`, to normalize as it does.

    It divides by `√(variance + ε)`; see `from_gymnasium` for what becomes of
    epsilon. Its statistics are exponential averages without a count: say for how many
    samples they shall stand when folding goes on, or freeze the module. The learned
    scale and bias stay behind.

    Args:
      source: An `nnx.BatchNorm`; or a mapping with `mean` and `var`, as the collection
        `batch_stats` of a linen module has one.
      count: Number of samples, at least 1.
      epsilon: That of the layer, where `source` is none.
      into: As in `from_nnx_ppo`. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, they don't fit `into`, or the
        layer's scale or bias has been trained: hand over `{"mean": ..., "var": ...}`
        and keep them as a layer of their own.

    Example:
      >>> stats = {"mean": np.ones(1), "var": np.full(1, 4.0)}
      >>> from_flax_batch_norm(stats, count=100, epsilon=0.0).count
      100
    """
    sources.expect(source, "from_flax_batch_norm")
    for name, neutral in (("scale", 1.0), ("bias", 0.0)):
        learned = optional(source, name)
        if learned is not None and np.any(float64(learned) != neutral):
            raise ValueError(
                f"The {name} of the BatchNorm is learned, and no statistic: pass "
                'its statistics alone, {"mean": norm.mean, "var": norm.var}, and keep '
                "scale and bias as a layer behind the normalizer."
            )
    epsilon = number(optional(source, "epsilon", epsilon))
    parts = field(source, "mean"), field(source, "var"), count
    found = moved.moved(*parts, ADDED_TO_VARIANCE, epsilon)
    return imported.normalizer(found, into, max(epsilon, imported.SMALLEST))


def to_flax_batch_norm(module: Any, *, epsilon: float = 1e-5) -> dict[str, Any]:
    """The running statistics of a Flax `BatchNorm` that normalizes as a module does.

    For `batch_stats` of linen, or `nnx.update(batch_norm, ...)`. Without the count.

    Args:
      module: A `Normalizer` or a `RunningMeanStd`.
      epsilon: The layer's.

    Returns:
      `mean` and `var`, float32.

    Raises:
      ValueError: The module divides by less than epsilon admits.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_flax_batch_norm(norm, epsilon=1.0)["var"].tolist()
      [3.0]
    """
    out = exported(module)
    var = moved.variance_for(out, ADDED_TO_VARIANCE, epsilon)
    return _float32({"mean": out.mean, "var": var})


def _count(count: Any) -> float:
    """A count, perhaps as the two halves of an unsigned 64-bit integer."""
    hi, lo = optional(count, "hi"), optional(count, "lo")
    if hi is None or lo is None:
        return number(count)
    return number(hi) * 2.0**32 + number(lo)


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)
