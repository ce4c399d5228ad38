# SPDX-License-Identifier: Apache-2.0
"""The runner: contenders side by side, in shuffled order, in one process.

A ratio of two programs that ran minutes apart says more about the machine than about
them. Here every round runs every contender once, in a new random order, and ratios are
taken within the round; what is reported is their median.

A contender is a function without arguments that sets up and returns the call to
measure, itself without arguments. What the call returns is waited for. A contender that
can't import its peer is reported as not installed.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from tqdm import tqdm

Call = Callable[[], Any]
Contender = Callable[[], Call]

SAMPLE_SECONDS = 1e-3  # a shorter call is repeated until a sample takes this long
SLOW_SECONDS = 0.3  # a longer call gets fewer rounds, and its row says how many
SLOW_ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work on the same data.

    Attributes:
      name: What the row or table is about, a shape for example.
      contenders: Name to contender.
      baseline: The contender that ratios are relative to.
      nbytes: Bytes that one call has to read, 0 where bandwidth isn't the bound.
      bounds: Names of those contenders that only read the data.
    """

    name: str
    contenders: dict[str, Contender]
    baseline: str
    nbytes: int = 0
    bounds: Sequence[str] = ()


@dataclass
class Samples:
    """Seconds per call of one contender, a sample per round."""

    call: Call
    first_call: float  # trace, compile and run
    number: int  # calls per sample
    wall: dict[int, float] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)

    def take(self, round_: int) -> None:
        """Run one sample."""
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(self.number):
            jax.block_until_ready(self.call())
        self.wall[round_] = (time.perf_counter() - wall) / self.number
        self.cpu[round_] = (time.process_time() - cpu) / self.number


def prepare(contender: Contender) -> Samples:
    """Set up, compile and warm up; find how many calls make a sample."""
    call = contender()
    start = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - start
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - start
    return Samples(call, first, max(1, min(1000, round(SAMPLE_SECONDS / once))))


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    values = list(values)
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summarize(case: Case, name: str, all_: dict[str, Samples]) -> dict[str, Any]:
    """One row: times, ratios within rounds to the baseline, share of the bound."""
    mine, base = all_[name], all_[case.baseline]
    low, wall, high = quartiles(mine.wall.values())
    common = mine.wall.keys() & base.wall.keys()
    speed = quartiles(base.wall[r] / mine.wall[r] for r in common)
    row = {
        "contender": name,
        "rounds": len(mine.wall),
        "wall_ms": wall * 1e3,
        "wall_ms_quartiles": [low * 1e3, high * 1e3],
        "cpu_ms": quartiles(mine.cpu.values())[1] * 1e3,
        "speed": speed[1],  # above 1: faster than the baseline
        "speed_quartiles": [speed[0], speed[2]],
        "cpu_ratio": quartiles(mine.cpu[r] / base.cpu[r] for r in common)[1],
        "first_call_s": mine.first_call,
        "first_call_ratio": mine.first_call / base.first_call,
    }
    if case.nbytes:
        row["GB_per_s"] = case.nbytes / wall / 1e9
    bounds = [all_[bound] for bound in case.bounds if bound in all_]
    if bounds and case.nbytes:
        best = min(quartiles(bound.wall.values())[1] for bound in bounds)
        row["share_of_bound"] = best / wall
    return row


def measure(case: Case, rounds: int, seed: int = 0) -> list[dict[str, Any]]:
    """Run a case and summarize it.

    Args:
      case: What runs against what.
      rounds: Samples of each contender; those slower than `SLOW_SECONDS` get fewer.
      seed: Of the order in which the contenders take turns.

    Returns:
      A row per contender. Missing peers have `"status": "not installed"` only.
    """
    rows: dict[str, dict[str, Any]] = {}
    samples: dict[str, Samples] = {}
    for name, contender in case.contenders.items():
        try:
            samples[name] = prepare(contender)
        except ImportError as error:
            missing = {"contender": name, "status": "not installed"}
            rows[name] = missing | {"detail": str(error)}
    if case.baseline not in samples:
        raise ImportError(f"{case.name}: the baseline {case.baseline} isn't installed")
    order = random.Random(seed)
    for round_ in tqdm(range(rounds), desc=case.name, leave=False, disable=None):
        turns = list(samples.values())
        order.shuffle(turns)
        for sample in turns:
            slow = min(sample.wall.values(), default=0) > SLOW_SECONDS
            if not slow or round_ < SLOW_ROUNDS:
                sample.take(round_)
    for name in samples:
        rows[name] = summarize(case, name, samples)
    return [rows[name] for name in case.contenders]
