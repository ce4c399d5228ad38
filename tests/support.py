# SPDX-License-Identifier: Apache-2.0
"""What several tests share: the bits of a module's state, and NumPy oracles."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path

EPS = float(np.finfo(np.float32).eps)


class Pair(NamedTuple):
    """A named tuple as observation spaces have them."""

    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """A dataclass that JAX knows."""

    image: Any
    speed: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A node without `__eq__` and without names of its children."""

    def __init__(self, content: Any):
        self.content = content

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.content,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> "Box":
        return cls(*children)


class Config:
    """A mapping by duck-typing only, as ConfigDict is: unknown to JAX and to abc."""

    def __init__(self, mapping: Mapping[str, Any]):
        self._mapping = MappingProxyType(dict(mapping))

    def keys(self) -> Any:
        return self._mapping.keys()

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]


def bits(module: Any) -> dict[str, tuple[str, tuple[int, ...], bool, bytes]]:
    """Dtype, shape, weak type and bytes of every array in a module, by path."""
    found = {}
    for path, leaf in tree_leaves_with_path(nnx.state(module)):
        assert isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        array = np.asarray(leaf)
        weak = bool(leaf.weak_type)
        found[keystr(path)] = (array.dtype.name, array.shape, weak, array.tobytes())
    return found


class Expected(NamedTuple):
    """Moments of rows in float64."""

    mean: np.ndarray
    M2: np.ndarray
    count: float


def moments64(rows: Any, weights: Any = None) -> Expected:
    """The oracle: moments of rows `[n, *feat]`, two passes in float64."""
    x = np.asarray(rows, np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, np.float64)
    n = w.sum()
    along = w.reshape((-1,) + (1,) * (x.ndim - 1))
    mean = (x * along).sum(0) / n if n else np.zeros(x.shape[1:])
    return Expected(mean, (along * (x - mean) ** 2).sum(0), n)


def assert_moments(module: Any, rows: Any, weights: Any = None, rtol: float = 4e-6):
    """A module of one array holds the moments of `rows`.

    One merge errs by a few eps of the batch's own sums; the mean by eps of the spread.
    """
    right, d = moments64(rows, weights), module.to_dict()
    spread = np.sqrt(right.M2 / max(right.count, 1))
    assert float(d["count"]) == right.count
    np.testing.assert_allclose(d["M2"], right.M2, rtol=rtol, atol=0)
    assert np.all(np.abs(d["mean"] - right.mean) <= rtol * spread)


def statistics(module: Any) -> tuple[Any, Any, Any]:
    """Mean, M2 and count in full precision, as lists."""
    d = module.to_dict()
    return np.asarray(d["mean"]).tolist(), np.asarray(d["M2"]).tolist(), d["count"]


COMPILED: list[str] = []


def _on_event(event: str, duration_secs: float, **kwargs: Any) -> None:
    del duration_secs
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(str(kwargs.get("fun_name", "")))


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def programs() -> Iterator[list[str]]:
    """Names of the programs that are compiled inside, eager operations among them."""
    start, names = len(COMPILED), []
    yield names
    names += COMPILED[start:]
