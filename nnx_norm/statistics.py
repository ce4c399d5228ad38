# SPDX-License-Identifier: Apache-2.0
"""Running statistics in a module: the Variables, and all that only needs them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from nnx_norm import arguments, serialization
from nnx_norm.arguments import float64_array
from nnx_norm.extended import double, join
from nnx_norm.fold import Statistics, separated
from nnx_norm.samples import align_leading
from nnx_norm.serialization import exact
from nnx_norm.spec import Spec

PyTree = Any


class NormalizerStatistics(nnx.Variable):
    """Variable type of running statistics: no parameter, replicated over devices.

    Example:
      >>> from nnx_norm import Normalizer
      >>> len(jax.tree.leaves(nnx.state(Normalizer(3), NormalizerStatistics)))
      8
    """


class RunningStatistics(nnx.Module):
    """Base of the normalizers: mean, M2 and counter, kept in float64 grade.

    Attributes:
      mean: Tree of float32 arrays `[*feat]`.
      M2: The same tree: sums of squared deviations from the mean.
      counter: float32 scalar: the nearest to the number of samples, see `count`.
      skipped: float32 scalar: the number of samples left out as not finite.
      residual: What float32 can't hold of these four, by name.
      frozen: Whether folding is off.
    """

    nonfinite: str

    def _allocate(self, spec: Spec) -> None:
        """Create the Variables for no sample."""
        self.spec = spec
        self.frozen = False
        value = self._empty()
        self.mean = NormalizerStatistics(value.mean)
        self.M2 = NormalizerStatistics(value.M2)
        self.counter = NormalizerStatistics(value.counter)
        self.skipped = NormalizerStatistics(value.skipped)
        self.residual = NormalizerStatistics(self._empty()._asdict())

    def _add_members(self, members: tuple[int, ...]) -> None:
        """Give fresh statistics the axes of a population in front, as nnx.vmap does."""
        zeros = jax.tree.map(lambda v: jnp.zeros(members + v.shape), self._read())
        self._write(*zeros)

    def _empty(self) -> Statistics:
        def leaves() -> PyTree:
            shapes = self.spec.features
            return self.spec.unflatten([jnp.zeros(s, jnp.float32) for s in shapes])

        # Every Variable has buffers of its own: a shared one can't be donated.
        counts = [jnp.zeros((), jnp.float32) for _ in range(2)]
        return Statistics(leaves(), leaves(), *counts)

    def _read(self) -> tuple[Statistics, Statistics]:
        """Values and residuals, with lists of leaves for trees."""

        def flat(tree: PyTree) -> list[jax.Array]:
            return jax.tree.leaves(tree)

        rest = self.residual.get_value()
        value = Statistics(
            flat(self.mean.get_value()),
            flat(self.M2.get_value()),
            self.counter.get_value(),
            self.skipped.get_value(),
        )
        return value, Statistics(
            flat(rest["mean"]), flat(rest["M2"]), rest["counter"], rest["skipped"]
        )

    def _statistics_here(self) -> tuple[Statistics, Statistics]:
        """Values and residuals, once they are known to have the spec's shapes."""
        value, residual = self._read()
        shapes = tuple(v.shape for v in value.mean)
        if shapes != self.spec.features:
            raise ValueError(
                f"The statistics have the shapes {shapes}; expected "
                f"{self.spec.features}. With a member axis in front, call a population "
                "under nnx.vmap; otherwise they were set or restored from elsewhere."
            )
        dtypes = sorted({str(v.dtype) for v in jax.tree.leaves((value, residual))})
        if dtypes != ["float32"]:
            raise TypeError(
                f"The statistics have the dtypes {dtypes}; expected float32 throughout. "
                "They were cast, or restored into a template of another dtype (which "
                "casts without a word): restore into nnx.state(model) as it is."
            )
        # Constants to every gradient, also where the whole module is differentiated.
        return jax.lax.stop_gradient((value, residual))

    def _write(self, value: Statistics, residual: Statistics) -> None:
        tree = self.spec.unflatten
        self.mean.set_value(tree(value.mean))
        self.M2.set_value(tree(value.M2))
        self.counter.set_value(value.counter)
        self.skipped.set_value(value.skipped)
        rest = residual._replace(mean=tree(residual.mean), M2=tree(residual.M2))
        self.residual.set_value(rest._asdict())

    def _statistics64(self) -> Statistics:
        """Statistics on the host, float64 NumPy arrays in full precision."""
        value, residual = self._read()
        with double():
            return jax.tree.map(lambda v, r: np.asarray(join(v, r)), value, residual)

    def _store64(self, statistics: Statistics) -> None:
        """Write float64 statistics into buffers of our own, placed like the old."""
        arguments.refuse_torn(self.spec, *statistics.moments)
        with double():
            new = separated(
                jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), statistics)
            )
        self._write(*jax.tree.map(_placed_like, new, self._read()))

    @property
    def variance(self) -> PyTree:
        """Population variance `M2 / count`, float32 `[*feat]`; 0 before any sample."""
        value, _ = self._read()
        return self.spec.unflatten([variance_of(M2, value.counter) for M2 in value.M2])

    @property
    def std(self) -> PyTree:
        """What the normalizer divides by, float32 `[*feat]`."""
        value, _ = self._read()
        return self.spec.unflatten([self._std(M2, value.counter) for M2 in value.M2])

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

        Settings and the frozen flag stay.

        Args:
          other: Normalizer of the same structure and shapes.

        Raises:
          TypeError: `other` is something else.
          ValueError: The structure or a shape differs.
        """
        if not isinstance(other, RunningStatistics):
            raise TypeError(
                f"copy_from got {type(other).__name__}; expected a normalizer."
            )
        ours, theirs = self._read(), other._read()
        same = self.spec.unflatten(ours[0].mean), other.spec.unflatten(theirs[0].mean)
        structures = [jax.tree.structure(tree) for tree in same]
        shapes = [
            jax.tree.map(jnp.shape, leaves.mean) for leaves in (ours[0], theirs[0])
        ]
        if structures[0] != structures[1] or shapes[0] != shapes[1]:
            raise ValueError(
                f"copy_from got the statistics of {other.spec.describe()} with the "
                f"shapes {shapes[1]}; expected {self.spec.describe()} with {shapes[0]}."
            )
        self._write(*jax.tree.map(jnp.copy, theirs))

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
        with double():
            M2 = [v * align_leading(n, v) for v in variances]
            skipped = join(value.skipped, residual.skipped)
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
            "std": [self._std(M2, s.counter) for M2 in s.M2],
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
        value, _ = self._read()
        finite = self.nonfinite == "skip"  # others may have let a NaN in
        self._store64(serialization.load_dict(self.spec, d, value, finite=finite))

    def _settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def _std(self, M2: Any, count: Any) -> Any:
        """What to divide one leaf by; arrays of NumPy in float64 or of JAX."""
        raise NotImplementedError


def variance_of(M2: Any, count: Any) -> Any:
    """`M2 / count` of NumPy or JAX arrays, zero before any sample."""
    n = align_leading(count, M2)
    return M2 / (n + (n == 0).astype(n.dtype))


def _placed_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` with the sharding of `old`, where both are concrete."""
    if isinstance(new, Tracer) or isinstance(old, Tracer):
        return new
    # A restored state may hold NumPy arrays: then there is nowhere to put it.
    return jax.device_put(new, getattr(old, "sharding", None))
