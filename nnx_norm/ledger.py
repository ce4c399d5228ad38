# SPDX-License-Identifier: Apache-2.0
"""The learner's book of increments: merges each of them once, see `increments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_norm import arguments
from nnx_norm.fold import Statistics
from nnx_norm.inspection import normalizers
from nnx_norm.signature import OfConstructor
from nnx_norm.statistics import RunningStatistics
from nnx_norm.storage import NormalizerStatistics
from nnx_norm.transfer import placed_like
from nnx_norm.tree import is_mapping

INCREMENT = {"worker", "number", "after", "statistics"}
STATISTICS = {"mean", "M2", "count", "skipped"}
Normalizers = Mapping[str, RunningStatistics]


class MergedNumbers(NormalizerStatistics):
    """Variable type of a ledger's numbers: found wherever statistics are.

    Example:
      >>> from nnx_norm import Normalizer
      >>> ledger = Ledger(Normalizer(1), workers=2)
      >>> nnx.state(ledger, MergedNumbers)["merged"].get_value().tolist()
      [[0.0, 0.0], [0.0, 0.0]]
    """


class Ledger(nnx.Module):
    """The learner's side: merges every increment once.

    A module, so that a checkpoint of it has statistics and numbers of the same moment.

    Attributes:
      model: The learner's normalizer or module of normalizers, itself.
      merged: float32 `[workers, 2]`: number of the last increment of every worker, and
        what float32 can't hold of it; see `last`.

    Example:
      >>> from nnx_norm import Normalizer
      >>> from nnx_norm.increments import Collector
      >>> ledger = Ledger(Normalizer(1), workers=1)
      >>> collector = Collector(ledger.model, worker=0)
      >>> collector.seen.update_statistics(jnp.array([[1.0], [3.0]]))
      >>> increment = collector.take()
      >>> ledger.merge(increment), ledger.merge(increment), ledger.model.count
      (True, False, 2)
    """

    __signature__ = OfConstructor()

    def __init__(self, model: nnx.Module, workers: int) -> None:
        """Start with no increment merged.

        Args:
          model: The learner's normalizer, or a module with normalizers in it.
          workers: Number of workers.

        Raises:
          TypeError: `workers` is no int.
          ValueError: There is no normalizer in `model`, or `workers` is negative.
        """
        workers = arguments.size(workers, "workers")
        normalizers_in(model)
        self.model: Any = model
        self.merged = MergedNumbers(jnp.zeros((workers, 2), jnp.float32))

    def last(self, worker: int) -> int:
        """Number of the last increment of a worker that was merged, 0 for none.

        Args:
          worker: Its index.

        Raises:
          ValueError: There is no such worker.
        """
        number, rest = np.asarray(self.merged.get_value())[self._index(worker)]
        return int(number) + int(rest)

    def merge(self, increment: Mapping[str, Any]) -> bool:
        """Merge an increment, outside jit, unless it has been merged.

        All or nothing: one that doesn't fit changes nothing. While a normalizer is
        frozen or has reached its `max_count`, the samples are dropped, as in an update.

        Args:
          increment: What `Collector.take` gave, or what JSON made of it.

        Returns:
          Whether it was merged now. If not, it had been, or comes ahead of one that is
          missing; `last` tells, and the worker sends again what is after that.

        Raises:
          TypeError: It is no increment.
          ValueError: Its worker is unknown, or its statistics don't fit.
        """
        if not is_mapping(increment) or not INCREMENT <= set(increment.keys()):
            raise TypeError(
                f"merge got {increment!r:.80}; expected what Collector.take gave."
            )
        worker = increment["worker"]
        number, after = (
            arguments.size(increment[key], key) for key in ("number", "after")
        )
        if not after <= self.last(worker) < number:
            return False
        norms = normalizers_in(self.model)
        for path, statistics in parsed(norms, increment["statistics"]).items():
            norms[path]._merge(statistics)
        self._write({worker: number})
        return True

    def to_dict(self) -> dict[str, Any]:
        """Statistics and numbers of the same moment, for JSON or pickle."""
        norms = normalizers_in(self.model).items()
        numbers = range(self.merged.get_value().shape[0])
        return {
            "merged": [self.last(worker) for worker in numbers],
            "statistics": {path: listed(norm) for path, norm in norms},
        }

    def load_dict(self, d: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave.

        Args:
          d: Its result, or what JSON made of it.

        Raises:
          TypeError: It is something else.
          ValueError: It doesn't fit; nothing has changed then.
        """
        refuse_other_dict(d, {"merged", "statistics"}, "Ledger")
        workers = self.merged.get_value().shape[0]
        if len(d["merged"]) != workers:
            raise ValueError(
                f"load_dict got {len(d['merged'])} workers; expected {workers}."
            )
        numbers = [arguments.size(number, "merged") for number in d["merged"]]
        store(normalizers_in(self.model), d["statistics"])
        self._write(dict(enumerate(numbers)))

    def _index(self, worker: Any) -> int:
        workers = self.merged.get_value().shape[0]
        if arguments.size(worker, "worker") >= workers:
            raise ValueError(f"worker is {worker}; expected one below {workers}.")
        return int(worker)

    def _write(self, numbers: Mapping[int, int]) -> None:
        old = self.merged.get_value()
        new = np.array(old)
        for worker, number in numbers.items():
            value = int(np.float32(number))
            new[worker] = value, number - value
        self.merged.set_value(placed_like(jnp.asarray(new), old))


