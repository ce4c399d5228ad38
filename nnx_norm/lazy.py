# SPDX-License-Identifier: Apache-2.0
"""Statistics that may get their shape later: from a batch, or from a saved state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.tree_util import keystr

from nnx_norm import state_dicts, validation
from nnx_norm.buffers import Buffers, Parts, joined, separated
from nnx_norm.extended import double
from nnx_norm.serialization import exact
from nnx_norm.spec import Spec, parse
from nnx_norm.storage import NormalizerStatistics, Printed
from nnx_norm.transfer import on_host
from nnx_norm.tree import canonicalize

PyTree = Any


class LazyStatistics(Printed):
    """Base of the ports: mean, var and count, as exact as float64 buffers.

    Attributes:
      mean, var: Trees of float32 arrays `[*feat]`; None while the shape is unknown.
      count: float32 scalar, the nearest to the number of samples.
      residual: What float32 can't hold of these three, by name.
      tail: What the residual can't hold of them.
    """

    initial_count: float

    def _allocate(self, spec: Spec | None) -> None:
        """Create the Variables, without trees if there is no spec yet."""
        value, residual, tail = self._prior(spec)
        self.mean = NormalizerStatistics(value.mean)
        self.var = NormalizerStatistics(value.var)
        self.count = NormalizerStatistics(value.count)
        self.residual = NormalizerStatistics(residual._asdict())
        self.tail = NormalizerStatistics(tail._asdict())

    def _prior(self, spec: Spec | None) -> Parts:
        """The prior samples, mean 0 and variance 1; None for trees without a spec."""

        def full(value: float) -> PyTree:
            if spec is None:
                return None
            leaves = [jnp.full(s, value, jnp.float32) for s in spec.features]
            return spec.unflatten(leaves)

        count = separated(Buffers(None, None, np.asarray(self.initial_count)))
        counts = jax.device_put(count)
        values = (1.0, 0.0, 0.0)
        return Parts(
            *(
                part._replace(mean=full(0.0), var=full(value))
                for part, value in zip(counts, values, strict=True)
            )
        )

    @property
    def is_lazy(self) -> bool:
        """Whether the shape is still to come with the first batch."""
        return self.mean.get_value() is None

    @property
    def shape(self) -> Any:
        """Feature shape, or the tree of them; None while it is unknown.

        Example:
          >>> from nnx_norm import RunningMeanStd
          >>> RunningMeanStd({"goal": 3}).shape, RunningMeanStd().shape
          ({'goal': (3,)}, None)
        """
        return jax.tree.map(np.shape, self.mean.get_value())

    def to_numpy(self) -> Buffers:
        """The statistics in full precision, on the host.

        Returns:
          `mean` and `var` as float64 NumPy arrays (None while lazy), `count` as an
          int, or a float if it is no whole number.

        Example:
          >>> from nnx_norm import RunningMeanStd
          >>> stats = RunningMeanStd(())
          >>> stats.update_from_moments(0.1, 0.0, 2**40)
          >>> stats.to_numpy().count, stats.count.get_value().item()
          (1099511627777, 1099511627776.0)
        """
        spec = None if self.is_lazy else self._spec()
        mean, var, count = joined(on_host(self._read(spec)))
        if spec is None:
            return Buffers(None, None, exact(count))
        return Buffers(spec.unflatten(mean), spec.unflatten(var), exact(count))

    def to(self, device_or_sharding: Any) -> Self:
        """Move the Variables to a device or sharding.

        Args:
          device_or_sharding: What `jax.device_put` takes.

        Returns:
          This module.

        Example:
          >>> from nnx_norm import RunningMeanStd
          >>> RunningMeanStd(3).to(jax.devices()[0]).shape
          (3,)
        """
        nnx.update(self, jax.device_put(nnx.state(self), device_or_sharding))
        return self

    def _spec(self) -> Spec:
        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(tuple(np.shape(leaf)), jnp.float32)

        return parse(jax.tree.map(shape, self.mean.get_value()))

    def _spec_for(self, tree: PyTree, name: str, leading: int) -> Spec:
        """The spec of the statistics; while lazy, of `tree` without `leading` axes."""
        if not self.is_lazy:
            return self._spec()

        def features(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            shape = validation.as_array(leaf, f"{name}{keystr(path)}").shape
            return jax.ShapeDtypeStruct(shape[leading:], jnp.float32)

        return parse(jax.tree_util.tree_map_with_path(features, canonicalize(tree)))

    def _read(self, spec: Spec | None) -> Parts:
        """What is stored, with lists of leaves for trees; the prior if nothing."""
        value = Buffers(*(v.get_value() for v in (self.mean, self.var, self.count)))
        if value.mean is None or value.var is None:
            mean, var, _ = self._prior(spec).value
            value = Buffers(
                mean if value.mean is None else value.mean,
                var if value.var is None else value.var,
                value.count,
            )
        rests = [Buffers(**v.get_value()) for v in (self.residual, self.tail)]
        mean, var, count = map(_parts, value, *rests)
        return Parts(*map(Buffers, mean, var, [c[0] for c in count]))

    def _write(self, spec: Spec, parts: Parts) -> None:
        def trees(b: Buffers) -> Buffers:
            return Buffers(spec.unflatten(b.mean), spec.unflatten(b.var), b.count)

        value, residual, tail = map(trees, parts)
        self.mean.set_value(value.mean)
        self.var.set_value(value.var)
        self.count.set_value(value.count)
        self.residual.set_value(residual._asdict())
        self.tail.set_value(tail._asdict())

    def _store(self, spec: Spec, buffers: Buffers) -> None:
        """Write float64 NumPy buffers, lists of leaves for trees."""
        self._write(spec, jax.device_put(separated(buffers)))

    def _materialize(self, state: Any) -> None:
        """Take the shapes of a saved state, as `state_dicts.nested` gives it."""
        if not self.is_lazy:
            return
        value, residual, tail = self._prior(parse(saved_shapes(state, "mean")))
        self.mean.set_value(value.mean)
        self.var.set_value(value.var)
        for variable, rest in ((self.residual, residual), (self.tail, tail)):
            trees = {"mean": rest.mean, "var": rest.var}
            variable.set_value(variable.get_value() | trees)


def _parts(value: PyTree, *rests: PyTree) -> tuple[list[Any], ...]:
    """Leaves of a value, its residual and its tail; zeros where these don't fit it.

    A state from elsewhere may bring no residuals, and float64 or integers as values:
    they are split, exactly.
    """
    values = jax.tree.leaves(value)
    shapes = [np.shape(v) for v in values]
    leaves = [jax.tree.leaves(rest) for rest in rests]
    triples = []
    for i, v in enumerate(values):
        if getattr(v, "dtype", None) == np.float32:
            v = jnp.asarray(v)
            fit = [
                r[i] if [np.shape(x) for x in r] == shapes else 0 * v for r in leaves
            ]
            triples.append((v, *fit))
        else:
            given = v if isinstance(v, Tracer) else state_dicts.as_numpy(v)
            with double():  # for what is traced
                cut = separated(Buffers([], [], given.astype(np.float64)))
            triples.append(tuple(jax.device_put([part.count for part in cut])))
    return tuple(map(list, zip(*triples, strict=True))) or ([], [], [])


def statistics_in(
    model: nnx.Module,
) -> Iterator[tuple[tuple[Any, ...], LazyStatistics]]:
    """The running statistics of a model and their paths, each once."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, LazyStatistics):
            yield path, module


