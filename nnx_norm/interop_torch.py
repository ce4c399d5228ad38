# SPDX-License-Identifier: Apache-2.0
"""Statistics of rsl_rl, skrl and TorchRL, in and out; tensors on any device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nnx_norm import imported, moved, sources
from nnx_norm.conventions import ADDED_TO_STD, FLOORED_OR_ONE
from nnx_norm.imported import Module
from nnx_norm.moved import Moved, exported, field, float64, number, one_array, optional


def from_rsl_rl(
    source: Any, prefix: str = "", *, epsilon: float = 1e-2, into: Module | None = None
) -> Any:
    """The statistics of rsl_rl's `EmpiricalNormalization`, to normalize as it does.

    It divides by `√variance + ε`, and its epsilon is no small one: it is folded
    into the variance, and fades as samples come. `until` becomes `max_count`.

    Args:
      source: An `EmpiricalNormalization`, or the state dict of a module with one.
      prefix: Where it stands in a state dict, `"actor_obs_normalizer"`. The error for
        a wrong one names those that are there.
      epsilon: `eps`, which a state dict lacks.
      into: A module to fill in place, of which the settings stay: a `Normalizer` or a
        `RunningMeanStd`. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`.

    Example:
      >>> saved = {"n._mean": np.ones((1, 2)), "n._var": np.full((1, 2), 4.0)}
      >>> norm = from_rsl_rl(saved | {"n.count": np.int64(10)}, "n", epsilon=0.5)
      >>> norm.count, norm.normalize(np.float32([1.0, 6.0])).tolist()
      (10, [0.0, 2.0])
    """
    source = sources.at_prefix(source, prefix, "from_rsl_rl", {"_mean", "_var"})
    epsilon = number(optional(source, "eps", epsilon))
    mean, var = (_row(source, name) for name in ("_mean", "_var"))
    found = moved.moved(mean, var, field(source, "count"), ADDED_TO_STD, epsilon)
    until = optional(source, "until")
    return imported.normalizer(found, into, _squared(epsilon), max_count=until)


def from_rsl_rl_rewards(
    source: Any, prefix: str = "", *, gamma: float = 0.99, into: Module | None = None
) -> Any:
    """The reward statistics of rsl_rl, to scale as it does.

    Its `EmpiricalDiscountedVariationNormalization`, that of intrinsic rewards, divides
    by the std of the discounted returns as it is, its `eps` unused, and by 1 where that
    is zero. Its running returns come along, and with them episodes that are over: it
    isn't told of ends, so that a return goes on across them. Here it ends where
    `update` is told to. `until` stays behind: call `freeze()` at so many returns.

    `to_rsl_rl(norm, epsilon=0.0)` is the way back, into its `emp_norm`.

    Args:
      source: Such a module; or the state dict of a module with one.
      prefix: Where it stands in a state dict, `"reward_normalizer"` in that of a
        `RandomNetworkDistillation`.
      gamma: Its discount, which a state dict lacks; it lacks the running returns too.
      into: A module to fill in place, of which the settings stay: a `RewardNormalizer`
        or a `RewardRunningMeanStd`. None makes a `RewardNormalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`.

    Example:
      >>> saved = {"_mean": np.ones(1), "_var": np.full(1, 4.0), "count": np.int64(9)}
      >>> norm = from_rsl_rl_rewards({"emp_norm": saved}, gamma=0.9)
      >>> norm.count, norm.gamma, float(norm.normalize(4.0))
      (9, 0.9, 2.0)
    """
    source = sources.at_prefix(source, prefix, "from_rsl_rl_rewards", {"emp_norm"})
    inner, returns = field(source, "emp_norm"), optional(source, "disc_avg", {})
    mean, var = (float64(field(inner, name)).reshape(()) for name in ("_mean", "_var"))
    found = moved.moved(mean, var, field(inner, "count"), FLOORED_OR_ONE, 0.0)
    return imported.rewards(
        found,
        into,
        imported.SMALLEST,
        gamma=optional(returns, "gamma", gamma),
        running=optional(returns, "avg"),
    )


def to_rsl_rl(module: Any, *, epsilon: float = 1e-2) -> dict[str, np.ndarray]:
    """The state dict of an `EmpiricalNormalization` that normalizes as a module does.

    `torch.from_numpy` makes tensors of the arrays for `load_state_dict`. Fractions of
    the count are rounded; clip and decay stay behind.

    Args:
      module: A `Normalizer`, a `RewardNormalizer` or one of the ports, of one array.
      epsilon: `eps` of the target.

    Returns:
      `_mean`, `_var` and `_std`, float32 `[1, *feat]`, and `count`, int64.

    Raises:
      ValueError: The module divides by less than epsilon, or it has a tree.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_rsl_rl(norm, epsilon=0.5)["_std"].tolist()
      [[1.5]]
    """
    out = exported(module)
    mean = one_array(out.mean)
    var = np.asarray(moved.variance_for(out, ADDED_TO_STD, epsilon))
    arrays = {"_mean": mean, "_var": var, "_std": np.sqrt(var)}
    state = {name: v[None].astype(np.float32) for name, v in arrays.items()}
    return state | {"count": np.asarray(np.rint(out.count), np.int64)}


def from_skrl(
    source: Any,
    prefix: str = "",
    *,
    epsilon: float = 1e-8,
    clip: float | None = 5.0,
    into: Module | None = None,
) -> Any:
    """The statistics of skrl's `RunningStandardScaler`, to normalize as it does.

    It clips `(x - mean) / (√variance + ε)`, in its PyTorch and its JAX form.
    The count has the one prior sample of variance 1 in it, and the variance the
    unbiased estimates of its batches.

    Args:
      source: A `RunningStandardScaler`; or a state dict, that of an agent too.
      prefix: Where it stands in a state dict, `"observation_preprocessor"`.
      epsilon: That of the scaler, which a state dict lacks.
      clip: `clip_threshold` of the scaler, which a state dict lacks.
      into: As in `from_rsl_rl`; its own clip stays. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`.

    Example:
      >>> saved = {"running_mean": np.ones(1), "running_variance": np.full(1, 4.0)}
      >>> norm = from_skrl(saved | {"current_count": 10.0})
      >>> norm.normalize(np.float32([5.0, 99.0])[:, None]).tolist()
      [[2.0], [5.0]]
    """
    names = ("running_mean", "running_variance", "current_count")
    source = sources.at_prefix(source, prefix, "from_skrl", set(names))
    epsilon = number(optional(source, "epsilon", epsilon))
    mean, variance, count = (field(source, name) for name in names)
    found = moved.moved(mean, variance, number(count), ADDED_TO_STD, epsilon)
    clip = optional(source, "clip_threshold", clip)
    return imported.normalizer(found, into, _squared(epsilon), clip=clip)


def to_skrl(module: Any, *, epsilon: float = 1e-8) -> dict[str, np.ndarray]:
    """The state dict of a `RunningStandardScaler` that normalizes as a module does.

    `torch.from_numpy` makes tensors of the arrays for `load_state_dict`; the JAX form
    takes `current_count[None]`. Set the scaler's own `clip_threshold`.

    Args:
      module: A `Normalizer` or a `RunningMeanStd` of one array.
      epsilon: That of the target.

    Returns:
      `running_mean`, `running_variance` and `current_count`, float64.

    Raises:
      ValueError: The module divides by less than epsilon, or it has a tree.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_skrl(norm)["running_variance"].tolist()
      [4.0]
    """
    out = exported(module)
    return {
        "running_mean": one_array(out.mean),
        "running_variance": np.asarray(moved.variance_for(out, ADDED_TO_STD, epsilon)),
        "current_count": np.asarray(out.count, np.float64),
    }


def from_torchrl(
    source: Any, key: Any = "observation", *, into: Module | None = None
) -> Any:
    """The statistics of TorchRL's `VecNorm` or `VecNormV2`, to normalize as it does.

    With a decay below 1 the count is the weight of what it remembers. It forgets at
    every step of its environments, a `Normalizer` at every update: to go on with it,
    give `into` a decay of its `decay ** T`, T steps an update.

    Args:
      source: The transform, with state. A saved one is loaded into a transform first.
      key: The entry to take, one of its `in_keys`.
      into: As in `from_rsl_rl`. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: The transform has seen nothing yet, or its statistics don't fit
        `into`; it has no such entry, or it is of another library.

    Example:
      >>> import types
      >>> transform = types.SimpleNamespace(
      ...     loc={"observation": np.ones(1)}, scale={"observation": np.full(1, 2.0)},
      ...     _count={"observation": 10}, decay=1.0, eps=1e-4,
      ... )
      >>> from_torchrl(transform).normalize(np.float32([5.0])).tolist()
      [2.0]
    """
    sources.expect(source, "from_torchrl")
    sums, eps = optional(source, "_td"), number(field(source, "eps"))
    if sums is not None:  # VecNorm, whose epsilon is a floor of the variance
        last = (*key[:-1], f"{key[-1]}_count") if isinstance(key, tuple) else None
        count = number(_entry(source, sums, last or f"{key}_count", key))
    else:
        counts = field(source, "_count")
        decay = number(field(source, "decay"))
        count = _remembered(number(_entry(source, counts, key, key)), decay)
        eps = _squared(eps)
    parts = (field(source, name) for name in ("loc", "scale"))
    mean, std = (float64(_entry(source, part, key, key)) for part in parts)
    variance = jax.tree.map(np.square, std)
    return imported.normalizer(Moved(mean, variance, std, count), into, eps)


def _remembered(count: float, decay: float) -> float:
    """The weight of so many samples, each `decay` times that of the next."""
    return count if decay == 1 else (1 - decay**count) / (1 - decay)


def _entry(source: Any, entries: Any, name: Any, key: Any) -> Any:
    """What a TensorDict has under a name, which belongs to an entry `key`."""
    try:
        return entries[name]
    except (KeyError, TypeError, IndexError) as error:
        known = optional(source, "in_keys")
        raise ValueError(
            f"The {type(source).__name__} has no statistics of {key!r}; it was made "
            f"for {list(known) if known is not None else 'other entries'}."
        ) from error


def _row(source: Any, name: str) -> np.ndarray:
    """The one row of statistics `[1, *feat]`."""
    value = float64(field(source, name))
    if np.ndim(value) == 0 or len(value) != 1:
        raise ValueError(
            f"{name} has the shape {np.shape(value)}; expected (1, ...), as rsl_rl's "
            "EmpiricalNormalization has it."
        )
    return value[0]


def _squared(epsilon: float) -> float:
    return max(epsilon**2, imported.SMALLEST)
