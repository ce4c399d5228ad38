# SPDX-License-Identifier: Apache-2.0
"""Laws of what is computed together: the same bits, and one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm.extended import double
from nnx_norm.kernels import add_rows, all_pair, together, total_pair


@pytest.mark.parametrize("axes", [(), (0,), (1, 2), (0, 1, 2)])
def test_pairs_are_reduced_as_each_alone(axes):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 9, (3, 4, 0 if axes == (1, 2) else 5)).astype(np.float32)
    b = a.astype(np.int32) + 1
    first, second = total_pair(jnp.asarray(a), jnp.asarray(b), axes)
    assert (first.dtype, second.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(first, a.sum(axes))
    np.testing.assert_array_equal(second, b.sum(axes))


@pytest.mark.parametrize("a", [[], [True], [True, False], [False, False]])
@pytest.mark.parametrize("b", [True, False])
def test_all_of_two_is_all_of_both(a, b):
    x, y = jnp.asarray(a, jnp.bool_), jnp.full(len(a), b)
    assert bool(all_pair(x, y)) == (all(a) and (b or not a))


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_all_of_two_over_some_axes(axes):
    a, b = np.random.default_rng(0).random((2, 3, 40)) < 0.97
    both = all_pair(jnp.asarray(a), jnp.asarray(b), axes)
    assert np.asarray(both).tolist() == (a & b).all(axes).tolist()


ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3.4e38, 0.1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (8,), (2, 4), (0,)])
def test_what_is_computed_together_keeps_its_bits(shape, dtype):
    xs = [np.resize(np.roll(ODD, i), shape).astype(dtype) for i in range(4)]
    with double():
        out = together(*map(jnp.asarray, xs))
        mapped = jax.vmap(together)(*(jnp.stack([x, x]) for x in map(jnp.asarray, xs)))
    for x, same, two in zip(xs, out, mapped, strict=True):
        assert np.asarray(same).tobytes() == x.tobytes()
        assert np.asarray(two).tobytes() == x.tobytes() * 2


def test_it_is_one_kernel():
    """Alone, every one of them would be compiled by itself: teeth."""

    def kernels(together: Any) -> int:
        def deviations(*xs: jax.Array) -> Any:
            return together(*[jnp.sqrt(x) - i for i, x in enumerate(xs)])

        compiled: Any = jax.jit(deviations).lower(*[jnp.ones(3)] * 4).compile()
        return compiled.as_text().count(" fusion(")

    assert kernels(together) == 1
    assert kernels(lambda *xs: xs) == 4


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_rows_are_added_to_totals(rows, shape):
    totals = tuple(jnp.full(shape, v, jnp.float32) for v in (0.5, -1.0))
    x = jnp.arange(rows * max(1, *shape, 1), dtype=jnp.float32).reshape(rows, *shape)
    one, two = add_rows(totals, (x, 2 * x))
    np.testing.assert_array_equal(one, 0.5 + np.asarray(x).sum(0))
    np.testing.assert_array_equal(two, -1.0 + 2 * np.asarray(x).sum(0))
