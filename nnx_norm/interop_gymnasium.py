# SPDX-License-Identifier: Apache-2.0
"""Statistics of Gymnasium and Stable-Baselines3, in and out."""

from __future__ import annotations

from typing import Any

from nnx_norm import imported, moved, sources
from nnx_norm.conventions import ADDED_TO_VARIANCE
from nnx_norm.imported import Module
from nnx_norm.moved import Moved, exported, field, number, one_array, optional
from nnx_norm.tree import is_mapping

PyTree = Any

EPSILON = 1e-8
"""The default of Gymnasium's wrappers and of `VecNormalize`."""


def from_gymnasium(
    source: Any, *, epsilon: float = EPSILON, into: Module | None = None
) -> Any:
    """The observation statistics of Gymnasium, to normalize as it does.

    It divides by `√(variance + ε)`. The count keeps its fraction, the weight of the
    prior sample that it starts with (1e-4). Where epsilon is seen in a divisor, it is
    folded into the variance, and fades as samples come; from then on it is a floor.

    Args:
      source: `NormalizeObservation` of `wrappers` or of `wrappers.vector`, also below
        other wrappers; or a `RunningMeanStd`, which knows no epsilon, or a mapping
        of its attributes.
      epsilon: That of the wrapper, where `source` is none.
      into: A module to fill in place, of which the settings stay: a `Normalizer`, or a
        `RunningMeanStd`, which adds its epsilon as Gymnasium does. None makes a
        `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, it is of another library (a
        `VecNormalize`, which clips: `from_sb3`), or they don't fit `into`.

    Example:
      >>> import types
      >>> import numpy as np
      >>> rms = types.SimpleNamespace(mean=np.ones(2), var=np.full(2, 4.0), count=9.5)
      >>> norm = from_gymnasium(rms)
      >>> norm.count, norm.normalize(np.float32([1.0, 5.0])).tolist()
      (9.5, [0.0, 2.0])
    """
    sources.expect(source, "from_gymnasium")
    own = sources.own(source)
    bare = "obs_rms" not in own and "var" in own
    wrapper = {} if bare else _layer(source, "obs_rms", "from_gymnasium")
    epsilon = number(optional(wrapper, "epsilon", epsilon))
    rms = wrapper.get("obs_rms", source)
    return imported.normalizer(_of_rms(rms, epsilon), into, epsilon)


def from_gymnasium_rewards(source: Any, *, into: Module | None = None) -> Any:
    """The reward statistics of Gymnasium, to scale as it does.

    The running returns come along. Its single-environment wrapper, and the vector one
    but for same-step resets, cut them one step early (see `RewardRunningMeanStd`): at
    the first step after the import a return may still hold the end of the episode
    before. Truncation doesn't cut them there; it does here.

    Args:
      source: `wrappers.NormalizeReward`, or `wrappers.vector.NormalizeReward`, also
        below other wrappers.
      into: A module to fill in place, of which the settings stay: a `RewardNormalizer`,
        or a `RewardRunningMeanStd`. None makes a `RewardNormalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source`, or they don't fit `into`: with
        one return only, a `RewardNormalizer` divides by 1.

    Example:
      >>> import types
      >>> import numpy as np
      >>> rms = types.SimpleNamespace(mean=np.float64(1), var=np.float64(4), count=9)
      >>> wrapper = types.SimpleNamespace(
      ...     return_rms=rms, gamma=0.9, epsilon=1e-8, accumulated_reward=np.zeros(3)
      ... )
      >>> float(from_gymnasium_rewards(wrapper).normalize(4.0))
      2.0
    """
    wrapper = _layer(source, "return_rms", "from_gymnasium_rewards")
    epsilon = number(field(wrapper, "epsilon"))
    running = optional(wrapper, "accumulated_reward")
    running = optional(wrapper, "discounted_reward") if running is None else running
    return imported.rewards(
        _of_rms(field(wrapper, "return_rms"), epsilon),
        into,
        epsilon,
        gamma=field(wrapper, "gamma"),
        running=running,
    )


def to_gymnasium(module: Any, *, epsilon: float = EPSILON) -> dict[str, Any]:
    """The attributes of a Gymnasium `RunningMeanStd` that normalizes as a module does.

    `vars(wrapper.obs_rms).update(to_gymnasium(norm))` fills the one of a wrapper, and
    `return_rms` likewise with a `RewardNormalizer`. Clip, mask and decay stay behind.

    Args:
      module: A `Normalizer`, a `RewardNormalizer` or one of the ports, of one array.
      epsilon: The wrapper's.

    Returns:
      `mean` and `var`, float64 arrays, and `count`, a float.

    Raises:
      ValueError: The module divides by less than epsilon admits, or it has a tree.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_gymnasium(norm)["var"].tolist(), to_gymnasium(norm)["count"]
      ([4.0], 10.0)
    """
    out = exported(module)
    return _rms(out, out.mean, moved.variance_for(out, ADDED_TO_VARIANCE, epsilon))


