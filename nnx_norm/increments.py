# SPDX-License-Identifier: Apache-2.0
"""Actors and a learner: workers send what they have added, never their totals.

Each worker normalizes with a copy of the learner's statistics, and folds what it sees
into the empty normalizers of a `Collector`. `take` gives those as a plain dict with the
worker's index and a running number, an *increment*, and empties them. The learner
merges increments through a `Ledger`, which knows the last one of every worker: one that
comes twice is refused, and one ahead of a missing one waits.

    worker                                          learner
    collector.seen.update_statistics(extras)
    collector.take()
    send all of collector.pending               ->  ledger.merge(increment)
    collector.acknowledge(number)               <-  ledger.last(worker), once saved

So no history is counted twice, and none is lost, whoever stops:

- The learner saves the ledger, statistics and numbers together: its `nnx.state`, or
  `to_dict`. It answers with numbers that are *saved*. Resumed from an older save it
  gets the increments after that again: they are still pending at the workers.
- A worker that goes on from an older save of its own (`to_dict`, or pickled), or anew,
  first calls `collector.catch_up(ledger.last(worker))`: what the learner has of it
  since then is not sent again, and numbers go on behind. A worker that replays the very
  same history up to the same increments does without: they are refused. What it had
  seen and not taken when it stopped is gone with it.

Example:
  >>> import numpy as np
  >>> from nnx_norm import Ledger, Normalizer
  >>> learner = Normalizer(1)
  >>> ledger = Ledger(learner, workers=2)
  >>> collectors = [Collector(learner, worker) for worker in range(2)]
  >>> copies = [nnx.clone(learner) for _ in collectors]
  >>> for step in range(3):
  ...     for worker, (norm, collector) in enumerate(zip(copies, collectors)):
  ...         norm.copy_from(learner)  # or load_dict(learner.to_dict()), over a wire
  ...         out = norm((), np.full((10, 1), step + 10.0 * worker))
  ...         collector.seen.update_statistics(out.rollout_extras)
  ...         increment = collector.take()
  ...         merged = [ledger.merge(increment), ledger.merge(increment)]
  ...         collector.acknowledge(ledger.last(worker))
  >>> learner.count, learner.mean.get_value().tolist(), merged
  (60, [6.0], [True, False])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from nnx_norm import arguments
from nnx_norm.ledger import listed, normalizers_in, refuse_other_dict, store
from nnx_norm.processes import local_arrays
from nnx_norm.statistics import RunningStatistics
from nnx_norm.transfer import spans_processes

PARTS = {"worker", "number", "after", "pending", "seen"}


class Collector:
    """A worker's side: what it has seen since the last increment.

    Attributes:
      seen: A copy of the model whose normalizers start empty: fold extras (or rewards)
        here. They never stop and never forget; freezing, `max_count` and `decay` are
        the learner's.
      worker: The worker's index.
      number: Number of the last increment.
      pending: Increments that were taken and not acknowledged, oldest first: send all.

    Example:
      >>> import numpy as np
      >>> from nnx_norm import Normalizer
      >>> collector = Collector(Normalizer(1), worker=3)
      >>> collector.seen.update_statistics(np.array([[1.0], [3.0]]))
      >>> increment = collector.take()
      >>> increment["worker"], increment["number"], increment["statistics"]
      (3, 1, {'': {'mean': [2.0], 'M2': [2.0], 'count': 2, 'skipped': 0}})
      >>> collector.seen.count, len(collector.pending)
      (0, 1)
    """

    def __init__(self, model: nnx.Module, worker: int) -> None:
        """Start with nothing seen.

        Args:
          model: The learner's normalizer, or a module with normalizers in it; it is
            copied and not changed.
          worker: Index of this worker, from 0.

        Raises:
          TypeError: `worker` is no int.
          ValueError: There is no normalizer in `model`, or `worker` is negative.
        """
        self.seen: Any = nnx.clone(model)
        if spans_processes(nnx.state(model)):  # a worker sees what is its own
            nnx.update(self.seen, local_arrays(nnx.state(model)))
        self.worker = arguments.size(worker, "worker")
        self.number = 0
        self.pending: tuple[dict[str, Any], ...] = ()
        self._after = 0  # the increment before the next one, of those that we have
        for norm in normalizers_in(self.seen).values():
            norm.unfreeze()
            for name in {"max_count", "decay"} & set(vars(norm)):
                setattr(norm, name, None)
        self._forget()

    def take(self) -> dict[str, Any]:
        """The increment: what was seen since the last one, which is forgotten here.

        Returns:
          A dict of numbers, strings and lists, that JSON and pickle keep exactly. It
          also joins `pending`.
        """
        norms = normalizers_in(self.seen).items()
        statistics = {path: listed(norm) for path, norm in norms}
        self._forget()
        increment = {
            "worker": self.worker,
            "number": self.number + 1,
            "after": self._after,
            "statistics": statistics,
        }
        self.number = self._after = self.number + 1
        self.pending += (increment,)
        return increment

    def acknowledge(self, number: int) -> None:
        """Drop the pending increments that the learner has saved.

        Args:
          number: That of the last one, `ledger.last(worker)`.

        Raises:
          TypeError: It is no int.
          ValueError: There was no such increment; nothing was dropped.
        """
        if arguments.size(number, "number") > self.number:
            raise ValueError(
                f"number is {number}, and the last increment taken here is "
                f"{self.number}. If this worker goes on from an older save, call "
                f"catch_up({number}) first."
            )
        self.pending = tuple(v for v in self.pending if v["number"] > number)

    def catch_up(self, number: int) -> None:
        """Go on behind a learner that has more of this worker than we know of.

        What is in `seen` then was part of what the learner has, and is forgotten.

        Args:
          number: That of the last one it merged, `ledger.last(worker)`.

        Raises:
          TypeError: It is no int.
          ValueError: It is negative.
        """
        if arguments.size(number, "number") > self.number:
            self.number = int(number)
            self._forget()

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON or pickle, but for the running returns of rewards.

        These belong to the environments; save `nnx.state(collector.seen)` with them.
        """
        norms = normalizers_in(self.seen).items()
        return {
            "worker": self.worker,
            "number": self.number,
            "after": self._after,
            "pending": list(self.pending),
            "seen": {path: listed(norm) for path, norm in norms},
        }

    def load_dict(self, d: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave.

        Args:
          d: Its result, or what JSON made of it.

        Raises:
          TypeError: It is something else.
          ValueError: It is another worker's, or doesn't fit; nothing has changed then.
        """
        refuse_other_dict(d, PARTS, "Collector")
        if d["worker"] != self.worker:
            raise ValueError(
                f"load_dict got worker {d['worker']}; expected {self.worker}."
            )
        number, after = (arguments.size(d[key], key) for key in ("number", "after"))
        store(normalizers_in(self.seen), d["seen"])
        self.number, self._after = number, after
        self.pending = tuple(d["pending"])

    def _forget(self) -> None:
        for norm in normalizers_in(self.seen).values():
            RunningStatistics.reset(norm)  # running returns belong to the environments
