# SPDX-License-Identifier: Apache-2.0
"""Three float32 arrays are a float64 one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.buffers import Buffers, Parts, joined, record, separated
from nnx_norm.extended import double


def there(x: np.ndarray) -> Parts:
    with double():
        nothing = jnp.zeros((), jnp.float64)
        return jax.jit(separated)(Buffers([jnp.asarray(x)], [], nothing))


def back(parts: Parts) -> np.ndarray:
    with double():
        return np.asarray(jax.jit(joined)(parts).mean[0])


@pytest.mark.parametrize("power", [-60, -20, 0, 20, 100])
def test_every_float64_in_range_comes_back_bit_for_bit(power: int):
    rng = np.random.default_rng(power + 99)
    x = rng.normal(size=2000) * 2.0**power
    # Halves of a float32 spacing, where rounding carries from part to part.
    ties = np.float32(x[:500]) * (1 + 2.0**-24 + rng.choice([-1, 1, 0], 500) * 2.0**-52)
    for v in (x, ties, np.concatenate([x, -x])):
        assert back(there(v)).tobytes() == v.tobytes()


def test_two_parts_would_not_do():
    x = np.random.default_rng(0).normal(size=100)
    parts = there(x)
    short = parts._replace(tail=jax.tree.map(jnp.zeros_like, parts.tail))
    assert np.mean(back(short) == x) < 0.5


def test_all_parts_are_float32_and_settled():
    parts = there(np.random.default_rng(0).normal(size=100))
    assert {v.dtype.name for v in jax.tree.leaves(parts)} == {"float32"}
    for a, b in zip(parts, there(back(parts)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_beyond_float32_is_infinite_without_a_rest():
    parts = there(np.array([1e39, -1e39, np.nan]))
    assert np.isinf(back(parts)[:2]).all() and np.isnan(back(parts)[2])
    assert not np.any(parts.residual.mean[0]) and not np.any(parts.tail.mean[0])


def test_rests_of_another_value_count_as_zero():
    parts = there(np.array([1 / 3]))
    foreign = parts.value._replace(mean=[jnp.float32([2.0**-12])])
    assert back(parts._replace(value=foreign)).tolist() == [2.0**-12]
    rest = parts.residual._replace(mean=[jnp.float32([1.0])])
    assert back(parts._replace(residual=rest)).tolist() == [float(np.float32(1 / 3))]


def test_empty_batch_is_a_bit_exact_no_op():
    with double():
        third = jnp.asarray(1 / 3, jnp.float64)
        parts = separated(Buffers([third[None]], [third[None]], third))
    for decay in (None, 0.5):
        new = record(parts, [jnp.zeros((0, 1))], ema_decay=decay, axis_name=None)
        jax.tree.map(np.testing.assert_array_equal, new, parts)
