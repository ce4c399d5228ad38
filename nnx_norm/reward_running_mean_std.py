# SPDX-License-Identifier: Apache-2.0
"""The port of `RewardRunningMeanStd`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_norm import arguments, masks, validation
from nnx_norm.distributed import AxisName
from nnx_norm.lazy import saved_shapes
from nnx_norm.returns import RunningReturn, advance
from nnx_norm.running_mean_std import RunningMeanStd
from nnx_norm.spec import Spec

PyTree = Any


class RewardRunningMeanStd(RunningMeanStd):
    """Running variance of the discounted return, step by step, to scale rewards.

    The return is cut one step early, as in the source: at the step that ends an
    episode the history is dropped before the reward is added, and that reward leaks
    into the next episode. `RewardNormalizer` cuts it right, at truncations too.

    Attributes:
      discounted_reward: Running return, a tree of float32 arrays `[N, *shape]`; None
        before the first step unless `num_envs` is given. A Variable, so that it is in
        every checkpoint.
      discounted_residual: What float32 can't hold of it.

    Example:
      >>> stats = RewardRunningMeanStd(gamma=0.5)
      >>> stats.record_reward(jnp.array([1.0, 2.0]), jnp.array([False, False]))
      >>> stats.record_reward(jnp.array([1.0, 2.0]), jnp.array([False, True]))
      >>> stats.discounted_reward.get_value().tolist()
      [1.5, 2.0]
    """

    _centred = False  # that would change the task

    def __init__(
        self,
        shape: Any = (),
        *,
        gamma: float,
        epsilon: float = 1e-5,
        clamp_value: float | None = None,
        ema_decay: float | None = None,
        axis_name: AxisName | None = None,
        initial_count: float = 1,
        num_envs: int | None = None,
    ) -> None:
        """Create statistics of `initial_count` prior returns of variance 1.

        Args:
          shape: Shape of one environment's reward, or a tree of shapes; None takes it
            from the first rewards.
          gamma: Discount, in [0, 1].
          epsilon: See `RunningMeanStd`, as the others.
          clamp_value: See there.
          ema_decay: See there.
          axis_name: See there.
          initial_count: See there.
          num_envs: Number of environments. Given (with `shape`), the running return
            exists from the start, so that the module can be a scan carry.

        Raises:
          TypeError: An argument is of another kind.
          ValueError: An argument is out of range.
        """
        super().__init__(
            shape,
            epsilon=epsilon,
            clamp_value=clamp_value,
            ema_decay=ema_decay,
            axis_name=axis_name,
            initial_count=initial_count,
        )
        self.gamma = arguments.number(gamma, "gamma", 0, 1, strict=False)
        self.discounted_reward = RunningReturn(None)
        self.discounted_residual = RunningReturn(None)
        if num_envs is not None:
            if self.is_lazy:
                raise ValueError("num_envs needs shape: give both, or neither.")
            self._restart(arguments.size(num_envs, "num_envs"))

    def _restart(self, num_envs: int) -> None:
        zeros = [self._zeros(self._spec(), num_envs) for _ in range(2)]
        self._set_returns(self._spec(), *zeros)

    def _zeros(self, spec: Spec, num_envs: int) -> list[jax.Array]:
        return [jnp.zeros((num_envs, *shape), jnp.float32) for shape in spec.features]

    def record_reward(self, reward: PyTree, terminated: Any) -> None:
        """Advance the running return by one step and fold it.

        `R = reward` at first, then `R = R * gamma * (1 - terminated) + reward`, one
        sample per environment. Another number of environments restarts the returns
        and keeps the statistics.

        Args:
          reward: Tree of arrays `[N, *shape]`, N environments.
          terminated: Bool array `[N]`, or zeros and ones; or shaped like the reward.
            Under jit every other number than 0 is an end.

        Raises:
          TypeError: A leaf holds no real numbers.
          ValueError: A shape doesn't fit, a flag is neither 0 nor 1, or `axis_name`
            isn't bound.
        """
        spec, rewards, num_envs = self._batch(reward, "reward")
        ended = _flags(terminated, rewards, num_envs)
        if not num_envs:
            return
        old = self._returns(spec, num_envs)
        new, rest = advance(*old, rewards, ended, self.gamma)
        self.record_moments(spec.unflatten(new))
        self._set_returns(spec, new, rest)

    def _returns(self, spec: Spec, num_envs: int) -> tuple[list[Any], list[Any]]:
        """The running returns and their residuals; zeros where none fit."""
        zeros = self._zeros(spec, num_envs)

        def fitting(tree: PyTree) -> list[Any] | None:
            leaves = jax.tree.leaves(tree)
            fit = [np.shape(v) for v in leaves] == [v.shape for v in zeros]
            return [jnp.asarray(v, jnp.float32) for v in leaves] if fit else None

        value = fitting(self.discounted_reward.get_value())
        residual = fitting(self.discounted_residual.get_value())
        return value or zeros, (value and residual) or zeros

    def _set_returns(self, spec: Spec, value: list[Any], rest: list[Any]) -> None:
        self.discounted_reward.set_value(spec.unflatten(value))
        self.discounted_residual.set_value(spec.unflatten(rest))

    def _materialize(self, state: Any) -> None:
        super()._materialize(state)
        saved = jax.tree.leaves(saved_shapes(state, "discounted_reward"))
        if saved and self.discounted_reward.get_value() is None:
            self._restart(saved[0].shape[0])


def _flags(terminated: Any, rewards: list[jax.Array], num_envs: int) -> jax.Array:
    array = validation.as_array(terminated, "terminated")
    shapes = {reward.shape for reward in rewards}
    if array.shape != (num_envs,) and shapes != {array.shape}:
        raise ValueError(
            f"terminated has shape {array.shape}; expected one flag per environment, "
            f"({num_envs},), or the shape of the rewards {sorted(shapes)}."
        )
    return masks.as_bool(array, "terminated")
