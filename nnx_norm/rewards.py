# SPDX-License-Identifier: Apache-2.0
"""The reward normalizer: rewards over the standard deviation of their returns."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_norm import arguments, fold, validation
from nnx_norm.distributed import AxisName
from nnx_norm.extended import double
from nnx_norm.returns import RunningReturn
from nnx_norm.samples import align_leading, float_dtype
from nnx_norm.spec import parse
from nnx_norm.statistics import RunningStatistics, variance_of

PyTree = Any


class RewardNormalizer(RunningStatistics):
    r"""Divide rewards by the standard deviation of the discounted return.

    Each environment carries a running return $R_t = \gamma R_{t-1} + r_t$ that ends
    after the last reward of an episode, terminated or truncated; every $R_t$ is one
    sample. Rewards are never centred: that would change the task. The divisor is 1
    while fewer than two different returns are known, so the first reward doesn't
    explode. `to_dict` and `copy_from` leave the running returns out.

    Attributes:
      mean, M2: Moments of the returns, trees of float32 arrays `[*shape]`.
      counter, skipped: float32 scalars; `count` gives the exact number.
      running_return: Tree of float32 arrays `[B, *shape]`, None before the first
        update if `num_envs` isn't given.

    Example:
      >>> norm = RewardNormalizer(gamma=0.5)
      >>> rewards = jnp.array([[1.0], [2.0], [3.0], [4.0], [5.0]])  # [T=5, B=1]
      >>> ends = jnp.array([[False], [False], [True], [False], [False]])
      >>> norm.update(rewards, ends)
      >>> norm.count, float(norm.variance), float(norm.normalize(1.0))
      (5, 4.0, 0.5)

    References:
      Engstrom et al., *Implementation Matters in Deep Policy Gradients*, ICLR 2020
      (reward scaling); the end of an episode is placed after its last reward here.
    """

    def __init__(
        self,
        gamma: float,
        *,
        shape: Any = (),
        num_envs: int | None = None,
        epsilon: float = 1e-8,
        clip: float | None = None,
        axis_name: AxisName | None = None,
        nonfinite: str = "skip",
    ) -> None:
        """Create a normalizer that has seen no reward.

        Args:
          gamma: The agent's discount, in [0, 1].
          shape: Shape of one environment's reward, or a tree of shapes, as in
            `Normalizer`; one scale per element.
          num_envs: Number of environments. Given, the running returns exist from the
            start, so that the module can be a scan carry and a restore template.
          epsilon: Floor of the variance, in squared units of the reward.
          clip: Normalized rewards are clipped to `[-clip, clip]`; None doesn't.
          axis_name: Mapped axis or axes to reduce over in `update`.
          nonfinite: "skip" leaves steps with a NaN or infinite reward out and counts
            them; "propagate" lets them in.

        Raises:
          TypeError: An argument is of another kind.
          ValueError: An argument is out of range.
        """
        check = arguments.number
        self.gamma = check(gamma, "gamma", 0, 1, strict=False)
        self.epsilon = arguments.positive(epsilon, "epsilon")
        self.clip = None if clip is None else check(clip, "clip", 0, strict=False)
        self.axis_name = arguments.axis_names(axis_name)
        self.nonfinite = arguments.choice(nonfinite, "nonfinite", "skip", "propagate")
        self._allocate(parse(shape))
        if num_envs is not None:
            num_envs = arguments.size(num_envs, "num_envs")
        self.running_return = RunningReturn(
            None if num_envs is None else self._no_returns(num_envs)
        )

    def _no_returns(self, num_envs: int) -> PyTree:
        shapes = [(num_envs, *shape) for shape in self.spec.features]
        return self.spec.unflatten([jnp.zeros(s, jnp.float32) for s in shapes])

    def update(
        self, rewards: PyTree, terminated: Any, truncated: Any = None, mask: Any = None
    ) -> None:
        """Fold the running returns of a rollout into the statistics.

        Call it once per rollout, in order: the running returns go on where the last
        call ended. Another number of environments starts them anew and keeps the
        statistics. While frozen nothing is read, and the running returns stand still.
        All or nothing: a call that raises has changed nothing.

        Args:
          rewards: Tree of arrays `[T, B, *shape]`.
          terminated: Array `[T, B]` of bool, or of zeros and ones: the step ended its
            episode.
          truncated: Such an array: the step was cut off by a limit.
          mask: Bool array `[T, B]`. A masked step is as if absent (an autoreset's
            dummy step): neither its reward nor its ends are read.

        Raises:
          TypeError: A reward or flag is no number, or the mask isn't bool.
          ValueError: A shape doesn't fit, or `axis_name` isn't bound.
        """
        match = self.spec.match(rewards, "rewards")
        samples = validation.samples(self.spec, match, "rewards")
        if not samples:
            return
        lead = validation.leading(self.spec, samples, "rewards")
        if len(lead) != 2:
            raise ValueError(
                f"rewards have the leading axes {lead}; expected (T, B): time, then "
                "environments. For one step write rewards[None]."
            )
        done = validation.flags(terminated, lead, "terminated")
        if truncated is not None:
            done |= validation.flags(truncated, lead, "truncated")
        valid = validation.mask_array(mask, lead, prefix=False)
        old = self._statistics_here()
        if self.frozen:
            return
        rule = fold.Rule(skip=self.nonfinite == "skip", axis_name=self.axis_name)
        start = jax.tree.leaves(self._returns_of(lead[1]))
        read = lax.stop_gradient((start, samples, done, valid))
        *new, returns = _fold_returns(*old, *read, gamma=self.gamma, rule=rule)
        self._write(*new)
        self.running_return.set_value(self.spec.unflatten(returns))

    def _returns_of(self, num_envs: int) -> PyTree:
        """The running returns, or zeros if there are none for so many environments."""
        returns = self.running_return.get_value()
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(returns)}
        return returns if sizes == {num_envs} else self._no_returns(num_envs)

    def normalize(self, rewards: PyTree) -> PyTree:
        """`rewards / std`, clipped if `clip` is set; never centred.

        Args:
          rewards: Tree of arrays `[*lead, *shape]`, any leading axes.

        Returns:
          The tree, in the float dtypes of the rewards (float32 for integers).

        Raises:
          ValueError: The rewards don't fit `shape`.
        """
        bound = self.clip

        def one(r: jax.Array, std: jax.Array) -> jax.Array:
            return r / std if bound is None else jnp.clip(r / std, -bound, bound)

        return self._scaled(one, rewards)

    def denormalize(self, rewards: PyTree) -> PyTree:
        """`rewards * std`, the inverse of `normalize` inside the clip.

        Args:
          rewards: Tree of arrays `[*lead, *shape]`; not clipped.

        Returns:
          The tree, in the float dtypes of the rewards.

        Raises:
          ValueError: The rewards don't fit `shape`.
        """
        return self._scaled(jnp.multiply, rewards)

    def _scaled(self, one: Any, rewards: PyTree) -> PyTree:
        match = self.spec.match(rewards, "rewards")
        samples = validation.samples(self.spec, match, "rewards")
        value, _ = self._statistics_here()
        out = []
        for r, M2 in zip(samples, value.M2, strict=True):
            dtype = float_dtype(r.dtype)
            scaled = one(r.astype(dtype), self._std(M2, value.counter).astype(dtype))
            kept = r.dtype if jnp.issubdtype(r.dtype, jnp.floating) else dtype
            out.append(scaled.astype(kept))
        return match.replace(out, others=True)

    def reset(self) -> None:
        """Forget every return and start the running returns anew."""
        super().reset()
        returns = self.running_return.get_value()
        self.running_return.set_value(jax.tree.map(jnp.zeros_like, returns))

    def _std(self, M2: Any, count: Any) -> Any:
        xp = np if isinstance(M2, (np.ndarray, np.generic)) else jnp
        known = (align_leading(count, M2) >= 2) & (M2 != 0)
        std = xp.sqrt(xp.maximum(variance_of(M2, count), self.epsilon))
        return xp.where(known, std, 1.0).astype(M2.dtype)

    def _settings(self) -> dict[str, Any]:
        names = ("gamma", "epsilon", "clip", "axis_name", "nonfinite")
        return {name: getattr(self, name) for name in names}


@partial(jax.jit, static_argnames=("gamma", "rule"))
def _fold_returns(
    value: fold.Statistics,
    residual: fold.Statistics,
    start: list[jax.Array],
    rewards: list[jax.Array],
    done: jax.Array,
    mask: jax.Array | None,
    *,
    gamma: float,
    rule: fold.Rule,
) -> tuple[fold.Statistics, fold.Statistics, list[jax.Array]]:
    """New statistics, their residuals, and the running returns after the last step."""
    valid = jnp.ones_like(done) if mask is None else mask
    read = valid & _finite(rewards) if rule.skip else valid
    last, returns = _scan_returns(start, rewards, done & valid, read, gamma)
    if rule.skip:  # what was not read is NaN, for the fold to leave out and to count
        returns = [
            jnp.where(align_leading(valid & ~read, g), jnp.nan, g) for g in returns
        ]
    value, residual = fold.fold_inputs(
        value, residual, returns, mask, None, lead=2, rule=rule
    )
    return value, residual, last


def _scan_returns(
    start: list[jax.Array],
    rewards: list[jax.Array],
    ends: jax.Array,
    read: jax.Array,
    gamma: float,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Running returns `[B, *shape]` after the last step, and at every step.

    In float64: near 1, gamma rounded to float32 is off by more than what is left to 1
    allows (at 0.9999 the return of a constant reward would be off by 2e-4).
    """

    def step(
        carry: list[jax.Array], now: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        rewards, ends, read = now
        returns = [
            jnp.where(align_leading(read, g), gamma * g + r.astype(g.dtype), g)
            for g, r in zip(carry, rewards, strict=True)
        ]
        after = [jnp.where(align_leading(ends, g), 0.0, g) for g in returns]
        return after, [g.astype(jnp.float32) for g in returns]

    with double():
        # Zeros out of the data, so that the carry varies over a mesh as they do.
        zero = [jnp.where(jnp.isnan(jnp.sum(r, axis=0)), 0.0, 0.0) for r in rewards]
        carry = [g.astype(jnp.float64) + z for g, z in zip(start, zero, strict=True)]
        last, returns = lax.scan(step, carry, (rewards, ends, read))
        return [g.astype(jnp.float32) for g in last], returns


def _finite(leaves: list[jax.Array]) -> jax.Array:
    """Bool `[T, B]`: the steps whose rewards are finite in all elements."""
    parts = [jnp.all(jnp.isfinite(v), axis=tuple(range(2, v.ndim))) for v in leaves]
    return jnp.all(jnp.stack(parts), axis=0)