def saved_shapes(state: Any, name: str) -> PyTree:
    """Shapes of one Variable in the saved state of a module; None if it isn't there."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(np.shape(leaf)), jnp.float32)

    value = state_dicts.variable(state, name)
    return jax.tree.map(shape, value) if jax.tree.leaves(value) else None


def materialize_lazy_running_stats_from_state_dict(
    model: nnx.Module, state_dict: Any
) -> None:
    """Give lazy statistics the shapes of a saved state, before it is loaded.

    Only lazy statistics whose `mean` is in the state are touched; they become fresh
    statistics of that shape (the running return of a `RewardRunningMeanStd` too, if
    it has none yet). Then `nnx.update(model, state)` fits, and so does an Orbax
    restore with `nnx.state(model)` as its target; what Orbax restores without a target
    is good for the shapes, not for `nnx.update`. For a state dict of PyTorch see
    `running_mean_std_from_state_dict`.

    Args:
      model: Any module tree.
      state_dict: `nnx.State`, nested dict, or flat dict with dotted keys
        (`"encoder.obs_norm.mean"`), of anything that has a shape: JAX, NumPy or
        torch-like arrays, the metadata of a checkpoint.

    Raises:
      TypeError: The state is no mapping.
      ValueError: `mean` and `var` of a saved state differ in shape, or statistics that
        have their shape are saved with another. Nothing has changed then.

    Example:
      >>> from nnx_norm import RunningMeanStd
      >>> saved = {"mean": np.zeros(3), "var": np.ones(3), "count": np.float32(7)}
      >>> model = RunningMeanStd()
      >>> materialize_lazy_running_stats_from_state_dict(model, saved)
      >>> nnx.update(model, saved)
      >>> model.shape, model.to_numpy().count
      ((3,), 7)
    """
    saved = state_dicts.nested(state_dict)
    found = []
    for path, module in statistics_in(model):
        state = state_dicts.find(saved, path)
        if saved_shapes(state, "mean") is not None:
            _refuse_other_shapes(module, state, ".".join(map(str, path)))
            found.append((module, state))
    for module, state in found:
        module._materialize(state)


def _refuse_other_shapes(module: LazyStatistics, state: Any, path: str) -> None:
    where = f"{path}." if path else ""
    mean, var = (
        None if tree is None else jax.tree.map(lambda s: s.shape, tree)
        for tree in (saved_shapes(state, "mean"), saved_shapes(state, "var"))
    )
    if var is not None and var != mean:
        raise ValueError(
            f"{where}mean is saved with the shape {mean} and {where}var with {var}; "
            "expected the same. The state is torn."
        )
    if not module.is_lazy and mean != canonicalize(module.shape):
        raise ValueError(
            f"{where}mean is saved with the shape {mean}; the model has "
            f"{module.shape}. Make it with the saved width, or with shape=None."
        )
