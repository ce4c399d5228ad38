# SPDX-License-Identifier: Apache-2.0
"""The statistics of every normalizer again, written plainly in float64 NumPy."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

Leaves = list[np.ndarray]


class Batch(NamedTuple):
    """Moments of some samples, the samples that count, and those left out."""

    mean: Leaves
    M2: Leaves
    count: float
    rows: float
    skipped: float


def along(weight: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """Weights `[*lead]` with axes of size 1 for the features of `leaf`."""
    return weight.reshape(weight.shape + (1,) * (leaf.ndim - weight.ndim))


def finite(leaves: Sequence[np.ndarray], lead: int) -> np.ndarray:
    """Bool `[*lead]`: the samples that are finite in all leaves."""
    held = np.ones(leaves[0].shape[:lead], bool)
    for leaf in leaves:
        held &= np.isfinite(leaf).all(tuple(range(lead, leaf.ndim)))
    return held


@np.errstate(all="ignore")
def moments(leaves: Leaves, weight: np.ndarray, skip: bool) -> Batch:
    """Two passes in float64 about the first sample that counts."""
    refused = ~(np.isfinite(weight) & (weight >= 0))
    weight = np.where(refused, 0.0, weight)
    bad = (weight > 0) & ~finite(leaves, weight.ndim) & skip
    weight = np.where(bad, 0.0, weight)
    n, rows = weight.sum(), (weight > 0).sum()
    means, M2s = [], []
    for leaf in leaves:
        x = leaf.astype(np.float64).reshape(-1, *leaf.shape[weight.ndim :])
        w = along(weight.ravel(), x)
        x = np.where(w > 0, x, 0.0)
        about = x[np.argmax(weight.ravel() > 0)] if n else np.zeros(x.shape[1:])
        d = np.where(w > 0, x - about, 0.0)
        step = (w * d).sum(0) / max(n, 0.25)
        means.append(about + step)
        M2s.append((w * np.where(w > 0, d - step, 0.0) ** 2).sum(0))
    return Batch(means, M2s, n, rows, refused.sum() + bad.sum())


@np.errstate(over="ignore")
def stored(value: Any) -> Any:
    """What float32 can't hold is infinite."""
    narrow = np.asarray(value).astype(np.float32).astype(np.float64)
    return np.where(np.isfinite(narrow), value, narrow)


def merge(
    mean: Leaves, M2: Leaves, count: float, batch: Batch, *, hold: bool = True
) -> tuple[Leaves, Leaves, float]:
    """The moments of a union."""
    n = count + batch.count
    part = batch.count / n if n else 0.0
    delta = [b - a for a, b in zip(mean, batch.mean, strict=True)]
    means = [a + part * d for a, d in zip(mean, delta, strict=True)]
    parts = zip(M2, batch.M2, delta, strict=True)
    M2s = [p + q + count * part * d**2 for p, q, d in parts]
    if hold:
        means, M2s = [stored(v) for v in means], [stored(v) for v in M2s]
    return means, M2s, n


@dataclasses.dataclass
class Statistics:
    """A normalizer's statistics and the settings that decide what they become."""

    mean: Leaves
    M2: Leaves
    count: float = 0.0
    skipped: float = 0.0
    frozen: bool = False
    skip: bool = True
    decay: float | None = None
    max_count: float | None = None
    writes: int = 0

    @classmethod
    def empty(cls, features: Sequence[tuple[int, ...]], **settings: Any) -> Self:
        """Statistics of no sample."""
        mean, M2 = ([np.zeros(s) for s in features] for _ in range(2))
        return cls(mean, M2, **settings)

    def update(self, leaves: Leaves, weight: np.ndarray) -> None:
        """Fold samples with their weights."""
        if leaves:
            self.fold(moments(leaves, weight, self.skip))

    @np.errstate(all="ignore")
    def fold(self, batch: Batch) -> None:
        """Merge moments, or leave them out."""
        if self.frozen:
            return
        is_open = self.max_count is None or self.count < self.max_count
        offered = is_open and batch.count > 0
        factor = 1.0 if self.decay is None else self.decay
        M2 = [factor * v for v in self.M2]
        new = merge(self.mean, M2, factor * self.count, batch)
        held = all(np.isfinite(v).all() for v in (*new[0], *new[1])) or not self.skip
        if offered and held:
            self.mean, self.M2, self.count = new
            self.writes += 1
        if is_open:
            self.skipped += batch.skipped + (batch.rows if offered and not held else 0)

    def batch(self) -> Batch:
        """These statistics as something to merge."""
        return Batch(self.mean, self.M2, self.count, self.count, self.skipped)

    def copy_from(self, other: "Statistics") -> None:
        """Statistics, not settings."""
        self.mean, self.M2 = list(other.mean), list(other.M2)
        self.count, self.skipped = other.count, other.skipped
        self.writes = other.writes

    def set(self, mean: float, variance: float, count: float) -> None:
        """Warm start."""
        self.mean = [np.full(v.shape, mean) for v in self.mean]
        self.M2 = [np.full(v.shape, variance * count) for v in self.M2]
        self.count, self.writes = count, 1

    def reset(self) -> None:
        """Forget."""
        self.set(0.0, 0.0, 0.0)
        self.skipped = 0.0

    def clone(self) -> Self:
        """Another with the same; arrays are never written in place."""
        return copy.copy(self)

    def renewed(self) -> None:
        """What else a new module forgets that takes over these statistics."""

    def std(self, epsilon: float, initial: float) -> Leaves:
        """What a normalizer divides by."""
        if not self.count:
            return [np.full(v.shape, initial) for v in self.M2]
        return [np.sqrt(np.maximum(v / self.count, epsilon)) for v in self.M2]


