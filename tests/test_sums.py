# SPDX-License-Identifier: Apache-2.0
"""Laws of the one read: right sums about any shift, however it reads, and no copy."""

import math
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnx_norm.extended import double
from nnx_norm.samples import align_leading
from nnx_norm.sums import Sums, on_one_cpu, sums

# A float32 sum of n terms errs by a small multiple of eps times the sum of their sizes,
# however it is blocked; this is the multiple.
EPS = 16 * 2.0**-24

FLOATS = [jnp.float32, jnp.float16, jnp.bfloat16]
INTEGERS = [jnp.uint8, jnp.int8, jnp.int16, jnp.int32, jnp.uint32]


def samples(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    x = np.random.default_rng(seed).normal(3.0, 20.0, shape)
    if not jnp.issubdtype(dtype, jnp.signedinteger):
        x = np.abs(x)
    return jnp.asarray(x).astype(dtype)


def exact(x: Any, shift: Any, weight: Any, lead: int) -> list[np.ndarray]:
    """S1, S2 and the sum of |w d|, in float64, of the very numbers given."""
    d = np.asarray(x).astype(np.float64) - np.asarray(shift).astype(np.float64)
    w = np.ones(d.shape[:lead]) if weight is None else np.asarray(weight)
    w = np.broadcast_to(w.reshape(w.shape + (1,) * (lead - w.ndim)), d.shape[:lead])
    d = np.where(align_leading(w, d) == 0, 0, d)  # what has no weight isn't looked at
    axes, w = tuple(range(lead)), align_leading(w, d)
    return [np.sum(w * v, axis=axes) for v in (d, d**2, np.abs(d))]


# A loop called eagerly would be compiled anew by every call.
jitted = jax.jit(sums, static_argnums=3, static_argnames=("local", "careful"))


def compute(x: Any, shift: Any, weight: Any, lead: int, **how: bool) -> Sums:
    with double():
        s = jitted(jnp.asarray(x), jnp.asarray(shift), weight, lead, **how)
    assert s.first.dtype == s.second.dtype == jnp.float64
    return jax.tree.map(np.asarray, s)


def check(x: Any, shift: Any, weight: Any, lead: int, **how: bool) -> None:
    s = compute(x, shift, weight, lead, **how)
    first, second, size = exact(x, shift, weight, lead)
    assert s.first.shape == s.second.shape == x.shape[lead:]
    assert np.all(np.abs(s.first - first) <= EPS * size)
    assert np.all(np.abs(s.second - second) <= EPS * second)


ways = pytest.mark.parametrize(
    "how",
    [{"local": a, "careful": b} for a in (True, False) for b in (False, True)],
    ids=["local", "local-careful", "spread", "spread-careful"],
)


def weights_for(kind: str, lead: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(1)
    return {
        "none": None,
        "mask": jnp.asarray(rng.random(lead) < 0.5),
        "weights": jnp.asarray(rng.choice([0, 0.25, 1, 2.5], lead), jnp.float32),
        "prefix": jnp.asarray(rng.random((*lead[:1], *(1,) * len(lead[1:]))) < 0.5),
    }[kind]


@ways
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=lambda d: jnp.dtype(d).name)
def test_sums_of_every_dtype(dtype, how):
    x = samples(0, (9, 5, 3), dtype)
    shift = jnp.asarray([0.0, 3.5, -17.25], jnp.float32)
    check(x, shift, None, 2, **how)
    if dtype in (jnp.float32, jnp.uint8):
        check(x, shift, weights_for("weights", (9, 5)), 2, **how)


LAYOUTS = [
    ((7,), 1),
    ((1, 1), 2),
    ((64, 3), 1),
    ((5, 4), 2),
    ((3, 4, 2, 5), 3),
    ((6, 2, 3, 4), 1),
    ((33, 65, 7), 2),
    ((300, 1, 8), 2),
    ((0, 4, 3), 2),
    ((4, 0, 3), 2),
    ((4, 2, 0), 2),
]


@ways
@pytest.mark.parametrize(("shape", "lead"), LAYOUTS, ids=str)
def test_sums_of_every_layout(shape, lead, how):
    x = samples(2, shape, jnp.float32)
    shift = samples(3, shape[lead:], jnp.float32)
    for kind in ("none", "mask" if lead > 1 else "prefix"):
        check(x, shift, weights_for(kind, shape[:lead]), lead, **how)


@ways
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(-1e3, 1e3, width=32))
def test_sums_about_any_shift(how, seed, shift):
    x = samples(seed, (9, 5, 3), jnp.float32)
    check(x, np.full(3, shift, np.float32), None, 2, **how)


@ways
def test_a_sum_of_a_hundred_thousand_terms_keeps_its_digits(how):
    x = samples(4, (1000, 100, 2), jnp.float32)
    check(x, jnp.zeros(2), None, 2, **how)
    # Teeth: summing one row after the other loses what the bound allows.
    d = np.abs(np.asarray(x).reshape(-1, 2))
    straight = np.cumsum(d**2, axis=0, dtype=np.float32)[-1]
    right = np.sum(d.astype(np.float64) ** 2, axis=0)
    assert np.any(np.abs(straight - right) > EPS * right)


@ways
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.float32])
def test_what_has_no_weight_does_not_leak_unseen(dtype, bad, how):
    """As a NaN at most, into a hasty read, if it was no number to begin with."""
    x = samples(5, (9, 5, 3), jnp.float32)
    mask = weights_for("mask", (9, 5))
    x, weight = jnp.where(mask[..., None], x, bad), mask.astype(dtype)
    if how["careful"] or how["local"] or np.isfinite(bad):
        check(x, jnp.zeros(3), weight, 2, **how)
    else:
        got = np.stack(compute(x, jnp.zeros(3), weight, 2, **how))
        first, second, size = exact(x, np.zeros(3), weight, 2)
        error = np.abs(got - np.stack([first, second]))
        bound = EPS * np.stack([size, second])
        assert np.all(~np.isfinite(got) | (error <= bound))


