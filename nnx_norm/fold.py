# SPDX-License-Identifier: Apache-2.0
"""The step of a running statistic: lift a history, reduce it over devices, merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nnx_norm import distributed, moments
from nnx_norm.extended import double, join, split
from nnx_norm.moments import Moments
from nnx_norm.reread import batch_sums
from nnx_norm.samples import all_pair
from nnx_norm.sums import on_one_cpu

PyTree = Any


class Statistics(NamedTuple):
    """What a normalizer stores; the trees are lists of leaves `[*feat]` here."""

    mean: PyTree
    M2: PyTree
    counter: jax.Array
    skipped: jax.Array

    @property
    def moments(self) -> Moments:
        """The moments among them."""
        return Moments(self.mean, self.M2, self.counter)


class Lifted(NamedTuple):
    """Moments of a batch, the samples that they count, and those left out."""

    moments: Moments
    rows: jax.Array
    skipped: jax.Array


class Emitted(NamedTuple):
    """Moments of one step's batch, as a float32 pytree that a scan can stack.

    Attributes:
      mean: Tree of arrays `[*feat]`, with what float32 can't hold of it in
      mean_residual: a tree of the same shapes.
      M2: Tree of arrays `[*feat]`.
      count: Scalar, the samples that count; exact up to 2^24 in one step.
      skipped: Scalar, the samples left out.
    """

    mean: PyTree
    mean_residual: PyTree
    M2: PyTree
    count: jax.Array
    skipped: jax.Array

    def over(self, function: Callable[[PyTree], PyTree]) -> Emitted:
        """With `function` applied to each of the three trees."""
        mean, rest, M2 = (function(tree) for tree in self[:3])
        return self._replace(mean=mean, mean_residual=rest, M2=M2)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to fold; static under jit.

    Attributes:
      skip: Whether samples that are not finite, and updates that float32 can't hold,
        stay out and are counted.
      axis_name: Mapped axes to reduce over.
      decay: Factor on the old count and M2, or None.
      max_count: Number of samples from which on nothing is folded, or None.
    """

    skip: bool = True
    axis_name: distributed.AxisName | None = None
    decay: float | None = None
    max_count: float | None = None


def joined(value: Statistics, residual: Statistics) -> Statistics:
    """Statistics in float64; call it inside `double()`."""
    return jax.tree.map(join, value, residual)


def separated(statistics: Statistics) -> tuple[Statistics, Statistics]:
    """Values and residuals in float32 of statistics in float64; inside `double()`."""
    leaves, treedef = jax.tree.flatten(statistics)
    pairs = [split(leaf) for leaf in leaves]
    value, residual = (
        jax.tree.unflatten(treedef, side) for side in zip(*pairs, strict=True)
    )
    return value, residual


def fold_inputs(
    value: Statistics,
    residual: Statistics,
    history: list[jax.Array],
    mask: jax.Array | None,
    weights: jax.Array | None,
    *,
    lead: int,
    rule: Rule,
) -> tuple[Statistics, Statistics]:
    """Fold samples into statistics.

    Args:
      value: Statistics of float32 leaves `[*feat]`.
      residual: Their residuals.
      history: Arrays `[*lead, *feat]`, one or more.
      mask: None, or bool array over a leading prefix of the leading axes.
      weights: None, or float array over such a prefix.
      lead: Number of leading axes.
      rule: How to fold.

    Returns:
      New values and residuals; bit for bit the old ones if nothing was to fold.
    """
    local = on_one_cpu(*history)  # here, where arrays still know their devices
    step = partial(_fold_inputs, lead=lead, rule=rule, local=local)
    return step(value, residual, history, mask, weights)


@partial(jax.jit, static_argnames=("lead", "rule", "local"))
def _fold_inputs(
    value: Statistics,
    residual: Statistics,
    history: list[jax.Array],
    mask: jax.Array | None,
    weights: jax.Array | None,
    *,
    lead: int,
    rule: Rule,
    local: bool,
) -> tuple[Statistics, Statistics]:
    with double():
        old = joined(value, residual).moments
        read = partial(lift, lead=lead, skip=rule.skip, local=local)
        return _step(value, residual, read(history, old, mask, weights), rule)


@partial(jax.jit, static_argnames=("rule",))
def fold_moments(
    value: Statistics, residual: Statistics, history: Emitted, *, rule: Rule
) -> tuple[Statistics, Statistics]:
    """Fold emitted moments `[*lead, *feat]` into statistics, as `fold_inputs`."""
    with double():
        return _step(value, residual, _unite(history, rule.skip), rule)


