# SPDX-License-Identifier: Apache-2.0
"""Normalizers folded into linear layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import Normalizer, RewardNormalizer, RewardRunningMeanStd, RunningMeanStd
from nnx_norm.interop import fold_denormalize_into_linear, fold_into_linear

RANDOM_MODULES = 100


def linear(i: int, o: int, **settings: Any) -> nnx.Linear:
    bias = jax.nn.initializers.normal(1.0)
    return nnx.Linear(i, o, bias_init=bias, rngs=nnx.Rngs(0), **settings)


def random_modules(features: int) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """A population of normalizers whose offsets and scales lie far apart."""
    rng = np.random.default_rng(0)
    std = 10 ** rng.uniform(-4, 4, size=(RANDOM_MODULES, features))
    mean = std * rng.normal(size=std.shape) * 10 ** rng.uniform(-2, 4, size=std.shape)
    norm = Normalizer(features)
    norm._add_members((RANDOM_MODULES,))
    norm.set_statistics(mean, std**2, rng.integers(1, 2**40, size=RANDOM_MODULES))
    return *nnx.split(norm), mean, np.asarray(norm.std)


def member(graphdef: Any, state: Any, i: int) -> Normalizer:
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: np.asarray(leaf)[i], state))


def test_raw_input_gives_what_the_normalized_one_gives():
    graphdef, state, mean, std = random_modules(6)
    layer, rng = linear(6, 4), np.random.default_rng(1)
    noise = rng.normal(size=(RANDOM_MODULES, 16, 6))
    x = jnp.asarray(mean[:, None] + std[:, None] * noise, jnp.float32)

    @jax.vmap
    def behind(state: Any, x: jax.Array) -> jax.Array:
        return layer(nnx.merge(graphdef, state).normalize(x))

    wanted, worst = np.asarray(behind(state, x)), 0.0
    for i in range(RANDOM_MODULES):
        ours = np.asarray(fold_into_linear(member(graphdef, state, i), layer)(x[i]))
        size = (1 + np.max(np.abs(mean[i]) / std[i])) * np.abs(wanted[i]).max()
        worst = max(worst, float(np.abs(ours - wanted[i]).max() / size))
    assert 0 < worst <= 1e-6


def test_output_comes_in_its_own_units():
    graphdef, state, mean, std = random_modules(4)
    layer, x = linear(6, 4), jax.random.normal(jax.random.key(0), (16, 6), jnp.float32)
    y = np.asarray(layer(x), np.float64)
    for i in range(0, RANDOM_MODULES, 10):
        norm = member(graphdef, state, i)
        ours = np.asarray(fold_denormalize_into_linear(layer, norm)(x))
        size = np.abs(y).max() * std[i] + np.abs(mean[i])
        assert np.max(np.abs(ours - (y * std[i] + mean[i])) / size) <= 1e-6


def test_bias_is_rounded_once():
    # b - W (mean / std) cancels: 1e8 - 1e8 + 0.25. In float32 it would be 0.
    norm, layer = Normalizer(1), linear(1, 1)
    norm.set_statistics(1e8 - 0.25, 1.0, 2)
    layer.kernel.set_value(jnp.ones((1, 1)))
    assert layer.bias is not None
    layer.bias.set_value(jnp.array([1e8]))
    folded = fold_into_linear(norm, layer)
    assert folded.bias is not None and folded.bias.get_value().tolist() == [0.25]


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_settings_and_dtypes_are_kept(use_bias: bool, dtype: Any, param_dtype: Any):
    layer = linear(3, 2, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype)
    before = nnx.state(layer)
    for folded in (
        fold_into_linear(Normalizer(3), layer),
        fold_denormalize_into_linear(layer, Normalizer(2)),
    ):
        assert type(folded) is nnx.Linear and folded.use_bias
        assert (folded.in_features, folded.out_features, folded.dtype) == (3, 2, dtype)
        assert folded.kernel.get_value().shape == (3, 2)
        assert folded.kernel.get_value().dtype == param_dtype
        assert folded.bias is not None and folded.bias.get_value().dtype == param_dtype
        x = jnp.ones((5, 3), dtype or param_dtype)
        assert folded(x).dtype == layer(x).dtype
        assert len(jax.tree.leaves(nnx.state(folded, nnx.Param))) == 2
    assert layer.use_bias == use_bias  # the layer itself has not changed
    same = jax.tree.map(jnp.array_equal, before, nnx.state(layer))
    assert jax.tree.all(same)


def test_ports_and_rewards():
    port = RunningMeanStd(2, epsilon=1.0, initial_count=0)
    port.update_from_moments([1.0, 2.0], [3.0, 8.0], 5)
    layer, x = linear(2, 1), jnp.float32([[1.0, -4.0]])
    assert np.allclose(fold_into_linear(port, layer)(x), layer(port(x)), atol=1e-6)
    rewards = RewardNormalizer(0.9)
    rewards.set_statistics(5.0, 4.0, 9)  # never centred
    head = fold_denormalize_into_linear(layer, rewards)
    assert np.allclose(head(x), 2 * layer(x), atol=1e-6)
    scale = RewardRunningMeanStd(gamma=0.9, epsilon=3.0)
    head = fold_denormalize_into_linear(layer, scale)
    assert np.allclose(head(x), 2 * layer(x), atol=1e-6)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (lambda: Normalizer(3, clip=5.0), "clips at 5"),
        (lambda: RunningMeanStd(3, clamp_value=5.0), "clips at 5"),
        (lambda: Normalizer(3, exclude=lambda path: True), "excludes"),
        (lambda: Normalizer({"a": 3, "b": 3}, exclude=["b"]), "excludes"),
        (lambda: Normalizer({"a": 3, "b": 3}), "tree of leaves"),
        (lambda: Normalizer({"a": 3}), "tree of leaves"),
        (lambda: Normalizer(4), r"shape \(4,\) and the layer in_features 3"),
        (lambda: Normalizer((1, 3)), r"shape \(1, 3\)"),
        (lambda: Normalizer(()), r"shape \(\)"),
        (lambda: RunningMeanStd(), "no shape yet"),
    ],
)
def test_what_a_linear_layer_cannot_hold_is_refused(norm: Any, message: str):
    with pytest.raises(ValueError, match=message):
        fold_into_linear(norm(), linear(3, 3))


def test_output_layer_refuses_too():
    layer = linear(3, 2)
    clipped = fold_denormalize_into_linear(layer, Normalizer(2, clip=1.0))
    assert clipped.use_bias  # denormalize doesn't clip
    with pytest.raises(ValueError, match="clips"):
        fold_denormalize_into_linear(layer, RunningMeanStd(2, clamp_value=1.0))
    with pytest.raises(ValueError, match="out_features 2"):
        fold_denormalize_into_linear(layer, RewardNormalizer(0.9))


def test_other_things_are_refused():
    conv: Any = nnx.Conv(3, 3, (1,), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="linear is a Conv"):
        fold_into_linear(Normalizer(3), conv)
    with pytest.raises(TypeError, match="Got a Linear"):
        fold_into_linear(linear(3, 3), linear(3, 3))
