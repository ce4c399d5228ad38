# SPDX-License-Identifier: Apache-2.0
"""The port of `RunningMeanStd`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_norm import arguments, buffers, validation
from nnx_norm.buffers import Buffers
from nnx_norm.distributed import AxisName
from nnx_norm.extended import double
from nnx_norm.lazy import LazyStatistics
from nnx_norm.processes import refuse_apart, refuse_local
from nnx_norm.scaling import AddedStd, Scale, Unscale, clipped, leafwise
from nnx_norm.spec import Spec, parse
from nnx_norm.state_dicts import is_numbers

PyTree = Any


class RunningMeanStd(LazyStatistics):
    """Running mean and variance with one prior sample, or an exponential average.

    NaN and infinity enter the statistics, as in the source; `Normalizer` skips them.
    Pass the module to the outermost jit as an argument: closed over, it keeps the
    statistics of the time of compilation. Without a `shape` its first batch can't be
    one of a scan or a cond, which keep the structure of what they carry.

    Attributes:
      mean, var: Trees of float32 arrays `[*feat]`; None while the shape is unknown.
      count: float32 scalar, the nearest to the number of samples, see `to_numpy`.
      residual, tail: What float32 can't hold of these three, by name.

    Example:
      >>> stats = RunningMeanStd(1, initial_count=0)
      >>> stats.record_moments(jnp.array([[1.0], [3.0]]))
      >>> stats.mean.get_value().tolist(), stats.var.get_value().tolist()
      ([2.0], [1.0])
      >>> [round(y, 4) for y in stats.normalize(jnp.array([3.0])).tolist()]
      [1.0]
    """

    _centred = True

    def __init__(
        self,
        shape: Any = None,
        *,
        epsilon: float = 1e-5,
        clamp_value: float | None = None,
        ema_decay: float | None = None,
        axis_name: AxisName | None = None,
        initial_count: float = 1,
    ) -> None:
        """Create statistics of `initial_count` prior samples of mean 0, variance 1.

        Args:
          shape: Feature shape, or a tree of them, as in `Normalizer`. None takes it
            from the first batch, without its leading axis.
          epsilon: Added to the variance before the root.
          clamp_value: Normalized values are clamped to plus or minus this; None
            doesn't.
          ema_decay: d in [0, 1]: mean and var become `d * old + (1 - d) * batch`
            each, whatever the batch's size, and the count stands still. The movement
            of the mean is no part of var then, as in the source; in
            `Normalizer(decay=...)` it is.
          axis_name: Mapped axis or axes that `record_moments` combines over.
          initial_count: Weight of the prior; 0 starts empty.

        Raises:
          TypeError: An argument is of another kind.
          ValueError: An argument is out of range.
        """
        number = partial(arguments.number, strict=False)
        optional = partial(_optional, number)
        most = float(np.finfo(np.float32).max)
        self.epsilon = number(epsilon, "epsilon", 0, most)
        self.clamp_value = optional(clamp_value, "clamp_value", 0)
        self.ema_decay = optional(ema_decay, "ema_decay", 0, 1)
        self.axis_name = arguments.axis_names(axis_name)
        self.initial_count = number(initial_count, "initial_count", 0, most)
        self._allocate(None if shape is None else parse(shape))

    def record_moments(self, x: PyTree) -> None:
        """Fold a batch, its leading axis running over samples.

        Under `axis_name` the batches of all devices are combined. An empty batch
        changes nothing.

        Args:
          x: Tree of arrays `[N, *feat]`.

        Raises:
          TypeError: A leaf holds no real numbers.
          ValueError: A shape doesn't fit, or `axis_name` isn't bound.
        """
        spec, samples, number = self._batch(x, "x")
        # Other devices may have samples where this one has none.
        if number or (samples and self.axis_name is not None):
            old = self._read(spec)
            refuse_local(samples, old, "x")
            new = buffers.record(
                old,
                samples,
                ema_decay=self.ema_decay,
                axis_name=self.axis_name,
            )
            self._write(spec, new)

    def _batch(self, x: PyTree, name: str) -> tuple[Spec, list[jax.Array], int]:
        """The spec, the leaves `[N, *feat]` of a batch, and N."""
        spec = self._spec_for(x, name, leading=1)
        samples = validation.samples(spec, spec.match(x, name), name)
        lead = validation.leading(spec, samples, name)
        if samples and len(lead) != 1:
            raise ValueError(
                f"{name} has the leading axes {lead}; expected one, (N,). Flatten time "
                f"and environments first: {name}.reshape(-1, *feat)."
            )
        return spec, samples, lead[0] if lead else 0

    def update_from_moments(self, mean: PyTree, var: PyTree, count: Any) -> None:
        """Fold the moments of a batch; every digit of float64 NumPy arrays counts.

        Args:
          mean: Tree of arrays `[*feat]`, or one number for every feature.
          var: The same: population variances.
          count: Number of samples; 0 changes nothing.

        Raises:
          ValueError: A shape doesn't fit, or a value is not finite, or a variance or
            the count negative.
        """
        example = np.asarray(mean) if is_numbers(mean) else mean
        spec = self._spec_for(example, "mean", leading=0)
        filled = partial(arguments.float64_leaves, spec, spec.features)
        means, variances = filled(mean, "mean"), filled(var, "var", minimum=0.0)
        n = arguments.float64_array(count, (), "count", minimum=0.0)
        old = self._read(spec)
        refuse_apart((means, variances, n), old)
        with double():
            batch = jax.tree.map(jnp.asarray, Buffers(means, variances, n))
            new = buffers.update(old, batch, ema_decay=self.ema_decay)
        self._write(spec, new)

    def normalize(self, x: PyTree, un_norm: bool = False) -> PyTree:
        """`(x - mean) / sqrt(var + epsilon)`, clamped; or the way back.

        Args:
          x: Tree of arrays `[*lead, *feat]`, any leading axes.
          un_norm: Clamp `x` and map it back: `x * sqrt(var + epsilon) + mean`. So
            it inverts the other inside the clamp; beyond, it ends at its edge.

        Returns:
          The tree, in the float dtypes of `x` (float32 for integers).

        Raises:
          TypeError: A leaf holds no real numbers.
          ValueError: A shape doesn't fit.
        """
        # While the shape is unknown, features of shape () fit any input.
        example = jax.tree.map(lambda _: 0.0, x) if self.is_lazy else x
        spec = self._spec_for(example, "x", leading=0)
        match = spec.match(x, "x")
        leaves = validation.samples(spec, match, "x")
        if not self.is_lazy:
            validation.common_leading(spec, leaves, "x")
        parts = lax.stop_gradient(self._read(spec))
        one = (Unscale if un_norm else Scale)(self._centred, self.clamp_value)
        stats = parts.value.mean, parts.residual.mean, parts.value.var
        divisor = AddedStd(self.epsilon)
        scaled = leafwise(one, divisor, leaves, *stats, parts.value.count)
        return match.replace(scaled, others=True)

    def __call__(self, x: PyTree) -> PyTree:
        """`normalize(x)`, so that it is a layer of `nnx.Sequential`."""
        return self.normalize(x)

    def maybe_clamp(self, x: Any) -> Any:
        """`x` clamped to plus or minus `clamp_value`, or as it is if that is None.

        Args:
          x: Array of any shape.

        Returns:
          Array of that shape.
        """
        return clipped(x, self.clamp_value)


def _optional(check: Callable[..., float], value: Any, *bounds: Any) -> float | None:
    return None if value is None else check(value, *bounds)