def lift(
    history: list[jax.Array],
    running: Moments,
    mask: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    lead: int,
    skip: bool,
    local: bool | None = None,
) -> Lifted:
    """Moments of samples, taken about the running mean; call it inside `double()`.

    No gradient flows: what a loss depends on may be folded inside it.
    """
    history, running, weights = lax.stop_gradient((history, running, weights))
    b = batch_sums(
        history,
        lead,
        shift=running.mean,
        prior=running.count,
        mask=mask,
        weights=weights,
        skip=skip,
        local=local,
    )
    return Lifted(moments.from_sums(b), b.rows, b.skipped)


def emit(
    x: list[jax.Array],
    value: Statistics,
    residual: Statistics,
    *,
    lead: int,
    skip: bool,
) -> Emitted:
    """Moments of one batch `[*lead, *feat]`, for `fold_moments` to take later."""
    with double():
        running = joined(value, residual).moments
        batch, _, skipped = lift(x, running, lead=lead, skip=skip)
        pairs = [split(mean) for mean in batch.mean]
        return Emitted(
            [mean for mean, _ in pairs],
            [rest for _, rest in pairs],
            [M2.astype(jnp.float32) for M2 in batch.M2],
            batch.count.astype(jnp.float32),
            skipped.astype(jnp.float32),
        )


def _unite(history: Emitted, skip: bool) -> Lifted:
    """Moments of a history of moments; a step that float32 couldn't hold is skipped."""
    lead = history.count.ndim

    def stack(v: jax.Array) -> jax.Array:
        return v.reshape((-1, *v.shape[lead:])).astype(jnp.float64)

    means = [
        stack(mean) + stack(rest)
        for mean, rest in zip(history.mean, history.mean_residual, strict=True)
    ]
    M2s = [stack(M2) for M2 in history.M2]
    counts, skipped = stack(history.count), jnp.sum(stack(history.skipped))
    if skip:
        finite = [
            jnp.all(jnp.isfinite(v), axis=tuple(range(1, v.ndim)))
            for v in (*means, *M2s)
        ]
        held = jnp.all(jnp.stack(finite), axis=0)
        skipped = skipped + jnp.sum(jnp.where(held, 0.0, counts))
        counts = jnp.where(held, counts, 0.0)
    return Lifted(moments.reduce(Moments(means, M2s, counts)), jnp.sum(counts), skipped)


def _step(
    value: Statistics, residual: Statistics, batch: Lifted, rule: Rule
) -> tuple[Statistics, Statistics]:
    """Merge a batch, or refuse it; one collective if there is an axis."""
    if rule.axis_name is not None:
        ranks = distributed.gather(batch, rule.axis_name)
        batch = Lifted(
            moments.reduce(ranks.moments), jnp.sum(ranks.rows), jnp.sum(ranks.skipped)
        )
    old = joined(value, residual)
    merged = moments.merge(_forget(old.moments, rule.decay), batch.moments)
    new = separated(lax.optimization_barrier(Statistics(*merged, old.skipped)))

    is_open = jnp.full((), True)
    if rule.max_count is not None:
        is_open = old.counter < rule.max_count
    offered = is_open & (batch.moments.count > 0)
    held = _all_finite(new[0]) if rule.skip else jnp.full((), True)
    left_out = batch.skipped + jnp.where(offered & ~held, batch.rows, 0.0)
    counted = split(old.skipped + left_out)

    def choose(new: Statistics, old: Statistics, skipped: jax.Array) -> Statistics:
        kept = jax.tree.map(lambda n, o: jnp.where(offered & held, n, o), new, old)
        more = is_open & (left_out > 0)
        return kept._replace(skipped=jnp.where(more, skipped, old.skipped))

    return choose(new[0], value, counted[0]), choose(new[1], residual, counted[1])


def _forget(running: Moments, decay: float | None) -> Moments:
    if decay is None:
        return running
    M2 = jax.tree.map(lambda v: v * decay, running.M2)
    return Moments(running.mean, M2, running.count * decay)


def _all_finite(statistics: Statistics) -> jax.Array:
    """Whether means, M2s and the counter are finite."""
    leaves = zip(statistics.mean, statistics.M2, strict=True)
    held = [all_pair(jnp.isfinite(mean), jnp.isfinite(M2)) for mean, M2 in leaves]
    return jnp.all(jnp.stack([*held, jnp.isfinite(statistics.counter)]))
