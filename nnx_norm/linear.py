# SPDX-License-Identifier: Apache-2.0
"""Normalizers inside linear layers: a policy that is deployed without them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_norm import concrete
from nnx_norm.moved import exported
from nnx_norm.state_dicts import as_numpy


def fold_into_linear(normalizer: Any, linear: nnx.Linear) -> nnx.Linear:
    """The linear layer that takes raw observations, for a normalizer ahead of it.

        y = Wᵀ (x - mean) / std + b = (W / std)ᵀ x + (b - Wᵀ mean / std)

    Computed in float64 and rounded once. With inputs far from zero, `|mean| >> std`,
    the two terms cancel in the layer, which the normalizer avoids: the error is about
    `1 + |mean| / std` roundings of the layer's dtype.

    Args:
      normalizer: A `Normalizer` or a `RunningMeanStd` of one array `[in_features]`,
        without a clip.
      linear: The layer behind it.

    Returns:
      A new layer with the settings, kernel shape and dtypes of `linear`, and a bias in
      any case. It keeps the statistics of now.

    Raises:
      TypeError: `normalizer` is none, or `linear` is no `nnx.Linear`.
      ValueError: The normalizer clips, excludes or has several leaves, its shape
        isn't that of the layer's input, or this is inside jit, which has no numbers.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=3.0, variance=4.0, count=10)
      >>> linear = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> linear.kernel.set_value(jnp.array([[6.0]]))
      >>> raw = fold_into_linear(norm, linear)
      >>> raw.kernel.get_value().tolist(), raw.bias.get_value().tolist()
      ([[3.0]], [-9.0])
    """
    mean, std = _affine(normalizer, linear, linear_name="in_features", clips=True)
    kernel, bias = _weights(linear)
    return _with(linear, kernel / std[:, None], bias - (mean / std) @ kernel)


def fold_denormalize_into_linear(linear: nnx.Linear, normalizer: Any) -> nnx.Linear:
    """The linear layer that gives values in their own units.

    For a layer whose output goes through `normalizer.denormalize`, as that of a value
    head trained on normalized targets:
    `y = std · (Wᵀ x + b) + mean`; of a `RewardNormalizer` there is no mean.
    Computed in float64 and rounded once.

    Args:
      linear: The layer.
      normalizer: A `Normalizer`, `RewardNormalizer` or `RunningMeanStd` of one array
        `[out_features]`; or of shape `()` for an output of one feature. The clip of a
        `Normalizer` is no part of `denormalize`.

    Returns:
      As `fold_into_linear`.

    Raises:
      TypeError: As `fold_into_linear`.
      ValueError: As `fold_into_linear`; a `RunningMeanStd` that clamps is refused.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(1)
      >>> norm.set_statistics(mean=3.0, variance=4.0, count=10)
      >>> linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
      >>> linear.kernel.set_value(jnp.array([[6.0]]))
      >>> head = fold_denormalize_into_linear(linear, norm)
      >>> head.kernel.get_value().tolist(), head.bias.get_value().tolist()
      ([[12.0]], [3.0])
    """
    mean, std = _affine(normalizer, linear, linear_name="out_features", clips=False)
    kernel, bias = _weights(linear)
    return _with(linear, kernel * std, bias * std + mean)


def _affine(
    normalizer: Any, linear: Any, *, linear_name: str, clips: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and divisor `[features]` of a normalizer that a linear layer can hold."""
    if not isinstance(linear, nnx.Linear):
        raise TypeError(f"linear is a {type(linear).__name__}; expected nnx.Linear.")
    who = "fold_into_linear" if clips else "fold_denormalize_into_linear"
    concrete.refuse_traced([linear.kernel.get_value()], who)
    found, name = exported(normalizer, who), type(normalizer).__name__
    clip = getattr(normalizer, "clip", None) if clips else None
    clip = getattr(normalizer, "clamp_value", None) if clip is None else clip
    if clip is not None:
        raise ValueError(
            f"The {name} clips at {clip:g}, which a linear layer can't. Deploy "
            "both, or train without a clip."
        )
    if getattr(getattr(normalizer, "spec", None), "excluded_names", ()):
        raise ValueError(f"The {name} excludes leaves; expected one array, normalized.")
    if not isinstance(found.mean, (np.ndarray, np.generic)):
        raise ValueError(
            f"The {name} has a tree of leaves; expected one array. Concatenate its "
            "outputs in the model, and deploy both."
        )
    features = getattr(linear, linear_name)
    scalar = linear_name == "out_features" and features == 1 and found.mean.shape == ()
    if found.mean.shape != (features,) and not scalar:
        raise ValueError(
            f"The {name} has the shape {found.mean.shape} and the layer {linear_name} "
            f"{features}; expected ({features},), and no population."
        )
    # A RewardNormalizer and a RewardRunningMeanStd scale only.
    centred = not hasattr(normalizer, "gamma")
    mean, std = np.reshape(found.mean, -1), np.reshape(found.std, -1)
    return mean if centred else np.zeros_like(mean), std


def _weights(linear: nnx.Linear) -> tuple[np.ndarray, np.ndarray]:
    """Kernel and bias in float64; zeros for the bias that a layer doesn't have."""
    kernel = as_numpy(linear.kernel.get_value()).astype(np.float64)
    if linear.bias is None:
        return kernel, np.zeros(linear.out_features)
    return kernel, as_numpy(linear.bias.get_value()).astype(np.float64)


def _with(linear: nnx.Linear, kernel: np.ndarray, bias: np.ndarray) -> nnx.Linear:
    """A copy of a layer with other weights, in its own dtypes."""
    new, dtype = nnx.clone(linear), linear.kernel.get_value().dtype
    new.kernel.set_value(jnp.asarray(kernel.astype(dtype)))
    value = jnp.asarray(bias.astype(dtype))
    if new.bias is None:
        new.bias, new.use_bias = nnx.Param(value), True
    else:
        new.bias.set_value(value)
    return new