def refuse_other_dict(d: Any, keys: set[str], name: str) -> None:
    """Raise for what `to_dict` of a class didn't give.

    Args:
      d: What was passed.
      keys: Keys that it must have.
      name: Name of the class.

    Raises:
      TypeError: It is no mapping, or lacks a key.
    """
    missing = keys - set(d.keys()) if is_mapping(d) else keys
    if missing:
        raise TypeError(
            f"load_dict got {d!r:.80} without {sorted(missing)}; expected what "
            f"{name}.to_dict gave."
        )


def normalizers_in(model: nnx.Module) -> dict[str, RunningStatistics]:
    """The normalizers of a module by their paths; one that is shared comes once.

    Args:
      model: A normalizer, or a module with some.

    Returns:
      Normalizers by names such as `layers/0`, the empty one for `model` itself.

    Raises:
      ValueError: There is none.
    """
    every = normalizers(model).items()
    found = {path: m for path, m in every if isinstance(m, RunningStatistics)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no Normalizer or RewardNormalizer in it."
        )
    return found


def listed(norm: RunningStatistics) -> dict[str, Any]:
    """The statistics of a normalizer as numbers and lists, `to_dict(flat=True)`'s."""
    return {
        key: np.asarray(value).tolist()
        for key, value in norm.to_dict(flat=True).items()
        if key.split("/")[0] in STATISTICS
    }


def parsed(norms: Normalizers, given: Mapping[str, Any]) -> dict[str, Statistics]:
    """Statistics in float64 that fit each of the normalizers.

    Args:
      norms: Normalizers by path.
      given: What `listed` gave for each.

    Raises:
      ValueError: A path or a leaf is missing or too many, or something doesn't fit.
    """
    if norms.keys() != set(given):
        raise ValueError(
            f"got statistics for {sorted(given)}; expected them for {sorted(norms)}: "
            "worker and learner need the same model."
        )
    found = {path: norm._statistics_of(given[path]) for path, norm in norms.items()}
    for path, s in found.items():
        arguments.refuse_torn(norms[path].spec, *s.moments)
    return found


def store(norms: Normalizers, given: Mapping[str, Any]) -> None:
    """Write what `listed` gave for each normalizer; all of it or nothing."""
    for path, statistics in parsed(norms, given).items():
        norms[path]._store64(statistics)
