# SPDX-License-Identifier: Apache-2.0
"""The Variables of running statistics: float32 values and what float32 can't hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from nnx_norm import arguments
from nnx_norm.extended import double
from nnx_norm.fold import Statistics, joined, separated
from nnx_norm.processes import refuse_apart, refuse_local
from nnx_norm.signature import OfConstructor
from nnx_norm.spec import Spec
from nnx_norm.transfer import on_host, placed_like

PyTree = Any


class NormalizerStatistics(nnx.Variable):
    """Variable type of running statistics: no parameter, replicated over devices.

    Example:
      >>> from nnx_norm import Normalizer
      >>> len(jax.tree.leaves(nnx.state(Normalizer(3), NormalizerStatistics)))
      8
    """


class Printed(nnx.Module):
    """Base of statistics: flax's `repr` of a module, as far as a person can read it.

    What completes the float32 values isn't shown, nor what is no longer there: after a
    donation flax raises on a scalar.
    """

    __signature__ = OfConstructor()

    def __nnx_repr__(self) -> Iterator[Any]:
        for part in cast("Iterator[Any]", super().__nnx_repr__()):
            name = getattr(part, "key", "")  # the head has none
            if name in ("residual", "tail", "discounted_residual"):
                continue
            if any(map(is_deleted, jax.tree.leaves(getattr(self, name, None)))):
                part.value, part.use_raw_value = "<deleted>", True
            yield part


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX whose buffer was donated or deleted."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return concrete and leaf.is_deleted()


class StoredStatistics(Printed):
    """Mean, M2, counter and skipped as Variables, read and written in one place.

    Attributes:
      mean: Tree of float32 arrays `[*feat]`.
      M2: The same tree: sums of squared deviations from the mean.
      counter: float32 scalar: the nearest to the number of samples, see `count`.
      skipped: float32 scalar: the number of samples left out as not finite.
      residual: What float32 can't hold of these four, by name.
      frozen: Whether folding is off.
    """

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
        old = self._read()
        zeros = jax.tree.map(lambda v: jnp.zeros(members + v.shape, v.dtype), old)
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

    def _statistics_here(
        self, samples: PyTree = (), name: str = ""
    ) -> tuple[Statistics, Statistics]:
        """Values and residuals, once they are known to have the spec's shapes.

        And to lie where `samples` may be folded into them, which messages call `name`.
        """
        value, residual = self._read()
        refuse_local(samples, value, name)
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
                f"The statistics have the dtypes {dtypes}; expected float32 "
                "throughout. They were cast, or restored into a template of another "
                "dtype (which casts without a word): restore into nnx.state(model) as "
                "it is."
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
        return joined(*map(on_host, self._read()))

    def _store64(self, statistics: Statistics) -> None:
        """Write float64 statistics into buffers of our own, placed like the old.

        NumPy arrays are split on the host: nothing is compiled.
        """
        arguments.refuse_torn(self.spec, *statistics.moments)
        old = self._read()
        refuse_apart(statistics, old)
        with double():  # for what is traced
            new = separated(statistics)
        self._write(*jax.tree.map(placed_like, new, old))
