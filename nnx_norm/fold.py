# SPDX-License-Identifier: Apache-2.0
"""Folding: lift a history to its moments, and merge them into running statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nnx_norm import moments
from nnx_norm.explicit import automatic
from nnx_norm.extended import double, split
from nnx_norm.moments import Moments
from nnx_norm.reread import batch_sums
from nnx_norm.step import Lifted, Rule, Statistics, advance
from nnx_norm.step import joined as joined  # part of this module's interface
from nnx_norm.step import separated as separated
from nnx_norm.sums import on_one_cpu

PyTree = Any


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
    arrays = jax.tree.leaves((value, residual, history, mask, weights))
    local = on_one_cpu(*arrays)  # here, where they still know their devices
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
    old = value, residual

    def step(
        value: Statistics,
        residual: Statistics,
        history: list[jax.Array],
        *given: jax.Array | None,
    ) -> tuple[Statistics, Statistics]:
        read = partial(lift, lead=lead, skip=rule.skip, local=local)
        return advance(value, residual, read(history, value.moments, *given), rule)

    with double():
        return automatic(step, *old, history, mask, weights, like=old)


@partial(jax.jit, static_argnames=("rule",))
def fold_moments(
    value: Statistics, residual: Statistics, history: Emitted, *, rule: Rule
) -> tuple[Statistics, Statistics]:
    """Fold emitted moments `[*lead, *feat]` into statistics, as `fold_inputs`."""
    old = value, residual

    def step(value: Statistics, residual: Statistics, history: Emitted) -> Any:
        return advance(value, residual, _unite(history, rule.skip), rule)

    with double():
        return automatic(step, *old, history, like=old)


@partial(jax.jit, static_argnames=("rule",))
def fold_statistics(
    value: Statistics, residual: Statistics, other: Statistics, *, rule: Rule
) -> tuple[Statistics, Statistics]:
    """Fold statistics in float64 into others; call it inside `double()`."""

    def step(value: Statistics, residual: Statistics, other: Statistics) -> Any:
        batch = Lifted(other.moments, other.counter, other.skipped)
        return advance(value, residual, batch, rule)

    for _ in range(value.counter.ndim):  # a population merges member by member
        step = jax.vmap(step)
    return automatic(step, value, residual, other, like=(value, residual))


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


def emit(x: list[jax.Array], running: Moments, *, lead: int, skip: bool) -> Emitted:
    """Moments of one batch `[*lead, *feat]`, for `fold_moments` to take later."""
    local = on_one_cpu(*jax.tree.leaves((x, running)))  # as in fold_inputs
    return _emit(x, running, lead=lead, skip=skip, local=local)


@partial(jax.jit, static_argnames=("lead", "skip", "local"))
def _emit(
    x: list[jax.Array], running: Moments, *, lead: int, skip: bool, local: bool
) -> Emitted:
    def step(x: list[jax.Array], running: Moments) -> Emitted:
        read = partial(lift, lead=lead, skip=skip, local=local)
        batch, _, skipped = read(x, running)
        pairs = [split(mean) for mean in batch.mean]
        return Emitted(
            [mean for mean, _ in pairs],
            [rest for _, rest in pairs],
            [M2.astype(jnp.float32) for M2 in batch.M2],
            batch.count.astype(jnp.float32),
            skipped.astype(jnp.float32),
        )

    mean, M2, count = running
    with double():
        return automatic(step, x, running, like=Emitted(mean, mean, M2, count, count))


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