def from_sb3(source: Any, *, into: Module | None = None) -> Any:
    """The observation statistics of Stable-Baselines3, to normalize as it does.

    It clips `(x - mean) / √(variance + ε)`; for epsilon and the prior sample see
    `from_gymnasium`. Entries of a dict space that are not normalized pass through.

    Args:
      source: `VecNormalize`, also below other wrappers or in a model, or unpickled
        without an environment.
      into: As in `from_gymnasium`. Its own clip stays. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: There are no statistics in `source` (made with `norm_obs=False`), or
        they don't fit `into`.

    Example:
      >>> import types
      >>> import numpy as np
      >>> rms = types.SimpleNamespace(mean=np.ones(1), var=np.full(1, 4.0), count=10)
      >>> venv = types.SimpleNamespace(obs_rms=rms, epsilon=1e-8, clip_obs=10.0)
      >>> from_sb3(venv).normalize(np.float32([5.0, 99.0])[:, None]).tolist()
      [[2.0], [10.0]]
    """
    wrapper = _layer(source, "obs_rms", "from_sb3")
    rms, epsilon = field(wrapper, "obs_rms"), number(field(wrapper, "epsilon"))
    if not is_mapping(rms):
        found, passing = _of_rms(rms, epsilon), {}
    else:
        each = {key: _of_rms(rms[key], epsilon) for key in rms}
        found = _joined(each)
        spaces = getattr(wrapper.get("observation_space"), "spaces", {})
        passing = {k: s.shape or () for k, s in spaces.items() if k not in each}
    return imported.normalizer(
        found,
        into,
        epsilon,
        passing=passing,
        clip=number(field(wrapper, "clip_obs")),
    )


def from_sb3_rewards(source: Any, *, into: Module | None = None) -> Any:
    """The reward statistics of Stable-Baselines3, to scale as it does.

    The running returns come along (a saved `VecNormalize` has none), and end where
    ours do. `norm_reward` is not asked for: it says whether they are used.

    Args:
      source: As in `from_sb3`.
      into: As in `from_gymnasium_rewards`. None makes a `RewardNormalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: As `from_gymnasium_rewards`.

    Example:
      >>> import types
      >>> import numpy as np
      >>> rms = types.SimpleNamespace(mean=np.float64(1), var=np.float64(4), count=9)
      >>> venv = types.SimpleNamespace(
      ...     ret_rms=rms, gamma=0.9, epsilon=1e-8, clip_reward=5.0, returns=np.zeros(3)
      ... )
      >>> from_sb3_rewards(venv).normalize(np.float32([4.0, 99.0])).tolist()
      [2.0, 5.0]
    """
    wrapper = _layer(source, "ret_rms", "from_sb3_rewards")
    epsilon = number(field(wrapper, "epsilon"))
    return imported.rewards(
        _of_rms(field(wrapper, "ret_rms"), epsilon),
        into,
        epsilon,
        gamma=field(wrapper, "gamma"),
        running=optional(wrapper, "returns"),
        clip=number(field(wrapper, "clip_reward")),
    )


def to_sb3(module: Any, *, epsilon: float = EPSILON) -> dict[str, Any]:
    """The attributes of the `RunningMeanStd` of a `VecNormalize`.

    As `to_gymnasium`; for a dict of observations a dict of these, one for each entry of
    `obs_rms`. Set the `VecNormalize`'s own `clip_obs` and `epsilon`.

    Args:
      module: A `Normalizer`, a `RewardNormalizer` or one of the ports, of one array or
        of a dict of arrays.
      epsilon: The `VecNormalize`'s.

    Returns:
      `mean`, `var` and `count`, or a dict of such dicts.

    Raises:
      ValueError: The module divides by less than epsilon admits, or its tree is deeper.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer({"goal": 1})
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_sb3(norm)["goal"]["var"].tolist()
      [4.0]
    """
    out = exported(module)
    var = moved.variance_for(out, ADDED_TO_VARIANCE, epsilon)
    if not isinstance(out.mean, dict):
        return _rms(out, out.mean, var)
    kept = [key for key, mean in out.mean.items() if mean is not None]
    return {key: _rms(out, out.mean[key], var[key]) for key in kept}


def _layer(source: Any, name: str, importer: str) -> dict[str, Any]:
    """The attributes of the wrapper, of those around an environment, that has one."""
    sources.expect(source, importer)
    for layer in sources.layers(source):
        if name in layer:
            return layer
    others = sorted(sources.readers(source) - {importer})
    raise ValueError(
        f"The {type(source).__name__} has no {name!r}, nor has what it wraps: it "
        "normalizes something else, or nothing yet"
        + "".join(f"; interop.{other} reads it" for other in others)
        + "."
    )


def _of_rms(rms: Any, epsilon: float) -> Moved:
    mean, var, count = (field(rms, name) for name in ("mean", "var", "count"))
    return moved.moved(mean, var, count, ADDED_TO_VARIANCE, epsilon)


def _joined(each: dict[str, Moved]) -> Moved:
    """One tree out of the statistics of the entries of a dict."""
    counts = {key: number(one.count) for key, one in each.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"The entries have the counts {counts}; expected one for all.")
    mean, variance, std = (
        {key: getattr(one, name) for key, one in each.items()}
        for name in ("mean", "variance", "std")
    )
    return Moved(mean, variance, std, next(iter(counts.values()), 0.0))


def _rms(out: Moved, mean: PyTree, var: PyTree) -> dict[str, Any]:
    return {"mean": one_array(mean), "var": one_array(var), "count": float(out.count)}
