# SPDX-License-Identifier: Apache-2.0
"""The contenders of bench_fold.py and bench_forward.py: each library's own call.

Every function here is given the data and returns the call to measure. Peers are
imported inside, by name: what isn't installed raises ImportError, and the runner says
so. JAX peers all go through the same `jax.jit` with their state split off.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_norm import Normalizer

Call = Callable[[], Any]


def _module_update(module: nnx.Module, history: jax.Array) -> Call:
    graphdef, state = nnx.split(module)

    @jax.jit
    def update(state: Any, history: jax.Array) -> Any:
        module: Any = nnx.merge(graphdef, state)
        module.update_statistics(history)
        return nnx.state(module)

    return _carried(update, state, history)


def _carried(update: Callable[[Any, Any], Any], state: Any, history: Any) -> Call:
    """A call that folds the same history into the state again and again."""
    held = [state]

    def call() -> Any:
        held[0] = update(held[0], history)
        return held[0]

    return call


def nnx_norm_update(history: jax.Array) -> Call:
    return _module_update(Normalizer(history.shape[2:]), history)


def nnx_ppo_update(history: jax.Array) -> Call:
    peer: Any = importlib.import_module("nnx_ppo.networks.normalizer")
    return _module_update(peer.Normalizer(history.shape[2:]), history)


def brax_update(history: jax.Array) -> Call:
    peer: Any = importlib.import_module("brax.training.acme.running_statistics")
    specs: Any = importlib.import_module("brax.training.acme.specs")
    state = peer.init_state(specs.Array(history.shape[2:], jnp.dtype("float32")))
    return _carried(jax.jit(peer.update), state, history)


def flax_batch_norm_update(history: jax.Array) -> Call:
    """The moving averages of BatchNorm only: XLA drops the output, unused."""
    features = history.shape[-1]
    module = nnx.BatchNorm(features, rngs=nnx.Rngs(0), use_running_average=False)
    if history.ndim > 3:  # BatchNorm reduces all axes but the last
        history = history.reshape(*history.shape[:2], -1)
        module = nnx.BatchNorm(
            history.shape[-1], rngs=nnx.Rngs(0), use_running_average=False
        )
    graphdef, params, state = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def update(state: Any, history: jax.Array) -> Any:
        module = nnx.merge(graphdef, params, state)
        module(history)
        return nnx.state(module, nnx.BatchStat)

    return _carried(update, state, history)


def torch_update(history: jax.Array) -> Call:
    torch: Any = importlib.import_module("torch")
    with warnings.catch_warnings():  # the array is read-only, and stays unwritten
        warnings.simplefilter("ignore")
        view = torch.from_numpy(np.asarray(history))
    return lambda: torch.var_mean(view, dim=(0, 1), correction=0)


def sklearn_update(history: jax.Array) -> Call:
    peer: Any = importlib.import_module("sklearn.preprocessing")
    rows = np.asarray(history).reshape(history.shape[0] * history.shape[1], -1)
    scaler = peer.StandardScaler()
    return lambda: scaler.partial_fit(rows).var_


def numpy_update(history: jax.Array) -> Call:
    """Two passes in float64 and a merge, as an oracle would do it."""
    view = np.asarray(history)

    def call() -> Any:
        mean = view.mean((0, 1), dtype=np.float64)
        return mean, view.var((0, 1), dtype=np.float64)

    return call


UPDATES: dict[str, Callable[[jax.Array], Call]] = {
    "nnx_norm": nnx_norm_update,
    "nnx-ppo": nnx_ppo_update,
    "brax": brax_update,
    "flax BatchNorm": flax_batch_norm_update,
    "torch.var_mean": torch_update,
    "sklearn partial_fit": sklearn_update,
    "numpy float64": numpy_update,
}


def _folded(module: Any, x: jax.Array) -> Any:
    """The module after one update, so that it normalizes by real statistics."""
    module.update_statistics(x[None])
    return module


def _module_forward(module: nnx.Module, x: jax.Array) -> Call:
    graphdef, state = nnx.split(module)

    @jax.jit
    def forward(state: Any, x: jax.Array) -> jax.Array:
        module: Any = nnx.merge(graphdef, state)
        return module((), x).output

    return lambda: forward(state, x)


def _split_forward(module: Any, x: jax.Array) -> Call:
    graphdef, state = nnx.split(module)
    forward = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    return lambda: forward(state, x)


def ready_forward(x: jax.Array) -> Call:
    """The least that any forward does: mean and reciprocal std are ready."""
    mean, scale = x.mean(0), 1 / x.std(0)
    forward = jax.jit(lambda mean, scale, x: (x - mean) * scale)
    return lambda: forward(mean, scale, x)


class Ready(nnx.Module):
    """A layer with mean and reciprocal std ready, the least that one can do."""

    def __init__(self, x: jax.Array):
        self.mean, self.scale = nnx.Variable(x.mean(0)), nnx.Variable(1 / x.std(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(x - m) * s`."""
        return (x - self.mean.get_value()) * self.scale.get_value()


def ready_layer_forward(x: jax.Array) -> Call:
    """The same as a module, whose state goes into the jit as those of the others do."""
    return _split_forward(Ready(x), x)


def nnx_norm_forward(x: jax.Array) -> Call:
    return _module_forward(_folded(Normalizer(x.shape[1:]), x), x)


def nnx_ppo_forward(x: jax.Array) -> Call:
    peer: Any = importlib.import_module("nnx_ppo.networks.normalizer")
    return _module_forward(_folded(peer.Normalizer(x.shape[1:]), x), x)


def brax_forward(x: jax.Array) -> Call:
    peer: Any = importlib.import_module("brax.training.acme.running_statistics")
    specs: Any = importlib.import_module("brax.training.acme.specs")
    state = peer.init_state(specs.Array(x.shape[1:], jnp.dtype("float32")))
    state = peer.update(state, x)
    forward = jax.jit(lambda state, x: peer.normalize(x, state))
    return lambda: forward(state, x)


def flax_batch_norm_forward(x: jax.Array) -> Call:
    module = nnx.BatchNorm(x.shape[-1], rngs=nnx.Rngs(0), use_running_average=True)
    return _split_forward(module, x)


FORWARDS: dict[str, Callable[[jax.Array], Call]] = {
    "(x - m) * s": ready_layer_forward,
    "without a module": ready_forward,
    "nnx_norm": nnx_norm_forward,
    "nnx-ppo": nnx_ppo_forward,
    "brax": brax_forward,
    "flax BatchNorm": flax_batch_norm_forward,
}