@ways
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_weight_is_seen(bad, how):
    x = samples(6, (9, 3), jnp.float32).at[4, 1].set(bad)
    s = compute(x, jnp.zeros(3), None, 1, **how)
    assert np.isfinite(s.second).tolist() == [True, False, True]
    assert np.isfinite(s.first).tolist() == [True, False, True]


@ways
@hypothesis.given(st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_weights_stand_for_repeated_rows(how, times):
    x = samples(7, (8, 2), jnp.float32)
    weighted = compute(x, jnp.ones(2), jnp.asarray(times, jnp.float32), 1, **how)
    first, second, size = exact(np.repeat(x, times, axis=0), np.ones(2), None, 1)
    assert np.all(np.abs(weighted.first - first) <= EPS * size)
    assert np.all(np.abs(weighted.second - second) <= EPS * second)


def test_careful_squares_do_not_overflow():
    x = jnp.asarray([[1e25], [-1e25]], jnp.float32)
    for local in (True, False):
        s = compute(x, jnp.zeros(1), None, 1, local=local, careful=True)
        assert s.second == pytest.approx(2e50, rel=1e-6)
    assert np.isinf(compute(x, jnp.zeros(1), None, 1, local=True).second)  # teeth


@pytest.mark.parametrize("careful", [False, True])
def test_short_chains_have_no_bias(careful):
    """Odd multiples of a spacing have squares of 1 modulo 8: float32 drops each 1."""
    rows = 1e4 + np.random.default_rng(0).normal(size=(112, 64))
    x = jnp.asarray(rows, jnp.float32)
    for local in (True, False):
        s = compute(x, jnp.full(64, 1e4), None, 1, local=local, careful=careful)
        _, second, _ = exact(x, np.full(64, 1e4), None, 1)
        assert np.all(np.abs(s.second / second - 1) < 1e-8)
    squares, chain = (
        np.square(np.asarray(x) - np.float32(1e4)),
        np.zeros(64, np.float32),
    )
    for square in squares:
        chain += square
    assert np.mean(chain / second - 1) < -3e-7  # teeth


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_careful_read_does_not_look_where_the_weight_is_zero(local, bad):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, 9, 5)) * 10.0 ** rng.integers(-30, 18, (12, 9, 5))
    x[3, 4], x[7, 2, 1] = bad, bad
    x, shift = x.astype(np.float32), np.zeros(5, np.float32)
    for dtype in (np.bool_, np.float32):
        weight = np.ones((12, 9), dtype)
        weight[3, 4] = weight[7, 2] = 0
        s = compute(
            jnp.asarray(x), shift, jnp.asarray(weight), 2, local=local, careful=True
        )
        clean = np.where(weight[..., None] != 0, x, 0).astype(np.float64)
        assert s.first == pytest.approx(clean.sum((0, 1)), rel=1e-14)
        assert s.second == pytest.approx((clean**2).sum((0, 1)), rel=1e-14)


def test_where_an_array_lies_is_found_out():
    x, mesh = jnp.ones((8, 3)), Mesh(jax.devices(), "d")
    shards, seen = NamedSharding(mesh, PartitionSpec("d")), []

    def look(x: jax.Array) -> jax.Array:
        seen.append(on_one_cpu(x))
        return x

    assert on_one_cpu(x) and not on_one_cpu(jax.device_put(x, shards))
    jax.jit(look)(x)  # with several devices nobody knows what else will come
    jax.shard_map(look, mesh=mesh, in_specs=shards.spec, out_specs=shards.spec)(x)
    assert seen == [False, True]


def compile_sums(x: Any, weight: Any = None, **how: bool) -> Any:
    def function(x, shift, weight):
        with double():
            s = sums(x, shift, weight, 2, **how)
            return [v.astype(jnp.float32) for v in s]

    return jax.jit(function).lower(x, jnp.zeros(x.shape[2:]), weight).compile()


@ways
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8, jnp.int32])
def test_nothing_of_the_size_of_a_history_is_made(dtype, how):
    x = samples(9, (64, 256, 64), dtype)
    for kind in ("none", "weights"):
        weight = weights_for(kind, (64, 256))
        temp = compile_sums(x, weight, **how).memory_analysis().temp_size_in_bytes
        assert temp <= 0.02 * x.size * 4 + (0 if weight is None else 2 * weight.nbytes)


GATHERED = re.compile(r"\w+\[([\d,]*)\]\S* all-gather\(")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [(None, "d"), ("d",)], ids=["B", "T"])
@pytest.mark.parametrize("careful", [False, True])
def test_a_sharded_history_is_not_gathered(axis_type, spec, careful):
    mesh = Mesh(jax.devices(), "d", axis_types=(axis_type,))
    x = samples(10, (16, 24, 3), jnp.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    with jax.set_mesh(mesh):
        compiled = compile_sums(sharded, careful=careful)
        got = compiled(sharded, jnp.zeros(3), None)
    for shape in GATHERED.findall(compiled.as_text()):  # a sum of each device at most
        assert math.prod(map(int, shape.split(","))) <= 8 * 3
    first, second, size = exact(x, np.zeros(3), None, 2)
    got = jax.tree.map(np.asarray, got)
    assert np.all(np.abs(got[0] - first) <= EPS * size)
    assert np.all(np.abs(got[1] - second) <= EPS * second)
