# SPDX-License-Identifier: Apache-2.0
"""Running statistics in a module: read, set, copied, merged, and as plain dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr

from nnx_norm import arguments, fold, serialization, settings
from nnx_norm.arguments import float64_array
from nnx_norm.extended import double, join
from nnx_norm.fold import Statistics
from nnx_norm.moments import Moments
from nnx_norm.processes import refuse_apart
from nnx_norm.samples import align_leading
from nnx_norm.scaling import Divisor, spreads, variance_of
from nnx_norm.serialization import exact
from nnx_norm.storage import NormalizerStatistics as NormalizerStatistics
from nnx_norm.storage import StoredStatistics
from nnx_norm.transfer import copied_like, on_host, placed_like, spans_processes
from nnx_norm.tree import is_mapping

PyTree = Any


class RunningStatistics(StoredStatistics):
    """Base of the normalizers: mean, M2 and counter, kept in float64 grade.

    Attributes:
      nonfinite: "skip" or "propagate".
      axis_name: Mapped axis or axes that updates reduce over, or None.
    """

    nonfinite: str
    axis_name: Any
    _of: ClassVar[str] = "samples"

    @property
    def variance(self) -> PyTree:
        """Population variance `M2 / count`, float32 `[*feat]`; 0 before any sample."""
        value, _ = self._read()
        return self.spec.unflatten(spreads(variance_of, value.M2, value.counter))

    @property
    def std(self) -> PyTree:
        """What the normalizer divides by, float32 `[*feat]`."""
        value, _ = self._read()
        return self.spec.unflatten(spreads(self._divisor, value.M2, value.counter))

    @property
    def count(self) -> Any:
        """Exact number of samples, on the host: an int, or a float with weights.

        Inside jit read `counter`. A population gives an array.
        """
        return exact(self._statistics64().counter)

    def freeze(self) -> None:
        """Stop folding on every path, `skipped` included; state can still be set."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Fold again."""
        self.frozen = False

    def reset(self) -> None:
        """Forget every sample."""
        self._write(*jax.tree.map(jnp.zeros_like, self._read()))

    def copy_from(self, other: RunningStatistics) -> None:
        """Take over the statistics of another normalizer, in buffers of our own.

        Settings and the frozen flag stay, and where these statistics lie, on a mesh or
        on a device.

        Args:
          other: Normalizer of the same structure and shapes.

        Raises:
          TypeError: `other` is something else.
          ValueError: The structure or a shape differs; or these statistics lie on
            several processes, and what each takes over differs.
        """
        if not isinstance(other, RunningStatistics):
            raise TypeError(
                f"copy_from got {type(other).__name__}; expected a normalizer."
            )
        self._refuse_unlike(other, "copy_from")
        new, old = other._read(), self._read()
        if not spans_processes(new):  # else they have it from one another
            refuse_apart(new, old)
        self._write(*jax.tree.map(copied_like, new, old))

    def merge_from(
        self, other: RunningStatistics | Moments | Mapping[str, Any]
    ) -> None:
        """Merge samples that were counted elsewhere: one update, as exact.

        What has been merged is never merged again: of a worker that started from
        these very statistics take what it has added, not its totals; see
        `nnx_norm.increments`. Settings apply as in an update: while frozen or from
        `max_count` on nothing is merged, `decay` forgets once if there are samples,
        and a sum that float32 can't hold is skipped. No device is asked: under an
        `axis_name` every one must merge the same. Statistics that lie on several
        processes are merged into by all of these, the same at the same point; what
        each has of its own goes through `all_reduce_processes` first.

        Args:
          other: A normalizer of the same structure and shapes; or its `to_dict`, of
            which only the statistics are read; or `Moments` with float64 leaves
            `[*feat]`, as `all_reduce_processes` gives them. `skipped` is added.

        Raises:
          TypeError: `other` is something else.
          ValueError: The structure or a shape differs, a value is out of range, or
            `other` is this normalizer, or processes were to merge different samples;
            nothing has changed then.

        Example:
          >>> from nnx_norm import Normalizer
          >>> norm, other = Normalizer(1), Normalizer(1)
          >>> norm.update_statistics(jnp.array([[1.0], [2.0], [3.0]]))
          >>> other.update_statistics(jnp.array([[10.0]]))
          >>> norm.merge_from(other)
          >>> norm.count, norm.mean.get_value().tolist(), norm.M2.get_value().tolist()
          (4, [4.0], [50.0])
        """
        self._merge(self._statistics_of(other))

    def _statistics_of(self, other: Any) -> Statistics:
        """Statistics that fit these, in float64: use traced ones in `double()`."""
        if other is self:
            raise ValueError(
                "merge_from got the normalizer itself: it would count twice."
            )
        if isinstance(other, RunningStatistics):
            self._refuse_unlike(other, "merge_from")
            theirs = other._read()
            if any(isinstance(v, Tracer) for v in jax.tree.leaves(theirs)):
                with double():
                    return jax.jit(fold.joined)(*theirs)
            return other._statistics64()  # by the host: it may lie elsewhere
        if isinstance(other, Moments):
            return self._statistics_of_moments(other)
        if is_mapping(other):
            return self._parsed(other, "merge_from")
        raise TypeError(
            f"merge_from got {type(other).__name__}; expected a normalizer, Moments or "
            "a dict of to_dict."
        )

    def _statistics_of_moments(self, moments: Moments) -> Statistics:
        value, _ = self._read()

        def leaves(tree: PyTree, name: str, **checks: Any) -> list[Any]:
            where = [f"{name}{keystr(self.spec.paths[i])}" for i in self.spec.kept]
            given = zip(self.spec.flatten(tree, name), value.mean, where, strict=True)
            return [float64_array(v, m.shape, at, **checks) for v, m, at in given]

        count = float64_array(moments.count, value.counter.shape, "count", minimum=0.0)
        finite = self.nonfinite == "skip"
        mean = leaves(moments.mean, "mean", finite=finite)
        M2 = leaves(moments.M2, "M2", finite=finite, minimum=0.0)
        skipped: Any = np.zeros(count.shape)
        return Statistics(mean, M2, count, skipped)

    def _merge(self, other: Statistics) -> None:
        """Fold float64 statistics that fit."""
        rule = dataclasses.replace(self._rule, axis_name=None)
        if not self.frozen:
            refuse_apart(other, self._read())
            with double():  # what comes is float64
                old, other = jax.lax.stop_gradient((self._read(), other))
                new = fold.fold_statistics(*old, other, rule=rule)
            self._write(*jax.tree.map(placed_like, new, old))

    def _refuse_unlike(self, other: RunningStatistics, name: str) -> None:
        if self._of != other._of:
            raise ValueError(
                f"{name} got the statistics of {other._of}; expected {self._of}."
            )
        ours, theirs = self._read()[0], other._read()[0]
        same = self.spec.unflatten(ours.mean), other.spec.unflatten(theirs.mean)
        structures = [jax.tree.structure(tree) for tree in same]
        shapes = [jax.tree.map(jnp.shape, leaves.mean) for leaves in (ours, theirs)]
        if structures[0] != structures[1] or shapes[0] != shapes[1]:
            raise ValueError(
                f"{name} got the statistics of {other.spec.describe()} with the "
                f"shapes {shapes[1]}; expected {self.spec.describe()} with {shapes[0]}."
            )

    def set_statistics(self, mean: PyTree, variance: PyTree, count: Any) -> None:
        """Set the statistics, for a warm start: a prior, or an earlier stage's.

        Args:
          mean: Tree of arrays or lists `[*feat]`, or one number for every feature.
            Digits of float64 NumPy arrays are kept.
          variance: The same, not negative.
          count: Number of samples that these stand for, not negative; of a
            population one number for all, or one each.

        Raises:
          ValueError: A structure or shape differs, or a value is out of range;
            nothing has changed then.

        Example:
          >>> from nnx_norm import Normalizer
          >>> norm = Normalizer(1)
          >>> norm.set_statistics(mean=0, variance=1, count=8)
          >>> norm.update_statistics(jnp.full((2, 2, 1), 3.0))
          >>> norm.count, norm.mean.get_value().tolist(), norm.M2.get_value().tolist()
          (12, [1.0], [32.0])
        """
        value, residual = self._read()
        shapes, shape = [v.shape for v in value.mean], value.counter.shape
        filled = partial(arguments.float64_leaves, self.spec, shapes)
        n = float64_array(count, shape, "count", fill=True, minimum=0.0)
        means = filled(mean, "mean")
        variances = filled(variance, "variance", minimum=0.0)
        skipped = (value.skipped, residual.skipped)
        if not isinstance(value.skipped, Tracer):
            skipped = on_host(skipped)
        with double():  # for what is traced
            M2 = [v * align_leading(n, v) for v in variances]
            skipped = join(*skipped)
        self._store64(Statistics(means, M2, n, skipped))

    def to_dict(self, flat: bool = False) -> dict[str, Any]:
        """The statistics in full precision, and the settings, for NumPy or JSON.

        Args:
          flat: Whether to give one level, with keys like `mean/goal/id`, that
            `np.savez` saves and `np.load` reads without pickle; unset settings are
            left out. Otherwise trees are nested dicts with str keys (tuples by index,
            dataclasses and named tuples by field), None where excluded.

        Returns:
          `mean`, `M2`, `variance`, `std` as float64 NumPy arrays, `count`, `skipped`
          and the settings.

        Example:
          >>> from nnx_norm import Normalizer
          >>> norm = Normalizer({"goal": 1})
          >>> norm.update_statistics({"goal": jnp.array([[[1.0]], [[3.0]]])})
          >>> d = norm.to_dict(flat=True)
          >>> d["mean/goal"].tolist(), d["std/goal"].tolist(), d["count"]
          ([2.0], [1.0], 2)
        """
        s = self._statistics64()
        trees = {
            "mean": s.mean,
            "M2": s.M2,
            "variance": [variance_of(M2, s.counter) for M2 in s.M2],
            "std": [self._divisor(M2, s.counter) for M2 in s.M2],
        }
        numbers = {"count": exact(s.counter), "skipped": exact(s.skipped)}
        return serialization.to_dict(
            self.spec, trees, numbers | self._settings(), flat=flat
        )

    def load_dict(self, d: Any) -> None:
        """Take over the statistics that `to_dict` gave, exactly; not the settings.

        Args:
          d: Either form of `to_dict`, with arrays or the lists that JSON makes of
            them; or an open `.npz` file.

        Raises:
          ValueError: Something is missing, too many, or of another shape; nothing
            has changed then.
        """
        self._store64(self._parsed(d, "load_dict"))

    def _parsed(self, d: Any, name: str) -> Statistics:
        """The statistics in a dict of `to_dict`."""
        settings.refuse_other_class(d, self._of, name)
        value, _ = self._read()
        finite = self.nonfinite == "skip"  # others may have let a NaN in
        return serialization.load_dict(self.spec, d, value, finite=finite)

    def _settings(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _rule(self) -> fold.Rule:
        """How to fold."""
        return fold.Rule(self.nonfinite == "skip", self.axis_name)

    @property
    def _divisor(self) -> Divisor:
        """What to divide one leaf by."""
        raise NotImplementedError
