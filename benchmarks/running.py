# SPDX-License-Identifier: Apache-2.0
"""The contenders of bench_accuracy.py: running statistics with one face.

`update` folds a batch `[N, F]`, `update_rows` folds its rows one by one inside one jit,
`moments` reads mean, variance and count in float64.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.streams import FEATURES, Exact
from nnx_norm import Normalizer

Moments = tuple[np.ndarray, np.ndarray, float]


class JaxStatistic:
    """A pure update `(state, batch) -> state`, jitted."""

    def __init__(self, state: Any, fold: Callable[[Any, jax.Array], Any]):
        self.state = state
        self._update = jax.jit(fold)
        self._rows = jax.jit(
            lambda state, rows: jax.lax.scan(
                lambda state, row: (fold(state, row[None]), None), state, rows
            )[0]
        )

    def update(self, batch: np.ndarray) -> None:
        self.state = self._update(self.state, jnp.asarray(batch))

    def update_rows(self, rows: np.ndarray) -> None:
        self.state = self._rows(self.state, jnp.asarray(rows))


class ModuleStatistic(JaxStatistic):
    """A module with `update_statistics` of a history `[T, B, *feat]`."""

    def __init__(self, module: Any):
        self.graphdef, state = nnx.split(module)

        def fold(state: Any, batch: jax.Array) -> Any:
            module: Any = nnx.merge(self.graphdef, state)
            module.update_statistics(batch[None])
            return nnx.state(module)

        super().__init__(state, fold)

    @property
    def module(self) -> Any:
        return nnx.merge(self.graphdef, self.state)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.module((), jnp.asarray(x)).output)


class NnxNorm(ModuleStatistic):
    def __init__(self) -> None:
        super().__init__(Normalizer(FEATURES))

    def preset(self, prior: Exact) -> None:
        module = self.module
        mean, variance = (np.float64(v) for v in (prior.mean, prior.variance))
        module.set_statistics(mean, variance, prior.count)
        self.state = nnx.state(module)

    def moments(self) -> Moments:
        saved = self.module.to_dict()
        return saved["mean"], saved["variance"], float(saved["count"])


class NnxPpo(ModuleStatistic):
    def __init__(self) -> None:
        peer: Any = importlib.import_module("nnx_ppo.networks.normalizer")
        super().__init__(peer.Normalizer(FEATURES))

    def preset(self, prior: Exact) -> None:
        module = self.module
        module.mean.set_value(jnp.asarray(np.float32(prior.mean)))
        module.M2.set_value(jnp.asarray(np.float32(prior.M2)))
        module.counter.set_value(jnp.float32(prior.count))
        self.state = nnx.state(module)

    def moments(self) -> Moments:
        module = self.module
        mean, M2 = (np.asarray(v.get_value(), float) for v in (module.mean, module.M2))
        count = float(module.counter.get_value())
        return mean, M2 / count, count


class Brax(JaxStatistic):
    def __init__(self) -> None:
        self.peer: Any = importlib.import_module(
            "brax.training.acme.running_statistics"
        )
        specs: Any = importlib.import_module("brax.training.acme.specs")
        state = self.peer.init_state(specs.Array((FEATURES,), jnp.dtype("float32")))
        super().__init__(state, self.peer.update)

    def preset(self, prior: Exact) -> None:
        types: Any = importlib.import_module("brax.training.types")
        low, high = prior.count % 2**32, prior.count // 2**32
        self.state = self.state.replace(
            mean=jnp.asarray(np.float32(prior.mean)),
            summed_variance=jnp.asarray(np.float32(prior.M2)),
            std=jnp.asarray(np.float32(np.sqrt(prior.variance))),
            count=types.UInt64(hi=jnp.uint32(high), lo=jnp.uint32(low)),
        )

    def moments(self) -> Moments:
        count = int(self.state.count.hi) * 2**32 + int(self.state.count.lo)
        mean, M2 = (
            np.asarray(v, float) for v in (self.state.mean, self.state.summed_variance)
        )
        return mean, M2 / count, count

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.peer.normalize(jnp.asarray(x), self.state))


class HostStatistic:
    """A statistic that NumPy arrays are folded into, one call per update."""

    update_rows = None  # from Python, millions of calls take hours

    @staticmethod
    def array(batch: np.ndarray) -> np.ndarray:
        """What their users pass: bfloat16 isn't a NumPy type."""
        return batch.astype(np.float32) if batch.dtype == jnp.bfloat16 else batch


class Sklearn(HostStatistic):
    def __init__(self) -> None:
        peer: Any = importlib.import_module("sklearn.preprocessing")
        self.scaler = peer.StandardScaler()

    def preset(self, prior: Exact) -> None:
        self.scaler.partial_fit(np.zeros((2, FEATURES)))
        self.scaler.mean_ = np.float64(prior.mean)
        self.scaler.var_ = np.float64(prior.variance)
        self.scaler.n_samples_seen_ = np.int64(prior.count)

    def update(self, batch: np.ndarray) -> None:
        self.scaler.partial_fit(self.array(batch))

    def moments(self) -> Moments:
        return self.scaler.mean_, self.scaler.var_, float(self.scaler.n_samples_seen_)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return self.scaler.transform(x)


class Gymnasium(HostStatistic):
    def __init__(self) -> None:
        peer: Any = importlib.import_module("gymnasium.wrappers.utils")
        self.peer = peer.RunningMeanStd(shape=(FEATURES,))

    def preset(self, prior: Exact) -> None:
        self.peer.mean, self.peer.var = (
            np.float64(prior.mean),
            np.float64(prior.variance),
        )
        self.peer.count = prior.count

    def update(self, batch: np.ndarray) -> None:
        self.peer.update(self.array(batch))

    def moments(self) -> Moments:
        peer = self.peer
        return np.asarray(peer.mean, float), np.asarray(peer.var, float), peer.count

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return (x - self.peer.mean) / np.sqrt(self.peer.var + 1e-8)


STATISTICS: dict[str, Callable[[], Any]] = {
    "nnx_norm": NnxNorm,
    "nnx-ppo": NnxPpo,
    "brax": Brax,
    "gymnasium": Gymnasium,
    "sklearn": Sklearn,
}
