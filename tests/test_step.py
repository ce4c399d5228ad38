# SPDX-License-Identifier: Apache-2.0
"""Laws of the step: merged whole or refused whole, in few kernels."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm import fold
from nnx_norm.extended import double
from nnx_norm.moments import Moments
from nnx_norm.step import Lifted, Rule, Statistics, advance, joined, separated


def statistics(mean: Any, M2: Any, *counts: Any) -> Any:
    """Values and residuals of two leaves, `[3]` and scalar."""
    with double():
        wide = Statistics([mean, mean[0]], [M2, M2[0]], *counts)
        return separated(jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), wide))


def batch(mean: Any, M2: Any, count: Any, skipped: Any) -> Lifted:
    """Moments of the same shapes; make it inside `double()`."""
    moments = Moments([mean, mean[0]], [M2, M2[0]], count)
    lifted = Lifted(moments, count, skipped)
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), lifted)


# Zeros of both signs and numbers below the normal ones, which arithmetic flushes.
OLD = statistics(np.array([0.1, -0.0, 1e-40]), np.array([7.0, 0.0, 1e-45]), 5.0, 2.0)
RULE = Rule()


@jax.jit
def merged(old: Any, mean: Any, M2: Any, count: Any, skipped: Any) -> Any:
    with double():
        return advance(old[0], old[1], batch(mean, M2, count, skipped), RULE)


def run(mean: Any, M2: Any, count: float, skipped: float = 0.0) -> Any:
    return merged(OLD, np.float32(mean), np.float32(M2), count, skipped)


def test_a_batch_is_merged_in_double_precision():
    value, residual = run([0.3, 1.0, 0.0], [1.0, 2.0, 3.0], 3.0, 1.0)
    with double():
        got = jax.tree.map(np.asarray, joined(value, residual))
    mean = (0.1 * 5 + float(np.float32(0.3)) * 3) / 8
    assert abs(float(got.mean[0][0]) / mean - 1) < 2.0**-45
    assert got.mean[1] == got.mean[0][0] and got.M2[1] == got.M2[0][0]
    M2 = 7.0 + 1.0 + (float(np.float32(0.3)) - 0.1) ** 2 * 5 * 3 / 8
    assert abs(float(got.M2[0][0]) / M2 - 1) < 2.0**-45
    assert (got.counter, got.skipped) == (8, 3)


@pytest.mark.parametrize("skipped", [0.0, 4.0])
def test_an_empty_batch_changes_no_bit(skipped):
    new = run([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 0.0, skipped)
    for side, (got, old) in enumerate(zip(new, OLD, strict=True)):
        for a, b in zip(
            jax.tree.leaves(got[:3]), jax.tree.leaves(old[:3]), strict=True
        ):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert got.skipped == (0.0 if side else 2.0 + skipped)


@pytest.mark.parametrize("M2", [3e38, np.inf, np.nan])
def test_what_float32_cannot_hold_is_refused_whole(M2):
    value, residual = run([0.0, 1e19, 0.0], [0.0, M2, 0.0], 6.0, 1.0)
    for got, old in ((value, OLD[0]), (residual, OLD[1])):
        for a, b in zip(
            jax.tree.leaves(got[:3]), jax.tree.leaves(old[:3]), strict=True
        ):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert value.skipped == 2 + 1 + 6


def test_what_rounds_to_infinity_in_two_steps_is_refused():
    """Just below half a spacing beyond the largest, whose residual rounds up to it."""
    M2 = float(np.finfo(np.float32).max) + 2.0**103 * (1 - 2.0**-27)
    assert np.isfinite(np.float32(M2))  # teeth
    with double():
        one = jnp.asarray(1.0, jnp.float64)
        leaf = jnp.zeros(1, jnp.float64)
        batch = Lifted(Moments([leaf], [leaf + M2], one), one, 0 * one)
        none = jax.tree.map(lambda v: v.astype(jnp.float32), (leaf, 0 * one))
    empty = Statistics([none[0]], [none[0]], none[1], none[1])
    with double():
        value, _ = advance(empty, empty, batch, Rule())
    assert value.M2[0].tolist() == [0] and float(value.skipped) == 1


def kernels(compiled: Any) -> int:
    """Different kernels of a program; XLA compiles equal ones once."""
    text = compiled.as_text()
    bodies = {}
    for name, body in re.findall(r"^%?([\w.\-]+) \(.*\{\n((?:  .*\n)+)", text, re.M):
        names: dict[str, str] = {}
        body = re.sub(r", metadata=\{[^}]*\}", "", body)
        bodies[name] = re.sub(
            r"%[\w.\-]+", lambda m, n=names: n.setdefault(m[0], f"v{len(n)}"), body
        )
    called = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", text))
    return len({bodies[name] for name in called})


def test_an_update_has_few_kernels():
    """On CPU each one takes 10 to 15 ms to compile, whatever it does; 35 is many."""
    leaf, number = jnp.zeros(64, jnp.float32), jnp.zeros((), jnp.float32)
    old = Statistics([leaf], [leaf], number, number)
    history = [jnp.zeros((9, 8, 64), jnp.float32)]
    fold_inputs = partial(fold._fold_inputs, lead=2, rule=Rule(), local=True)
    lowered = jax.jit(fold_inputs).lower(old, old, history, None, None)
    assert 10 <= kernels(lowered.compile()) <= 18
