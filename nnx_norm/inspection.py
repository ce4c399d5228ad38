# SPDX-License-Identifier: Apache-2.0
"""The state of every normalizer in a model, in a few scalars each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_norm import concrete, emitted, serialization, validation
from nnx_norm.fold import Emitted
from nnx_norm.running_mean_std import RunningMeanStd
from nnx_norm.samples import align_leading, deviation
from nnx_norm.scaling import AddedStd, spreads, variance_of
from nnx_norm.statistics import RunningStatistics
from nnx_norm.tree import is_mapping, keys_of, path_name

PyTree = Any


class Feature(NamedTuple):
    """One leaf of a normalizer, `[*feat]`, with what was asked about it.

    Attributes:
      path: Its path in the model, that of the normalizer first.
      module: The normalizer.
      mean: Its mean.
      variance: Its population variance.
      std: What it is divided by.
      clipped: Share of its inputs beyond the clip; None if unknown.
      drift: How far its mean has moved, in std of now; None if unknown.
    """

    path: str
    module: Any
    mean: jax.Array
    variance: jax.Array
    std: jax.Array
    clipped: jax.Array | None
    drift: jax.Array | None


def metrics(
    module: nnx.Module, *, extras: PyTree = None, since: Any = None
) -> dict[str, jax.Array]:
    """A flat dict of scalars about every normalizer in a model, for a logger.

    Cheap but for `extras`, which are read once, and safe inside jit. A population
    (`nnx.vmap`) gives the extremes over its members; call it under the vmap for each.

    Args:
      module: Any module: a normalizer, a policy graph, a training state.
      extras: What `module.update_statistics` takes: the history of its rollout extras;
        of a module of your own with one normalizer or container in it, what that
        takes, and with several a dict of these by path. Gives the share of normalized
        values beyond the clip, by the statistics of now, where a normalizer has one
        and emits its inputs.
      since: The module as it was, `nnx.clone(module)`, inside jit too; or an earlier
        `to_dict()` of a normalizer, of a larger module a dict of them by the path of
        the normalizer. Gives how far means have moved.

    Returns:
      float32 scalars; keys are `path/to/leaf/name`, only `name` for a lone array:

      - `count`, `skipped`: as float32; `skipped` not for the ports.
      - `mean_min`, `mean_max`, `std_min`, `std_max`: over the features.
      - `dead`: Number of features that have never varied.
      - `floored`: Number of features whose variance is at most epsilon.
      - `nonfinite`: Number of features whose mean or variance is NaN or infinite.
      - `clipped`: Share of the inputs in `extras` beyond the clip.
      - `drift`: Largest movement of a mean since then, in standard deviations.

    Raises:
      ValueError: `since` or `extras` don't fit, nobody can tell whose the extras are,
        or they are those of a population.

    Example:
      >>> from nnx_norm import Normalizer
      >>> norm = Normalizer(2, clip=1.0)
      >>> x = jnp.array([[[0.0, 5.0], [2.0, 5.0], [10.0, 5.0]]])
      >>> norm.update_statistics(x)
      >>> m = metrics(norm, extras=x)
      >>> {name: round(float(m[name]), 2) for name in ("count", "dead", "clipped")}
      {'count': 3.0, 'dead': 1.0, 'clipped': 0.17}
    """
    found: dict[str, jax.Array] = {}
    for feature in features(module, extras=extras, since=since):
        for name, value in numbers(feature).items():
            found[f"{feature.path}/{name}".removeprefix("/")] = value
    return found


def numbers(feature: Feature) -> dict[str, jax.Array]:
    """What `metrics` says of one leaf."""
    module, mean, variance = feature.module, feature.mean, feature.variance
    own = isinstance(module, RunningStatistics)
    counter = (module.counter if own else module.count).get_value()
    seen = align_leading(counter > 0, variance)
    finite = jnp.isfinite(mean) & jnp.isfinite(variance)
    out = {
        "count": jnp.min(counter),
        "mean_min": _extreme(jnp.min, mean),
        "mean_max": _extreme(jnp.max, mean),
        "std_min": _extreme(jnp.min, feature.std),
        "std_max": _extreme(jnp.max, feature.std),
        "dead": jnp.sum(seen & (variance == 0)),
        "floored": jnp.sum(seen & (variance <= module.epsilon)),
        "nonfinite": jnp.sum(~finite),
    }
    out |= {"skipped": jnp.max(module.skipped.get_value())} if own else {}
    asked = {"clipped": feature.clipped, "drift": feature.drift}
    out |= {name: value for name, value in asked.items() if value is not None}
    return {name: value.astype(jnp.float32) for name, value in out.items()}


def _extreme(function: Any, values: jax.Array) -> jax.Array:
    return function(values) if values.size else jnp.full((), jnp.nan, values.dtype)


def features(
    module: nnx.Module, *, extras: PyTree = None, since: Any = None
) -> Iterator[Feature]:
    """The leaves of all normalizers in a model; see `metrics`."""
    found = normalizers(module)
    for one in found.values():
        concrete.refuse_shapes(one.mean.get_value(), "metrics")
    parts = emitted.by_normalizer(module, extras)
    before = _by_path(since, found)
    for path, normalizer in found.items():
        clipped = _clipped(normalizer, parts.get(id(normalizer)), path)
        then = before.get(path)
        for i, (keys, mean, variance, std) in enumerate(_leaves(normalizer)):
            drift = None
            if then is not None:
                moved = mean - jnp.asarray(then[i], jnp.float32)
                drift = jnp.max(jnp.abs(moved) / std, initial=0)
            share = clipped[i] if clipped is not None else None
            where = f"{path}/{path_name(keys)}".strip("/")
            yield Feature(where, normalizer, mean, variance, std, share, drift)


def normalizers(module: nnx.Module) -> dict[str, Any]:
    """Every normalizer in a model, the ports too, by path; one shared by two once.

    Args:
      module: Any module; the empty path is its own.

    Returns:
      The modules, in no order to rely on.

    Raises:
      TypeError: It is none, but an `nnx.State`, say, or what `nnx.split` gives.

    Example:
      >>> from nnx_norm import Normalizer, Sequential
      >>> list(normalizers(Sequential([jnp.tanh, Normalizer(2)])))
      ['layers/1']
    """
    plain = isinstance(module, dict | list | tuple)
    is_model = plain or isinstance(module, nnx.Module | nnx.Pytree)
    found = list(nnx.iter_modules(module)) if is_model else []
    if not is_model or (plain and not found):
        raise TypeError(
            f"Got a {type(module).__name__}; expected a module, or some in a dict or "
            "list. A state tells nothing of the normalizers that it belongs to: "
            "nnx.update(model, state) first."
        )
    kinds = RunningStatistics | RunningMeanStd
    return {path_name(path): m for path, m in found if isinstance(m, kinds)}


def _leaves(module: Any) -> Iterator[tuple[Any, ...]]:
    """Path, mean, variance and std of every leaf that has statistics."""
    mean = module.mean.get_value()
    if isinstance(module, RunningStatistics):
        count, M2 = module.counter.get_value(), jax.tree.leaves(module.M2.get_value())
        variances, stds = (
            spreads(function, M2, count) for function in (variance_of, module._divisor)
        )
    else:
        variances = jax.tree.leaves(module.var.get_value())
        count = module.count.get_value()
        stds = spreads(AddedStd(module.epsilon), variances, count)
    leaves = jax.tree_util.tree_leaves_with_path(mean)
    for (path, leaf), variance, std in zip(leaves, variances, stds, strict=True):
        yield keys_of(path), leaf, variance, std


def _clipped(module: Any, inputs: PyTree, path: str) -> list[jax.Array] | None:
    """Share of the values of each leaf beyond the clip."""
    if inputs is None or (isinstance(inputs, Emitted) and module.emit == "moments"):
        return None
    name = f"extras of {path}" if path else "extras"
    _, history = validation.matched(module.spec, inputs, name, partial=True)
    if members := module.counter.get_value().shape:
        raise ValueError(
            f"{name} are those of a population {members}: call this under the "
            "nnx.vmap, for each member with its own."
        )
    if (clip := module.clip) is None:
        return None

    def share(x: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
        d = jnp.abs(deviation(x, mean))
        return jnp.mean(d > clip * std.astype(d.dtype))

    means, stds = map(jax.tree.leaves, (module.mean.get_value(), module.std))
    return list(map(share, history, means, stds))


def _by_path(since: Any, modules: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The earlier means, a list of leaves for each normalizer."""
    if since is None:
        return {}
    if isinstance(since, nnx.Module):
        old = {path: m.mean.get_value() for path, m in normalizers(since).items()}
        given = {path: mean for path, mean in old.items() if jax.tree.leaves(mean)}
    elif is_mapping(since):
        given = {k: since[k] for k in since.keys()}
        if "count" in given and not is_mapping(given["count"]):
            given = {"": given}  # of the module itself
    else:
        kind = type(since).__name__
        raise ValueError(f"since is {kind}; expected nnx.clone(module) or a to_dict().")
    if strange := sorted(set(given) - set(modules)):
        raise ValueError(
            f"since has {strange}; expected paths of normalizers: "
            f"{sorted(modules)}, or one to_dict() for a normalizer itself."
        )

    def means(path: str, d: Any) -> list[Any]:
        module = modules[path]
        if isinstance(since, nnx.Module):
            shapes = [jax.tree.map(jnp.shape, m) for m in (d, module.mean.get_value())]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"since has a mean {shapes[0]} at {path!r}; expected {shapes[1]}."
                )
            return jax.tree.leaves(d)
        if isinstance(module, RunningStatistics):
            like, _ = module._read()
            return serialization.load_dict(module.spec, d, like, finite=False).mean
        return [np.asarray(v) for v in jax.tree.leaves(d["mean"])]

    return {path: means(path, d) for path, d in given.items()}
