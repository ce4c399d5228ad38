# SPDX-License-Identifier: Apache-2.0
"""How training goes: a bar on a terminal, a few lines anywhere else."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

import numpy as np
from tqdm import tqdm


class Progress:
    """Says what is going on while the variants train, one after the other.

    Args:
      steps_per_iteration: Environment steps of one training step, over all seeds.
      file: Where to write; a bar is drawn only if that is a terminal.
      lines: How many lines each variant gets where it is not.
    """

    def __init__(
        self, steps_per_iteration: int, file: TextIO | None = None, lines: int = 5
    ):
        self._steps = steps_per_iteration
        self._file = sys.stderr if file is None else file
        self._lines = lines
        self._bar: tqdm | None = None

    def compiling(self, variant: str) -> None:
        """The wait before the first step."""
        self._say(f"{variant}: compiling the training step (most of the wait) ...")
        self._compiling_since = time.perf_counter()

    def training(self, variant: str, total: int, done: int) -> None:
        """Compiled; `done` of `total` iterations lie behind already."""
        took = time.perf_counter() - self._compiling_since
        self._say(f"{variant}: compiled and took the first step in {took:.1f} s")
        self._variant, self._total, self._done = variant, total, done
        self._first = done + 1  # its time went into compiling
        self._started = time.perf_counter()
        if self._file.isatty():
            self._bar = tqdm(
                total=total,
                initial=done,
                desc=variant,
                file=self._file,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}% |{bar}| {remaining}{postfix}",
            )

    def advance(self, metrics: Mapping[str, np.ndarray]) -> None:
        """One more iteration, with its metrics of every seed."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(self._describe(metrics), refresh=False)
            self._bar.update()
        elif self._is_milestone():
            share = self._done / self._total
            self._say(f"{self._variant}: {share:4.0%}  {self._describe(metrics)}")

    def finished(self) -> None:
        """The variant is done, or stopped."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _describe(self, metrics: Mapping[str, np.ndarray]) -> str:
        steps = (self._done - self._first) * self._steps
        rate = steps / (time.perf_counter() - self._started)
        median = np.median(metrics["return"])
        # NaN as long as any environment has not finished its first episode.
        parts = ["return -" if np.isnan(median) else f"return {median:.1f}"]
        parts.append(f"{rate / 1000:.0f}k steps/s")
        if "count" in metrics:
            parts.append(f"count {np.median(metrics['count']):.0f}")
            parts.append(f"clipped {np.mean(metrics['clip_share']):.2%}")
        if np.any(metrics.get("skipped", 0)):
            parts.append(f"{np.max(metrics['skipped']):.0f} not finite")
        return ", ".join(parts)

    def _is_milestone(self) -> bool:
        passed = self._done * self._lines // self._total
        return passed > (self._done - 1) * self._lines // self._total

    def _say(self, text: str) -> None:
        print(text, file=self._file, flush=True)
