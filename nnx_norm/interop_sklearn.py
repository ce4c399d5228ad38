# SPDX-License-Identifier: Apache-2.0
"""Statistics of scikit-learn's StandardScaler, in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnx_norm import imported, sources
from nnx_norm.imported import Module
from nnx_norm.moved import Moved, exported, field, float64, one_array, optional

FITTED = ("with_mean", "with_std", "n_features_in_", "n_samples_seen_")
FITTED += ("mean_", "scale_", "var_")
"""What tells a fitted `StandardScaler` from other scalers with a `scale_`."""


def from_sklearn(source: Any, *, into: Module | None = None) -> Any:
    """The statistics of a scikit-learn `StandardScaler`, to normalize as it does.

    It divides by `scale_`, which is 1 for constant features: their variance becomes 1
    here, and shrinks as samples come. Features with NaN have counts of their own there;
    the smallest stands for all.

    Args:
      source: A fitted `StandardScaler`. One with `with_mean=False` gets the mean 0.
      into: As in `from_gymnasium`. None makes a `Normalizer`.

    Returns:
      `into`, or a new normalizer.

    Raises:
      TypeError: `into` is no such module.
      ValueError: It is another transformer (`MinMaxScaler`, `RobustScaler`, a
        pipeline), the scaler is not fitted, or its statistics don't fit `into`.

    Example:
      >>> import types
      >>> scaler = types.SimpleNamespace(
      ...     mean_=np.zeros(2), var_=np.float64([4, 0]), scale_=np.float64([2, 1]),
      ...     n_samples_seen_=10, n_features_in_=2, with_mean=True, with_std=True,
      ... )
      >>> from_sklearn(scaler).normalize(np.float32([2.0, 3.0])).tolist()
      [1.0, 3.0]
    """
    sources.expect(source, "from_sklearn")
    missing = [name for name in FITTED if not sources.has(source, name)]
    if missing:
        raise ValueError(
            f"The {type(source).__name__} is no fitted StandardScaler: it has no "
            f"{', '.join(missing)}. Of scikit-learn's transformers this reads that one "
            "only; take it out of a Pipeline first."
        )
    count = np.min(float64(field(source, "n_samples_seen_")))
    shape = (int(field(source, "n_features_in_")),)
    scaled, centred = optional(source, "with_std"), optional(source, "with_mean")
    std = float64(field(source, "scale_")) if scaled else np.ones(shape)
    mean = float64(field(source, "mean_")) if centred else np.zeros(shape)
    variance = float64(optional(source, "var_", std**2))
    return imported.normalizer(Moved(mean, variance, std, count), into, 1e-6)


def to_sklearn(module: Any) -> dict[str, Any]:
    """The attributes of a fitted scikit-learn `StandardScaler`.

    `vars(scaler).update(to_sklearn(norm))` makes one of `StandardScaler()`. The next
    `partial_fit` finds `scale_` anew from `var_`, without our epsilon.

    Args:
      module: A `Normalizer` or a `RunningMeanStd` of one array `[F]`.

    Returns:
      `mean_`, `var_`, `scale_`, `n_samples_seen_` and `n_features_in_`.

    Raises:
      ValueError: It has a tree or another number of axes.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=1.0, variance=4.0, count=10)
      >>> to_sklearn(norm)["scale_"].tolist(), to_sklearn(norm)["n_features_in_"]
      ([2.0], 1)
    """
    out = exported(module)
    if np.ndim(one_array(out.mean)) != 1:
        raise ValueError(
            f"The statistics have the shape {np.shape(out.mean)}; a StandardScaler has "
            "one axis of features."
        )
    return {
        "mean_": out.mean,
        "var_": out.variance,
        "scale_": out.std,
        "n_samples_seen_": np.int64(np.rint(out.count)),
        "n_features_in_": len(out.mean),
    }
