# SPDX-License-Identifier: Apache-2.0
"""Running returns: their Variable type, and how rollouts and the ports go on."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nnx_norm import fold
from nnx_norm.explicit import automatic, features_of, lies_on_explicit
from nnx_norm.extended import double, join, split
from nnx_norm.samples import align_leading


class RunningReturn(nnx.Variable):
    """Variable type of running returns: one per environment, sharded like them.

    Example:
      >>> from nnx_norm import RewardNormalizer
      >>> state = nnx.state(RewardNormalizer(0.99, num_envs=4), RunningReturn)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]
      [(4,)]
      >>> print(RewardNormalizer(0.99).running_return.get_value())
      None
    """

    def get_value(self, **kwargs: Any) -> Any:
        """The running returns; None before the first update without `num_envs`."""
        value = super().get_value(**kwargs)
        return None if isinstance(value, NumEnvsNotGiven) else value

    def set_value(self, value: Any, **kwargs: Any) -> None:
        """Write them; None, as it was read, leaves the word for none yet."""
        if value is not None or not isinstance(super().get_value(), NumEnvsNotGiven):
            super().set_value(value, **kwargs)


@jax.tree_util.register_static
class NumEnvsNotGiven:
    """Stands for running returns until an update tells how many there are.

    An empty node rather than None, for the sake of its name: it is what JAX says where
    a module that must keep its structure, such as the carry of a scan, doesn't.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumEnvsNotGiven)

    def __hash__(self) -> int:
        return hash(NumEnvsNotGiven)

    def __repr__(self) -> str:
        return "NumEnvsNotGiven()"


@partial(jax.jit, static_argnames=("gamma",))
def advance(
    returns: list[jax.Array],
    residuals: list[jax.Array],
    rewards: list[jax.Array],
    ended: jax.Array,
    gamma: float,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`R * gamma * (1 - ended) + reward`, in float64 grade.

    Where an episode ended its history is dropped before the reward of that very step
    is added: the convention of the ports, one step earlier than `RewardNormalizer`'s.

    Args:
      returns: float32 arrays `[N, *shape]`.
      residuals: What float32 can't hold of them, the same shapes.
      rewards: Arrays of these shapes, of any real dtype.
      ended: Bool array `[N]`, or of the shape of every reward.
      gamma: Discount.

    Returns:
      New returns and residuals.

    Example:
      >>> old, rest = [jnp.float32([4, 4])], [jnp.float32([0, 0])]
      >>> rewards, ended = [jnp.ones(2)], jnp.array([False, True])
      >>> [v.tolist() for v in advance(old, rest, rewards, ended, 0.5)[0]]
      [[3.0, 1.0]]
    """

    def step(value: Any, rest: Any, reward: Any, ended: Any) -> Any:
        # A product with zero would carry a NaN over into the next episode.
        history = jnp.where(align_leading(ended, value), 0.0, join(value, rest))
        return split(history * gamma + reward.astype(jnp.float64))

    def steps(returns: Any, residuals: Any, rewards: Any, ended: Any) -> Any:
        leaves = zip(returns, residuals, rewards, strict=True)
        pairs = [step(*leaf, ended) for leaf in leaves]
        return [value for value, _ in pairs], [rest for _, rest in pairs]

    arrays = returns, residuals, lax.stop_gradient(rewards), ended
    after = [
        was if lies_on_explicit(was) else reward
        for was, reward in zip(returns, rewards, strict=True)
    ]
    with double():
        return automatic(steps, *arrays, like=(after, after))


@partial(jax.jit, static_argnames=("gamma", "rule"))
def fold_returns(
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
    """Scan the returns of a rollout and fold each of them.

    Args:
      value: Statistics of float32 leaves `[*shape]`.
      residual: Their residuals.
      start: Running returns `[B, *shape]`.
      rewards: Arrays `[T, B, *shape]`.
      done: Bool `[T, B]`: the step ended its episode.
      mask: None, or bool `[T, B]`: a masked step is as if absent.
      gamma: Discount.
      rule: How to fold.

    Returns:
      New statistics, their residuals, and the running returns after the last step.
    """
    step = partial(_fold_returns, gamma=gamma, rule=rule)
    after = [
        was if lies_on_explicit(was) else features_of(r, 1)
        for was, r in zip(start, rewards, strict=True)
    ]
    arrays = value, residual, start, rewards, done, mask
    return automatic(step, *arrays, like=(value, residual, after))


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
    valid = jnp.ones_like(done) if mask is None else mask
    last, returns = _scan_returns(start, rewards, done & valid, valid, gamma, rule.skip)
    value, residual = fold.fold_inputs(
        value, residual, returns, mask, None, lead=2, rule=rule
    )
    return value, residual, last


def _scan_returns(
    start: list[jax.Array],
    rewards: list[jax.Array],
    ends: jax.Array,
    valid: jax.Array,
    gamma: float,
    skip: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Running returns `[B, *shape]` after the last step, and at every step.

    With `skip` a step that float32 can't hold, for its reward or for the return that it
    would make, leaves the running return as it is, and is NaN among those of all steps,
    for the fold to leave out and to count.

    In float64: near 1, gamma rounded to float32 is off by more than what is left to 1
    allows (at 0.9999 the return of a constant reward would be off by 2e-4).
    """

    def step(
        carry: list[jax.Array], now: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        rewards, ends, valid = now
        pairs = zip(carry, rewards, strict=True)
        new = [gamma * g + r.astype(g.dtype) for g, r in pairs]
        read = valid & _finite([g.astype(jnp.float32) for g in new]) if skip else valid

        def each(mask: jax.Array, ours: Any, others: Any) -> list[jax.Array]:
            trees = zip(ours, others, strict=True)
            return [jnp.where(align_leading(mask, a), a, b) for a, b in trees]

        returns = each(read, new, carry)
        after = [jnp.where(align_leading(ends, g), 0.0, g) for g in returns]
        told = [g.astype(jnp.float32) for g in returns]
        lost = [jnp.full_like(g, jnp.nan) for g in told]
        return after, each(read | ~valid, told, lost) if skip else told

    with double():
        # Zeros out of the data, so that the carry varies over a mesh as they do.
        odd = [jnp.isnan(jnp.sum(r, axis=0)) for r in rewards]
        zero = [(v & ~v).astype(jnp.float64) for v in odd]  # where() drops a sharding
        carry = [g.astype(jnp.float64) + z for g, z in zip(start, zero, strict=True)]
        last, returns = lax.scan(step, carry, (rewards, ends, valid))
        return [g.astype(jnp.float32) for g in last], returns


def _finite(leaves: list[jax.Array]) -> jax.Array:
    """Bool `[B]`: the environments whose leaves `[B, *shape]` are all finite."""
    parts = [jnp.all(jnp.isfinite(v), axis=tuple(range(1, v.ndim))) for v in leaves]
    return jnp.all(jnp.stack(parts), axis=0)
