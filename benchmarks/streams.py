# SPDX-License-Identifier: Apache-2.0
"""Sample streams that are hard on a running statistic, and their exact moments.

All of eight features. Exact is: of the very float32 (float16, bfloat16, uint8) numbers
that are fed, in extended precision.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

FEATURES = 8
BATCH = 4096


class Exact(NamedTuple):
    """Moments in extended precision."""

    mean: np.ndarray
    M2: np.ndarray
    count: int

    @property
    def variance(self) -> np.ndarray:
        """Of the population, without Bessel's correction."""
        return self.M2 / self.count


@dataclass(frozen=True)
class Stream:
    """A sequence of batches.

    Attributes:
      name: As tables name it.
      about: What is hard about it.
      batches: Makes the batches, the same ones every time.
      one_row: Every row is an update of its own, inside one jit.
      prior: Moments that the statistic is set to before the first update.
    """

    name: str
    about: str
    batches: Callable[[], Iterator[np.ndarray]]
    one_row: bool = False
    prior: Exact | None = None


def merge(a: Exact, b: Exact) -> Exact:
    """The union, in extended precision."""
    count = a.count + b.count
    fraction = np.longdouble(b.count) / np.longdouble(count)
    delta = b.mean - a.mean
    M2 = a.M2 + b.M2 + delta**2 * fraction * a.count
    return Exact(a.mean + delta * fraction, M2, count)


def exact(batches: Iterable[np.ndarray], prior: Exact | None = None) -> Exact:
    """Moments of all finite rows: two passes over each batch, merged."""
    total = prior
    for batch in batches:
        rows = batch.astype(np.float32) if batch.dtype == jnp.bfloat16 else batch
        rows = rows.reshape(-1, FEATURES).astype(np.longdouble)
        rows = rows[np.isfinite(rows).all(1)]
        mean = rows.mean(0)
        moments = Exact(mean, ((rows - mean) ** 2).sum(0), len(rows))
        total = moments if total is None else merge(total, moments)
    if total is None:
        raise ValueError("The stream has no batch.")
    return total


def preset(mean: float, count: int) -> Exact:
    """A long past of unit variance."""
    ones = np.ones(FEATURES, np.longdouble)
    return Exact(mean * ones, count * ones, count)


def normal(
    samples: int,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: Any = np.float32,
    batch: int = BATCH,
) -> Callable[[], Iterator[np.ndarray]]:
    """Gaussian rows in batches; the last one may be shorter."""

    def batches() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for start in range(0, samples, batch):
            rows = min(batch, samples - start)
            yield (mean + std * rng.standard_normal((rows, FEATURES))).astype(dtype)

    return batches


def drift(updates: int, rows: int) -> Callable[[], Iterator[np.ndarray]]:
    """The mean wanders from 0 to 1000, standard deviation 1."""

    def batches() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for mean in np.linspace(0, 1000, updates):
            yield (mean + rng.standard_normal((rows, FEATURES))).astype(np.float32)

    return batches


def then(
    *parts: Callable[[], Iterator[np.ndarray]],
) -> Callable[[], Iterator[np.ndarray]]:
    """One stream after the other."""
    return lambda: (batch for part in parts for batch in part())


def broken(samples: int) -> Callable[[], Iterator[np.ndarray]]:
    """One NaN in the first feature, one infinity in the second."""

    def batches() -> Iterator[np.ndarray]:
        for index, batch in enumerate(normal(samples)()):
            if index == 3:
                batch[7, 0], batch[11, 1] = np.nan, np.inf
            yield batch

    return batches


def pixels(samples: int) -> Callable[[], Iterator[np.ndarray]]:
    """Bytes."""

    def batches() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for _ in range(0, samples, BATCH):
            yield rng.integers(0, 256, (BATCH, FEATURES), np.uint8)

    return batches


def streams(quick: bool = False) -> list[Stream]:
    """S1 to S14; `quick` makes the long ones shorter."""
    million = 100_000 if quick else 1_000_000
    half = 2**17 if quick else 2**24  # one-row updates at each of two means
    drifts = 200 if quick else 2000
    chunk = 2**16 if quick else 2**20
    walk = then(normal(half, 3.0, batch=chunk), normal(half, 4.0, batch=chunk))
    return [
        Stream("S1", "N(0, 1)", normal(million)),
        Stream("S2", "mean 1e4", normal(million, 1e4)),
        Stream("S3", "mean 1e6", normal(million, 1e6)),
        Stream(
            "S4a", f"{2 * half} one-row updates, mean 3, then 4", walk, one_row=True
        ),
        Stream(
            "S4b",
            "4096 one-row updates of mean 4 after 2^24 samples of mean 3",
            normal(4096, 4.0),
            one_row=True,
            prior=preset(3.0, 2**24),
        ),
        Stream("S5", "mean drifts 0 to 1000", drift(drifts, 512)),
        Stream("S6", "constant 3.3", normal(million, 3.3, 0.0)),
        Stream("S7", "std 1e-8", normal(million, 0.0, 1e-8)),
        Stream("S8", "std 1e18", normal(100_000, 0.0, 1e18)),
        Stream("S9", "std 1e25", normal(100_000, 0.0, 1e25)),
        Stream("S10", "one NaN, one inf", broken(100_000)),
        Stream("S11h", "float16, mean 100", normal(100_000, 100.0, dtype=np.float16)),
        Stream(
            "S11b", "bfloat16, mean 100", normal(100_000, 100.0, dtype=jnp.bfloat16)
        ),
        Stream("S12", "uint8 pixels", pixels(100_000)),
        Stream(
            "S13",
            "mean 1.5 after 1e10 samples of mean 1",
            normal(BATCH * (100 if quick else 1000), 1.5),
            prior=preset(1.0, 10**10),
        ),
        Stream("S14", "one update at mean 1e3", normal(2**20, 1e3, batch=2**20)),
    ]
