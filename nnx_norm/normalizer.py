# SPDX-License-Identifier: Apache-2.0
"""The observation normalizer of a policy graph."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from nnx_norm import arguments, fold, masks, settings, validation
from nnx_norm.distributed import AxisName
from nnx_norm.modules import StatefulModule, StatefulModuleOutput
from nnx_norm.scaling import FlooredStd, Scale, Unscale, leafwise
from nnx_norm.spec import Exclude, Match, parse
from nnx_norm.stateful import FORGOTTEN, refuse_forgotten
from nnx_norm.statistics import RunningStatistics

PyTree = Any

SET = ("epsilon", "initial_std", "nonfinite", "emit")
MAY_BE_UNSET = ("clip", "axis_name", "max_count", "decay")


class Normalizer(RunningStatistics, StatefulModule):
    """Standardise inputs by the mean and variance of all samples seen so far.

        y = (x - mean) / std,    std = √max(M2 / n, ε)

    The forward pass only reads, so it runs inside jit, scan, vmap, grad, remat and
    cond, and every step of a rollout sees the same statistics. It emits its raw input
    as `rollout_extras`; `update_statistics` folds the history of them in, once per
    training step. Place the normalizer ahead of both heads of an actor-critic: one
    that two parents share folds what each of them saw, twice the samples. Behind a
    `Delay` the filler values are samples like others.

    Pass the module to the outermost jit as an argument: closed over, it keeps the
    statistics of the time of compilation.

    Attributes:
      mean, M2: Trees of float32 arrays `[*feat]`, None where excluded.
      counter, skipped: float32 scalars; see `count`.

    Example:
      >>> norm = Normalizer(1)
      >>> out = norm((), jnp.array([[0.0], [2.0]]))  # one step of two environments
      >>> norm.update_statistics(out.rollout_extras[None])  # a history [T=1, B=2, 1]
      >>> norm.count, norm.normalize(jnp.array([3.0])).tolist()
      (2, [2.0])

    References:
      Welford, *Note on a method for calculating corrected sums of squares and
      products*, Technometrics 4(3), 1962; merged in batches as in Chan, Golub &
      LeVeque, The American Statistician 37(3), 1983.
    """

    def __init__(
        self,
        shape: Any,
        *,
        epsilon: float = 1e-6,
        initial_std: float = 10.0,
        clip: float | None = None,
        exclude: Exclude = (),
        axis_name: AxisName | None = None,
        max_count: float | None = None,
        decay: float | None = None,
        nonfinite: str = "skip",
        emit: str = "inputs",
    ) -> None:
        """Create a normalizer that has seen no sample.

        Args:
          shape: Feature shape of one input: an int, a tuple or list of ints (one
            array), a nested mapping of those, or any pytree of arrays or
            `jax.ShapeDtypeStruct`s, an unbatched example. None is no leaf.
          epsilon: Floor of the variance, in squared units of the input.
          initial_std: Divisor before any sample.
          clip: Outputs are clipped to `[-clip, clip]`; None doesn't.
          exclude: Leaves to pass through untouched: key paths (`"goal/id"`) or a
            predicate on a path, a tuple of keys.
          axis_name: Mapped axis or axes to reduce over in `update_statistics`.
          max_count: Stop folding after the update that reaches this many samples.
          decay: Factor on the weight of all earlier samples at every update that
            brings one, in (0, 1]: exponential forgetting.
          nonfinite: "skip" leaves samples with a NaN or infinity out and counts
            them, and updates that float32 can't hold; "propagate" lets them in.
          emit: "inputs" emits raw inputs; "moments" the moments of each step's batch,
            which takes `[T, *feat]` of memory instead of `[T, B, *feat]`. Loops that
            slice extras along `B`, or fold with masks, need inputs.

        Raises:
          TypeError: An argument is of another kind.
          ValueError: An argument is out of range.
        """
        check = arguments.number
        self.epsilon = arguments.positive(epsilon, "epsilon")
        self.initial_std = arguments.positive(initial_std, "initial_std")
        self.clip = None if clip is None else check(clip, "clip", 0, strict=False)
        self.max_count = None if max_count is None else check(max_count, "max_count", 0)
        self.decay = None if decay is None else check(decay, "decay", 0, 1)
        if decay is not None and max_count is not None:
            raise ValueError("decay and max_count exclude each other; give one.")
        self.axis_name = arguments.axis_names(axis_name)
        self.nonfinite = arguments.choice(nonfinite, "nonfinite", "skip", "propagate")
        self.emit = arguments.choice(emit, "emit", "inputs", "moments")
        self._allocate(parse(shape, exclude))

    def __call__(
        self, state: Any, x: PyTree = FORGOTTEN, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Normalize one step's input; nothing is written.

        Args:
          state: Returned as it is; `()` from `initialize_state`.
          x: Tree of arrays `[*lead, *feat]`, usually `[B, *feat]`.
          rollout_extras: None in a rollout; in a loss replay what was emitted.

        Returns:
          Output of the structure of `x` (mappings as dicts), in its float dtypes
          (float32 for integers and bool), and what to fold later.

        Raises:
          ValueError: `x` doesn't fit the spec.
        """
        refuse_forgotten(self, x)
        match, samples = validation.matched(self.spec, x, "x")
        if rollout_extras is None:
            rollout_extras = self._emitted(match, samples)
        return StatefulModuleOutput(
            next_state=state,
            output=self._normalized(match, samples),
            regularization_loss=jnp.zeros((), jnp.float32),
            metrics={},
            rollout_extras=rollout_extras,
        )

    def normalize(self, x: PyTree) -> PyTree:
        """`(x - mean) / std`, clipped if `clip` is set; nothing is written.

        Args:
          x: Tree of arrays `[*lead, *feat]`, any leading axes.

        Returns:
          The tree, in the float dtypes of `x` (float32 for integers and bool).

        Raises:
          ValueError: `x` doesn't fit the spec.
        """
        return self._normalized(*validation.matched(self.spec, x, "x"))

    def denormalize(self, y: PyTree) -> PyTree:
        """`y * std + mean`, the inverse of `normalize` inside the clip.

        Args:
          y: Tree of arrays `[*lead, *feat]`; not clipped.

        Returns:
          The tree, in the float dtypes of `y`.

        Raises:
          ValueError: `y` doesn't fit the spec.
        """
        match, samples = validation.matched(self.spec, y, "y")
        return match.replace(self._scaled(Unscale, None, samples), others=True)

    def update_statistics(
        self, rollout_extras: Any, *, mask: Any = None, weights: Any = None
    ) -> None:
        """Fold a history of emitted extras into the statistics, in one merge.

        A call that raises has changed nothing. The same history twice counts twice.

        Args:
          rollout_extras: Tree of arrays `[*lead, *feat]`, one or more leading axes,
            the same on every leaf, usually `[T, B]`. With x64 off JAX makes float32
            of float64 arrays before anything is folded.
          mask: Bool array of the shape of the leading axes or a leading prefix of
            them: which samples count. NaN elsewhere doesn't leak.
          weights: Array of such a shape, not negative; multiplied with the mask. Under
            jit a negative or non-finite weight makes its sample a skipped one.

        Raises:
          TypeError: A leaf holds no real numbers, or the mask isn't bool.
          ValueError: Something doesn't fit, or `axis_name` isn't bound.
        """
        if self.emit == "moments":
            self._fold_moments(rollout_extras, mask, weights)
        else:
            self._fold_inputs(rollout_extras, mask, weights)

    def _fold_inputs(self, history: Any, mask: Any, weights: Any) -> None:
        _, samples = validation.matched(self.spec, history, "history", partial=True)
        lead = validation.leading(self.spec, samples, "history")
        if not samples:
            return
        mask = masks.mask_array(mask, lead)
        weights = masks.weight_array(weights, lead, mask)
        old = self._statistics_here(samples, "history")
        if not self.frozen:
            step = partial(fold.fold_inputs, lead=len(lead), rule=self._rule)
            self._write(*step(*old, samples, mask, weights))

    def _fold_moments(self, history: Any, mask: Any, weights: Any) -> None:
        if mask is not None or weights is not None:
            raise ValueError(
                'emit="moments" keeps no axis of environments, so neither mask nor '
                'weights can be applied; make the normalizer with emit="inputs".'
            )
        emitted = jax.lax.stop_gradient(validation.emitted(self.spec, history))
        old = self._statistics_here(emitted, "history")
        if self.spec.kept and not self.frozen:
            self._write(*fold.fold_moments(*old, emitted, rule=self._rule))

    def _emitted(self, match: Match, samples: list[jax.Array]) -> Any:
        if self.emit == "inputs":
            return match.replace([match.leaves[i] for i in match.kept], others=False)
        lead = validation.common_leading(self.spec, samples, "x")
        running = self._statistics_here()[0].moments
        if samples:
            step = partial(fold.emit, lead=len(lead), skip=self._rule.skip)
            emitted = step(samples, running)
        else:
            nothing = jnp.zeros((), jnp.float32)
            emitted = fold.Emitted([], [], [], nothing, nothing)
        return emitted.over(self.spec.unflatten)

    def _normalized(self, match: Match, samples: list[jax.Array]) -> PyTree:
        return match.replace(self._scaled(Scale, self.clip, samples), others=True)

    def _scaled(
        self, kind: type[Scale | Unscale], bound: float | None, xs: list[jax.Array]
    ) -> list[jax.Array]:
        value, rest = self._statistics_here()
        stats = value.mean, rest.mean, value.M2, value.counter
        return leafwise(kind(True, bound), self._divisor, xs, *stats)

    @property
    def _divisor(self) -> FlooredStd:
        return FlooredStd(self.epsilon, self.initial_std)

    @property
    def _rule(self) -> fold.Rule:
        skip = self.nonfinite == "skip"
        return fold.Rule(skip, self.axis_name, self.decay, self.max_count)

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*SET, *MAY_BE_UNSET)}
        shape = settings.shape_to_json(self.spec)
        return own | {"exclude": self.spec.excluded_names, "shape": shape}

    @classmethod
    def from_dict(cls, d: Any) -> Self:
        """A normalizer with the settings and the statistics that `to_dict` gave.

        Args:
          d: Either form of `to_dict`, with arrays or the lists that JSON makes of
            them; or an open `.npz` file.

        Returns:
          A new normalizer, not frozen.

        Raises:
          ValueError: A setting or statistic is missing or contradicts another, there
            is a key of something else, or the normalizer was made for dataclasses or
            named tuples: make one for them, then `load_dict`.

        Example:
          >>> norm = Normalizer({"goal": (2,)}, clip=5.0)
          >>> Normalizer.from_dict(norm.to_dict()).clip
          5.0
        """
        given = settings.constructor_arguments(d, SET, (*MAY_BE_UNSET, "exclude"))
        new = cls(settings.shape_from_json(given.pop("shape")), **given)
        new._add_members(np.shape(d["count"]) if "count" in d else ())
        new.load_dict(d)
        settings.refuse_other_std(d, new.to_dict(flat=True))
        return new
