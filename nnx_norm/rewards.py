# SPDX-License-Identifier: Apache-2.0
"""The reward normalizer: rewards over the standard deviation of their returns."""

from __future__ import annotations

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_norm import arguments, fold, masks, settings, validation
from nnx_norm.distributed import AxisName
from nnx_norm.returns import NumEnvsNotGiven, RunningReturn, fold_returns
from nnx_norm.scaling import ReturnStd, Scale, Unscale, leafwise
from nnx_norm.spec import parse
from nnx_norm.statistics import RunningStatistics

PyTree = Any

SET = ("gamma", "epsilon", "nonfinite")
MAY_BE_UNSET = ("clip", "axis_name")


class RewardNormalizer(RunningStatistics):
    """Divide rewards by the standard deviation of the discounted return.

    Each environment carries a running return `R[t] = γ R[t-1] + r[t]` that ends
    after the last reward of an episode, terminated or truncated; every `R[t]` is one
    sample. Rewards are never centred: that would change the task. The divisor is 1
    while fewer than two different returns are known, so the first reward doesn't
    explode. `to_dict` and `copy_from` leave the running returns out. Without
    `num_envs` the module can't be carried through a scan before its first update, and
    an Orbax restore into it drops the running returns of the checkpoint. Pass the
    module to the outermost jit as an argument: closed over, it keeps the statistics of
    the time of compilation.

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

    _of = "returns"

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
            start, so that the module can be a scan carry and a restore template. In
            a scan a normalizer without says "running_return is NumEnvsNotGiven".
          epsilon: Floor of the variance, in squared units of the reward.
          clip: Normalized rewards are clipped to `[-clip, clip]`; None doesn't.
          axis_name: Mapped axis or axes to reduce over in `update`.
          nonfinite: "skip" leaves steps with a NaN or infinite reward out and counts
            them, and steps whose return float32 can't hold; the running returns stand
            still there. "propagate" lets them in.

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
            NumEnvsNotGiven() if num_envs is None else self._no_returns(num_envs)
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
        statistics; without any step or environment nothing changes. While frozen
        nothing is read, and the running returns stand still.
        All or nothing: a call that raises has changed nothing.

        Args:
          rewards: Tree of arrays `[T, B, *shape]`.
          terminated: Array `[T, B]` of bool, or of zeros and ones: the step ended its
            episode. Under jit every other number than 0 is an end.
          truncated: Such an array: the step was cut off by a limit.
          mask: Bool array `[T, B]`. A masked step is as if absent (an autoreset's
            dummy step): neither its reward nor its ends are read.

        Raises:
          TypeError: A reward or flag is no number, or the mask isn't bool.
          ValueError: A shape doesn't fit, a flag that is read is neither 0 nor 1, or
            `axis_name` isn't bound.
        """
        _, samples = validation.matched(self.spec, rewards, "rewards")
        if not samples:
            return
        lead = validation.leading(self.spec, samples, "rewards")
        if len(lead) != 2:
            raise ValueError(
                f"rewards have the leading axes {lead}; expected (T, B): time, then "
                "environments. For one step write rewards[None]."
            )
        valid = masks.mask_array(mask, lead, prefix=False)
        done = masks.flags(terminated, lead, "terminated", valid)
        if truncated is not None:
            done |= masks.flags(truncated, lead, "truncated", valid)
        old = self._statistics_here(samples, "rewards")
        if self.frozen or (0 in lead and self.axis_name is None):
            return
        rule = fold.Rule(skip=self.nonfinite == "skip", axis_name=self.axis_name)
        start = jax.tree.leaves(self._returns_of(lead[1]))
        read = lax.stop_gradient((start, samples, done, valid))
        *new, returns = fold_returns(*old, *read, gamma=self.gamma, rule=rule)
        self._write(*new)
        if 0 not in lead:  # other devices may have had steps
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
        return self._scaled(Scale(False, self.clip), rewards)

    def denormalize(self, rewards: PyTree) -> PyTree:
        """`rewards * std`, the inverse of `normalize` inside the clip.

        Args:
          rewards: Tree of arrays `[*lead, *shape]`; not clipped.

        Returns:
          The tree, in the float dtypes of the rewards.

        Raises:
          ValueError: The rewards don't fit `shape`.
        """
        return self._scaled(Unscale(False, None), rewards)

    def _scaled(self, one: Scale | Unscale, rewards: PyTree) -> PyTree:
        match, samples = validation.matched(self.spec, rewards, "rewards")
        value, rest = self._statistics_here()
        stats = value.mean, rest.mean, value.M2, value.counter
        return match.replace(leafwise(one, self._divisor, samples, *stats), others=True)

    def reset(self) -> None:
        """Forget every return and start the running returns anew."""
        super().reset()
        returns = self.running_return.get_value()
        if returns is not None:
            self.running_return.set_value(jax.tree.map(jnp.zeros_like, returns))

    def _add_members(self, members: tuple[int, ...]) -> None:
        super()._add_members(members)
        returns = self.running_return.get_value()
        if returns is not None:
            self.running_return.set_value(
                jax.tree.map(lambda v: jnp.zeros(members + v.shape, v.dtype), returns)
            )

    @property
    def _divisor(self) -> ReturnStd:
        return ReturnStd(self.epsilon)

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*SET, *MAY_BE_UNSET)}
        leaves = jax.tree.leaves(self.running_return.get_value())
        axis = self.counter.get_value().ndim  # behind the members of a population
        num_envs = leaves[0].shape[axis] if leaves else None
        shape = settings.shape_to_json(self.spec)
        return own | {"num_envs": num_envs, "shape": shape}

    @classmethod
    def from_dict(cls, d: Any) -> Self:
        """A normalizer with the settings and the statistics that `to_dict` gave.

        Args:
          d: Either form of `to_dict`, with arrays or the lists that JSON makes of
            them; or an open `.npz` file.

        Returns:
          A new normalizer, not frozen, whose running returns start at zero.

        Raises:
          ValueError: A setting or statistic is missing or contradicts another, there
            is a key of something else, or the normalizer was made for dataclasses or
            named tuples: make one for them, then `load_dict`.

        Example:
          >>> norm = RewardNormalizer(0.99, num_envs=4, clip=5.0)
          >>> again = RewardNormalizer.from_dict(norm.to_dict(flat=True))
          >>> again.gamma, again.clip, again.running_return.get_value().shape
          (0.99, 5.0, (4,))
        """
        given = settings.constructor_arguments(d, SET, (*MAY_BE_UNSET, "num_envs"))
        shape = settings.shape_from_json(given.pop("shape"))
        new = cls(given.pop("gamma"), shape=shape, **given)
        new._add_members(np.shape(d["count"]) if "count" in d else ())
        new.load_dict(d)
        settings.refuse_other_std(d, new.to_dict(flat=True))
        return new
