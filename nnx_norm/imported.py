# SPDX-License-Identifier: Apache-2.0
"""Statistics of another library in a module of ours, which divides by the same.

It is told to where the two would differ: see `nnx_norm.conventions`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from nnx_norm import arguments
from nnx_norm.buffers import Buffers
from nnx_norm.conventions import (
    ADDED_TO_VARIANCE,
    CLOSE,
    FLOORED,
    FLOORED_OR_ONE,
    Convention,
)
from nnx_norm.fold import Statistics
from nnx_norm.moved import Moved, float64, number
from nnx_norm.normalizer import Normalizer
from nnx_norm.reward_running_mean_std import RewardRunningMeanStd
from nnx_norm.rewards import RewardNormalizer
from nnx_norm.running_mean_std import RunningMeanStd
from nnx_norm.spec import Spec, parse
from nnx_norm.statistics import RunningStatistics

PyTree = Any
Module = RunningStatistics | RunningMeanStd

SMALLEST = float(np.finfo(np.float32).tiny)
INITIAL_STD = 10.0


def normalizer(
    source: Moved,
    into: Module | None,
    epsilon: float,
    *,
    passing: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A module that normalizes as the source of the statistics does.

    Args:
      source: The statistics.
      into: The module to fill, in place; its settings stay. None makes a `Normalizer`.
      epsilon: Floor of the variance of a new normalizer; it is lowered where the
        source divides by less.
      passing: Shapes of entries that pass through untouched, by name.
      **settings: Of a new normalizer, such as `clip`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no module of statistics.
      ValueError: The statistics don't fit `into`, or it can't divide by what the
        source divides by; nothing has changed then.
    """
    if into is None:
        stds = jax.tree.leaves(source.std)
        first = [v for std in stds for v in np.ravel(std)[:1]]
        fresh = number(source.count) == 0 and len(first) > 0
        into = Normalizer(
            source.mean | passing if passing else source.mean,
            epsilon=_floor(stds, epsilon),
            initial_std=float(first[0]) if fresh else INITIAL_STD,
            exclude=[(key,) for key in passing or ()],
            **settings,
        )
    return _store(source, into)


def rewards(
    source: Moved,
    into: Module | None,
    epsilon: float,
    *,
    gamma: Any,
    running: Any,
    **settings: Any,
) -> Any:
    """A module that scales rewards as the source of the statistics does.

    Args:
      source: The statistics of the discounted returns, leaves `[]`.
      into: As in `normalizer`. None makes a `RewardNormalizer`.
      epsilon: As in `normalizer`.
      gamma: The source's discount.
      running: Its running returns `[B]`, or None.
      **settings: Of a new normalizer, such as `clip`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: As `normalizer`.
      ValueError: As `normalizer`.
    """
    returns = None if running is None else float64(running).reshape(-1)
    if into is None:
        into = RewardNormalizer(
            number(gamma),
            num_envs=None if returns is None else len(returns),
            epsilon=_floor(jax.tree.leaves(source.std), epsilon),
            **settings,
        )
    _store(source, into)
    if returns is not None and isinstance(into, RewardNormalizer):
        value = jnp.asarray(returns, jnp.float32)
        into.running_return.set_value(into.spec.unflatten([value]))
    elif returns is not None and isinstance(into, RewardRunningMeanStd):
        value = returns.astype(np.float32)
        rest = (returns - value.astype(np.float64)).astype(np.float32)
        into._set_returns(into._spec(), [jnp.asarray(value)], [jnp.asarray(rest)])
    return into


def _floor(stds: list[Any], epsilon: float) -> float:
    """An epsilon that is no more than the square of any divisor."""
    least = min((float(np.min(s, initial=np.inf)) ** 2 for s in stds), default=np.inf)
    return max(min(epsilon, least), SMALLEST)


def _store(source: Moved, into: Any) -> Any:
    """Write statistics into a module that then divides by what the source does."""
    if isinstance(into, RunningMeanStd):
        spec = parse(source.mean) if into.is_lazy else into._spec()
        mean, variances = _fitted(spec, source, ADDED_TO_VARIANCE, into.epsilon)
        into._store(spec, Buffers(mean, variances, _count(source)))
    elif isinstance(into, (Normalizer, RewardNormalizer)):
        count = _count(source)
        into._statistics_here()  # no population, and none of another dtype
        rewards = isinstance(into, RewardNormalizer)
        convention = FLOORED_OR_ONE if rewards else FLOORED
        mean, variances = _fitted(into.spec, source, convention, into.epsilon)
        M2 = [v * count for v in variances]
        _refuse_other_divisor(source, into, M2, count)
        skipped: Any = np.zeros(())
        into._store64(Statistics(mean, M2, count, skipped))
    else:
        raise TypeError(
            f"into is a {type(into).__name__}; expected a Normalizer, a "
            "RewardNormalizer, a RunningMeanStd or a RewardRunningMeanStd."
        )
    return into


def _count(source: Moved) -> Any:
    return arguments.float64_array(number(source.count), (), "count", minimum=0.0)


def _leaves(spec: Spec, tree: PyTree, name: str, minimum: float) -> list[Any]:
    return arguments.float64_leaves(spec, spec.features, tree, name, minimum=minimum)


def _fitted(
    spec: Spec, source: Moved, convention: Convention, epsilon: float
) -> tuple[list[Any], list[Any]]:
    """Leaves of the mean, and of the variance as a module of ours has to have it."""
    mean = _leaves(spec, source.mean, "mean", -np.inf)
    variance = _leaves(spec, source.variance, "variance", 0.0)
    std = _leaves(spec, source.std, "std", SMALLEST)
    names = [keystr(spec.paths[i]) or "the input" for i in spec.kept]
    parts = zip(variance, std, names, strict=True)
    return mean, [convention.fitted(v, s, epsilon, name) for v, s, name in parts]


def _refuse_other_divisor(
    source: Moved, into: Normalizer | RewardNormalizer, M2: list[Any], count: Any
) -> None:
    """Raise where a module would divide by something else, for want of samples."""
    for s, theirs in zip(M2, _leaves(into.spec, source.std, "std", 0.0), strict=True):
        ours = into._divisor(np.asarray(s), count)
        if np.any(off := np.abs(ours - theirs) > CLOSE * theirs):
            raise ValueError(
                f"With {number(count):g} samples the source divides by "
                f"{np.asarray(theirs)[off][0]:g} and a {type(into).__name__} by "
                f"{np.asarray(ours)[off][0]:g}. Import it after its first updates, or "
                "into a module made with a fitting initial_std."
            )