@dataclasses.dataclass
class Returns(Statistics):
    """Statistics of discounted returns, and these returns."""

    gamma: float = 1.0
    num_envs: int = 2
    running: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    def renewed(self) -> None:
        self.running = np.zeros((self.num_envs, *self.running.shape[1:]))

    def reset(self) -> None:
        super().reset()
        self.running = np.zeros_like(self.running)

    @np.errstate(all="ignore")
    def update_returns(
        self, rewards: np.ndarray, done: np.ndarray, valid: np.ndarray
    ) -> None:
        """Step by step: add the reward, count the return, end the episode."""
        if self.frozen or not done.size:
            return
        g = self.running
        if len(g) != done.shape[1]:
            g = np.zeros(rewards.shape[1:])
        samples = np.zeros(rewards.shape, np.float32)
        for t, reward in enumerate(rewards.astype(np.float64)):
            new, read = self.gamma * g + reward, valid[t]
            if self.skip:  # of what float32 can't hold
                read = read & finite([new.astype(np.float32)], 1)
            g = np.where(along(read, g), new, g)
            samples[t] = g
            samples[t, valid[t] & ~read] = np.nan
            g = np.where(along(done[t] & valid[t], g), 0.0, g)
        self.running = g.astype(np.float32).astype(np.float64)
        self.update([samples], valid.astype(np.float64))


@dataclasses.dataclass
class Buffers:
    """Mean, variance and count as PyTorch's class has them."""

    mean: np.ndarray | None
    var: np.ndarray
    count: float
    decay: float | None
    writes: int = 0

    def shape(self, shape: tuple[int, ...]) -> None:
        """Make the prior, if it is not there yet."""
        if self.mean is None:
            self.mean, self.var = np.zeros(shape), np.ones(shape)

    @np.errstate(all="ignore")
    def fold(self, mean: np.ndarray, var: np.ndarray, count: float) -> None:
        """Merge moments, or average them in."""
        assert self.mean is not None
        if not count > 0:
            return
        self.writes += 1
        if self.decay is not None:
            keep = self.decay
            self.mean = stored(keep * self.mean + (1 - keep) * mean)
            self.var = stored(keep * self.var + (1 - keep) * var)
            return
        batch = Batch([mean], [np.maximum(var, 0) * count], count, count, 0)
        M2 = [np.maximum(self.var, 0) * self.count]
        means, M2s, n = merge([self.mean], M2, self.count, batch, hold=False)
        self.mean, self.var, self.count = stored(means[0]), stored(M2s[0] / n), n

    def record(self, x: np.ndarray) -> None:
        """Fold samples `[N, *feat]`; none bring nothing, not even their shape."""
        if len(x):
            self.shape(x.shape[1:])
            batch = moments([x], np.ones(len(x)), False)
            with np.errstate(all="ignore"):
                self.fold(batch.mean[0], batch.M2[0] / len(x), len(x))

    def clone(self) -> Self:
        """Another with the same."""
        return copy.copy(self)


def assert_close(
    found: Leaves, right: Leaves, spread: Leaves, rtol: float, count: float = 1.0
) -> None:
    """Equal within `rtol * spread`, and not finite where the others aren't."""
    for f, r, s in zip(found, right, spread, strict=True):
        assert f.shape == r.shape
        held = np.isfinite(r)
        assert (np.isfinite(f) == held).all(), (f, r)
        error, allowed = np.abs(f[held] - r[held]), (rtol * s)[held]
        assert (error <= allowed).all(), (f, r, error, allowed)


def assert_moments(found: Batch, model: Statistics) -> None:
    """The statistics are the model's.

    Counts exactly, unless a decay multiplied them. A mean errs by 1e-7 of the standard
    deviation, a variance by 5e-7 of itself. To these come the roundings of what is
    stored, of 48 bits each: of a mean 2^-48 of it per merge, which a later merge takes
    for a movement of the mean, twice in its square.
    """
    exact = model.decay is None
    assert found.skipped == model.skipped, (found.skipped, model.skipped)
    bound = 0.0 if exact else 2.0**-46 * model.writes * model.count
    assert abs(found.count - model.count) <= bound, (found.count, model.count)
    n = max(model.count, 0.25)
    for i, (mean, M2) in enumerate(zip(model.mean, model.M2, strict=True)):
        with np.errstate(invalid="ignore", over="ignore"):
            std = np.sqrt(M2 / n)
            rounding = 2.0**-47 * (model.writes + 1) * (np.abs(mean) + std)
            about_mean = 1e-7 * std + rounding
            about_M2 = 5e-7 * M2 + n * rounding * (2 * std + rounding)
        assert_close([found.mean[i]], [mean], [about_mean], 1.0)
        assert_close([found.M2[i]], [M2], [about_M2], 1.0)


@np.errstate(all="ignore")
def united(steps: Sequence[Batch], skip: bool) -> Batch:
    """The union of the moments that several steps emitted, in float32 as they do."""
    mean, M2 = ([np.zeros_like(v) for v in steps[0].mean] for _ in range(2))
    count = skipped = 0.0
    for step in steps:
        skipped += step.skipped
        held = all(np.isfinite(stored(v)).all() for v in (*step.mean, *step.M2))
        if held or not skip:
            step = step._replace(M2=[stored(v) for v in step.M2])
            mean, M2, count = merge(mean, M2, count, step, hold=False)
        else:
            skipped += step.count
    return Batch(mean, M2, count, count, skipped)
