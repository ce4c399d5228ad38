# SPDX-License-Identifier: Apache-2.0
"""Normalizers around a Gymnasium vector environment; needs `nnx-norm[gymnasium]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_norm import env_rows
from nnx_norm.normalizer import Normalizer
from nnx_norm.rewards import RewardNormalizer
from nnx_norm.tree import keys_of, path_name

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "nnx_norm.vector_env needs gymnasium: pip install 'nnx-norm[gymnasium]'",
        name=error.name,
    ) from error

PyTree = Any


class NormalizeVectorEnv(VectorWrapper):
    """A vector environment with normalized observations and rewards, NumPy to NumPy.

    Every observation is folded once and every reward once, whichever way the
    environment resets itself (`AutoresetMode`): the terminal observations in
    `infos["final_obs"]` of same-step resets are folded and normalized like the others,
    the step that a next-step reset costs is not taken for a step of an episode, and
    with resets by `reset_mask` only the reset rows are new.

    The steps since the last fold wait, as they came, for the next one. Within a
    rollout every observation should see the same statistics: take `fold_every=None`
    and call `fold` after each training step. `fold_every=1` folds before it
    normalizes, at a reset too, as `gymnasium.wrappers.vector.NormalizeObservation`
    does; that one folds the rows again that a `reset_mask` leaves alone.

    Observations, rewards and `final_obs` are arrays of the caller's own, to write to.

    Attributes:
      observations: The normalizer of observations, or None.
      rewards: The normalizer of rewards, or None.
      raw_observations: The observations of the last step as the environment gave them.
      raw_rewards: Its rewards.

    Example:
      >>> import gymnasium
      >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=3)
      >>> envs = NormalizeVectorEnv(envs, Normalizer(4, clip=10.0))
      >>> observations, infos = envs.reset(seed=0)
      >>> for _ in range(5):
      ...     observations, *_ = envs.step(envs.action_space.sample())
      >>> envs.observations.count, observations.dtype.name
      (18, 'float32')
    """

    def __init__(
        self,
        env: VectorEnv,
        observations: Normalizer | None = None,
        rewards: RewardNormalizer | None = None,
        *,
        fold_every: int | None = 1,
    ) -> None:
        """Wrap an environment.

        Args:
          env: Vector environment of any autoreset mode; spaces of boxes, dicts and
            tuples.
          observations: Normalizer for one observation, used and updated in place.
          rewards: Normalizer for the rewards, scalars.
          fold_every: Number of steps from one fold to the next; None never folds by
            itself. Freeze the normalizers to evaluate.

        Raises:
          TypeError: A normalizer is of another kind.
          ValueError: `fold_every` is not positive, the normalizers don't fit the
            environment's observations or its scalar rewards, or are set to
            `emit="moments"` or an `axis_name`.
        """
        super().__init__(env)
        if fold_every is not None and fold_every < 1:
            raise ValueError(
                f"fold_every is {fold_every}; expected at least 1, or None."
            )
        _refuse_other("observations", observations, Normalizer)
        _refuse_other("rewards", rewards, RewardNormalizer)
        for name, module in (("observations", observations), ("rewards", rewards)):
            if module is not None:
                _refuse_settings(name, module)
        if observations is not None:
            _refuse_unfit(observations, self.single_observation_space)
        if rewards is not None and rewards.spec.shapes != ((),):
            raise ValueError(
                f"rewards was made for {rewards.spec.describe()}; expected the default "
                "shape=(): a Gymnasium environment gives one number."
            )
        self.observations, self.rewards = observations, rewards
        self.fold_every = fold_every
        self.raw_observations: PyTree = None
        self.raw_rewards: Any = None
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._next_step = AutoresetMode(mode) == AutoresetMode.NEXT_STEP
        self._ended = np.zeros(self.num_envs, bool)
        self._steps = 0
        self._seen: list[tuple[PyTree, np.ndarray]] = []
        self._earned: list[tuple[PyTree, np.ndarray]] = []
        if observations is not None:
            clip = np.inf if observations.clip is None else observations.clip
            mean = observations.mean.get_value()
            space = _unbounded(self.single_observation_space, mean, clip)
            self.single_observation_space = space
            self.observation_space = batch_space(space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[PyTree, dict]:
        """Reset all environments, or those of `options["reset_mask"]`.

        The running returns of environments that are reset within an episode end here.
        """
        # A copy first: the environment takes the mask out of the options.
        new = np.array((options or {}).get("reset_mask", self._everyone()), bool)
        raw, infos = self.env.reset(seed=seed, options=options)
        if self._earned:  # in effect the step before cut the episode off
            (rewards, terminated, truncated), valid = self._earned[-1]
            self._earned[-1] = (rewards, terminated, truncated | new), valid
        elif self.rewards is not None:
            env_rows.restart(self.rewards, new)
        self._ended = self._ended & ~new
        self._see(raw, new)
        self.raw_observations = raw
        if self.fold_every == 1:
            self.fold()
        return self._normalized(raw), infos

    def step(self, actions: Any) -> tuple[PyTree, Any, Any, Any, dict]:
        """One step of every environment."""
        raw, rewards, terminated, truncated, infos = self.env.step(actions)
        # A next-step reset takes no action and gives no reward of an episode.
        valid = ~self._ended if self._next_step else self._everyone()
        self._ended = np.asarray(terminated | truncated, bool) & valid
        earned = (
            np.array(rewards, np.float32),
            np.array(terminated),
            np.array(truncated),
        )
        if self.rewards is not None:
            self._earned.append((earned, valid))
        self._see(raw, self._everyone())
        final, there = infos.get("final_obs"), np.empty(0, bool)
        if final is not None:
            there = np.asarray(infos["_final_obs"], bool)
            final = env_rows.in_rows(raw, final, there)
            self._see(final, there)
        self.raw_observations, self.raw_rewards = raw, rewards
        self._steps += 1
        if self.fold_every is not None and self._steps >= self.fold_every:
            self.fold()
        if final is not None:
            infos = infos | {
                "final_obs": env_rows.by_row(self._normalized(final), there)
            }
        if self.rewards is not None:
            rewards = np.array(self.rewards.normalize(jnp.asarray(earned[0])))
        return self._normalized(raw), rewards, terminated, truncated, infos

    def fold(self) -> None:
        """Fold what has been seen since the last fold into the statistics."""
        if self.observations is not None and self._seen:
            rows, valid = env_rows.history(self._seen)
            self.observations.update_statistics(rows, mask=valid)
        if self.rewards is not None and self._earned:
            (rewards, terminated, truncated), valid = env_rows.history(self._earned)
            self.rewards.update(rewards, terminated, truncated, valid)
        self._seen, self._earned, self._steps = [], [], 0

    def _everyone(self) -> np.ndarray:
        return np.ones(self.num_envs, bool)

    def _see(self, raw: PyTree, new: np.ndarray) -> None:
        """Keep observations for the next fold; environments may reuse their arrays."""
        if self.observations is not None:
            self._seen.append((jax.tree.map(np.array, raw), new))

    def _normalized(self, raw: PyTree) -> PyTree:
        if self.observations is None:
            return jax.tree.map(env_rows.copied, raw)
        match = self.observations.spec.match(
            jax.tree.map(env_rows.copied, raw), "observations"
        )
        out = jax.tree.leaves(
            self.observations.normalize(jax.tree.map(jnp.asarray, raw))
        )
        normalized = [np.array(out[i]) for i in match.kept]
        return match.replace(normalized, others=True)  # bit for bit as they came


def _refuse_other(name: str, given: Any, kind: type) -> None:
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"{name} is a {type(given).__name__}; expected a {kind.__name__} or None."
        )


def _refuse_settings(name: str, module: Normalizer | RewardNormalizer) -> None:
    """Settings under which no fold could ever work here."""
    emit = getattr(module, "emit", "inputs")
    if emit != "inputs":
        raise ValueError(
            f'{name} has emit={emit!r}; expected emit="inputs": which rows '
            "are new is said by a mask."
        )
    if module.axis_name:
        raise ValueError(
            f"{name} has the axis_name {module.axis_name!r}; expected None: no axis is "
            "mapped outside of JAX."
        )
    if members := module.counter.get_value().shape:
        raise ValueError(f"{name} is a population {members}; expected one normalizer.")


def _refuse_unfit(observations: Normalizer, space: gymnasium.Space) -> None:
    """Raise unless a normalizer is for the observations of a space, leaf by leaf."""
    spec = observations.spec
    match = spec.match(_zeros(space), "The environment's observations")
    for at, i, shape in zip(spec.kept, match.kept, spec.features, strict=True):
        if (theirs := np.shape(match.leaves[i])) != shape:
            where = path_name(keys_of(spec.paths[at]))
            raise ValueError(
                f"The environment's observations have the shape {theirs}"
                f"{f' at {where}' if where else ''}; the normalizer was made for "
                f"{shape}. Pass it env.single_observation_space.shape."
            )


def _zeros(space: gymnasium.Space) -> PyTree:
    """Something of the structure and shapes of one observation."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _zeros(part) for key, part in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(map(_zeros, space.spaces))
    return np.zeros(space.shape or ())


def _unbounded(space: gymnasium.Space, mean: PyTree, clip: float) -> gymnasium.Space:
    """The space of one normalized observation; `mean` is None where it is excluded."""
    if isinstance(space, gymnasium.spaces.Dict):
        parts = space.spaces.items()
        return gymnasium.spaces.Dict(
            {key: _unbounded(part, mean[key], clip) for key, part in parts}
        )
    if isinstance(space, gymnasium.spaces.Tuple):
        pairs = zip(space.spaces, mean, strict=True)
        return gymnasium.spaces.Tuple([_unbounded(*pair, clip) for pair in pairs])
    if mean is None:
        return space
    dtype = np.float16 if space.dtype == np.float16 else np.float32
    return gymnasium.spaces.Box(-clip, clip, mean.shape, dtype)
