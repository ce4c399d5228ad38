# SPDX-License-Identifier: Apache-2.0
"""Laws of the delay: a shift in time for each environment, of every tree and dtype."""

import functools
from collections import OrderedDict, namedtuple
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph import B, F, T, assert_same, batch

from nnx_norm.delay import Delay

Point = namedtuple("Point", "pos vel")
SAMPLES = {
    "array": jnp.zeros(F, jnp.float32),
    "scalar": jnp.zeros((), jnp.float32),
    "int": jnp.zeros((2, 2), jnp.int32),
    "bool": np.zeros(2, bool),
    "bfloat16": jnp.zeros(F, jnp.bfloat16),
    "float64": np.zeros(F),
    "spec": jax.ShapeDtypeStruct((F,), jnp.float32),
    "tree": {"b": (jnp.zeros(2, jnp.float32), None), "a": jnp.zeros((), jnp.uint8)},
    "ordered": OrderedDict(
        b=jnp.zeros(2, jnp.float32), a=OrderedDict(c=jnp.zeros(1, bool))
    ),
    "point": Point(jnp.zeros(2, jnp.float32), OrderedDict(x=jnp.zeros(1, jnp.float32))),
    "empty": {},
}


def series(sample, *lead):
    """Inputs like `sample`, every value told apart as far as its dtype can."""
    rng = np.random.default_rng(0)

    def leaf(s):
        drawn = rng.integers(0, 2 if s.dtype == bool else 200, (*lead, *s.shape))
        return jnp.asarray(drawn.astype(s.dtype))

    return jax.tree.map(leaf, sample)


@functools.cache
def delayed(k):
    """Inputs, last states and outputs by name: every sample in a Delay of its own."""
    delays = {name: Delay(s, k, initial_value=1) for name, s in SAMPLES.items()}
    xs = {name: series(sample, T, B) for name, sample in SAMPLES.items()}

    def step(states, x):
        outs = {name: delay(states[name], x[name]) for name, delay in delays.items()}
        states = {name: out.next_state for name, out in outs.items()}
        return states, {name: out.output for name, out in outs.items()}

    @jax.jit  # one program for all: apart they take ten times as long to compile
    def run(xs):
        states = {name: delay.initialize_state(B) for name, delay in delays.items()}
        return jax.lax.scan(step, states, xs)

    return xs, *run(xs)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("name", SAMPLES)
def test_delay_is_a_shift_in_time(name, k):
    xs, state, outputs = (of_all[name] for of_all in delayed(k))
    assert state["idx"].tolist() == [T % k] * B and state["idx"].dtype == jnp.int32
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(plain(xs)), strict=True)
    for got, x in pairs:
        filler = np.ones((min(k, T), *x.shape[1:]))
        expected = np.concatenate([filler, np.asarray(x, np.float64)])[:T]
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float64), expected)


def plain(tree):
    return jax.tree.map(
        lambda n: {k: plain(v) for k, v in n.items()} if isinstance(n, dict) else n,
        tree,
        is_leaf=lambda n: isinstance(n, dict),
    )


def test_mappings_of_every_kind_are_one_structure():
    delay = Delay(SAMPLES["ordered"], 1)
    x = series(SAMPLES["ordered"], B)
    state = delay.initialize_state(B)
    outputs = []
    for given_x in (x, plain(x), nnx.Dict(b=x["b"], a=nnx.Dict(c=x["a"]["c"]))):
        out = delay(delay(state, given_x).next_state, given_x)
        assert jax.tree.structure(out.next_state) == jax.tree.structure(state)
        outputs.append(out.output)
    assert type(outputs[0]) is dict
    for output in outputs:
        assert_same(output, plain(x))


@functools.cache
def per_environment(k):
    return Delay(jnp.zeros((), jnp.float32), k, initial_value=-1)


@functools.partial(jax.jit, static_argnums=0)
def reset_and_step(k, state, done, x):
    delay = per_environment(k)
    reset = jax.vmap(lambda d, s: jax.lax.cond(d, delay.reset_state, lambda s: s, s))
    out = delay(reset(done, state), x)
    return out.next_state, out.output


@hypothesis.given(
    k=st.integers(1, 4),
    resets=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), max_size=12),
)
def test_each_environment_is_delayed_since_its_own_reset(k, resets):
    state = per_environment(k).initialize_state(2)
    episodes = [[], []]
    for t, flags in enumerate(resets):
        for b in range(2):
            episodes[b] = [] if flags[b] else episodes[b]
        x = np.array([t, 100 + t], np.float32)
        state, output = reset_and_step(k, state, np.array(flags), x)
        for b, past in enumerate(episodes):
            assert float(output[b]) == (past[-k] if len(past) >= k else -1)
            past.append(t + 100 * b)


def test_delay_emits_nothing_and_costs_nothing():
    out = Delay(jnp.zeros(F, jnp.float32), 1)(
        Delay(jnp.zeros(F, jnp.float32), 1).initialize_state(B), batch()
    )
    loss = out.regularization_loss
    assert (out.rollout_extras, out.metrics) == (None, {})
    assert (loss.shape, loss.dtype, loss.weak_type) == ((), jnp.float32, False)


@pytest.mark.parametrize(
    ("k", "error"),
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)],
)
def test_delay_refuses_what_is_no_number_of_steps(k, error):
    with pytest.raises(error, match=f"k_steps is {k}"):
        Delay(jnp.zeros(F, jnp.float32), k)
    assert Delay(jnp.zeros(F, jnp.float32), np.int64(2)).k_steps == 2  # pyright: ignore


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (jnp.int32, float("nan")),
        (jnp.int32, float("inf")),
        (jnp.int32, 0.5),
        (jnp.uint8, 256),
        (jnp.uint8, -1),
        (bool, 2),
        (jnp.float16, 1e6),
        (jnp.float16, -65521),
    ],
)
def test_delay_refuses_an_initial_value_that_does_not_fit(dtype, value):
    sample = {"fine": jnp.zeros((0,), jnp.bfloat16), "odd": np.zeros(F, dtype)}
    with pytest.raises(ValueError, match=r"sample_input\['odd'\].*initial_value"):
        Delay(sample, 1, initial_value=value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (jnp.float32, float("nan")),
        (jnp.bfloat16, float("-inf")),
        (jnp.float32, 0.1),
        (jnp.int32, 2**31 - 1),
        (jnp.uint8, 255.0),
        (bool, 1),
        (jnp.int8, np.int64(-128)),
        (jnp.float32, jnp.float32(2)),
    ],
)
def test_delay_keeps_an_initial_value_that_fits(dtype, value):
    delay = Delay(jnp.zeros(F, dtype), 2, initial_value=value)
    state = delay.initialize_state(B)
    expected = np.full((B, 2, F), np.asarray(value)).astype(dtype)
    assert state["buffer"].dtype == dtype
    np.testing.assert_array_equal(state["buffer"], expected)
    np.testing.assert_array_equal(delay.reset_state(state)["buffer"], expected)


def test_delay_judges_an_initial_value_by_the_dtype_that_jax_keeps():
    sample = np.zeros(F)  # float64, which a buffer has only in 64-bit mode
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match="dtype float32, which can't hold"),
    ):
        Delay(sample, 1, initial_value=1e300)
    with jax.enable_x64(True):
        state = Delay(sample, 1, initial_value=1e300).initialize_state(B)
        assert float(state["buffer"].max()) == 1e300


@pytest.mark.parametrize("value", ["0", [0.0], None, jnp.zeros(2, jnp.float32), 1j])
def test_delay_refuses_an_initial_value_that_is_no_number(value):
    with pytest.raises(TypeError, match="initial_value"):
        Delay(jnp.zeros(F, jnp.float32), 1, initial_value=value)


@pytest.mark.parametrize("sample", [(3,), {"a": 3}, "text"])
def test_delay_refuses_a_sample_of_shapes(sample):
    with pytest.raises(TypeError, match=r"sample_input.*expected an array"):
        Delay(sample, 1)


@pytest.mark.parametrize(
    ("vel", "came"),
    [
        (jnp.zeros((B, F + 1), jnp.float32), r"float32 of shape \(4, 4\)"),
        (
            jnp.zeros((B, 1), jnp.float32),
            r"float32 of shape \(4, 1\)",
        ),  # would broadcast
        (jnp.zeros(F, jnp.float32), r"float32 of shape \(3,\)"),
        (jnp.zeros((1, F), jnp.float32), r"float32 of shape \(1, 3\)"),
        (jnp.zeros((B, F), jnp.int32), "int32"),
        (jnp.zeros((B, F), jnp.bfloat16), "bfloat16"),
        (jnp.zeros((B, F), bool), "bool"),
    ],
)
def test_delay_refuses_a_leaf_that_does_not_fit_its_buffer(vel, came):
    delay = Delay(
        {"pos": jnp.zeros(F, jnp.float32), "vel": jnp.zeros(F, jnp.float32)}, 2
    )
    x = {"pos": batch(), "vel": vel}
    words = rf"x\['vel'\] is {came}.* takes float32 of shape \(4, 3\)"
    if "(" not in came:
        words = rf"x\['vel'\] is {came} of shape \(4, 3\).* takes float32"
    with pytest.raises(ValueError, match=words):
        delay(delay.initialize_state(B), x)


def test_delay_takes_weak_types_and_numpy():
    delay = Delay(jnp.zeros(()), 1)  # as wide as what JAX makes of Python's numbers
    state = delay.initialize_state(1)
    weak = jnp.broadcast_to(jnp.asarray(2.0), (1,))
    for x in (weak, np.full(1, 2.0)):
        out = delay(delay(state, x).next_state, x)
        assert out.output.tolist() == [2.0] and not out.output.weak_type


def test_delay_refuses_another_structure_or_state():
    delay = Delay({"a": jnp.zeros(F, jnp.float32)}, 2)
    state = delay.initialize_state(B)
    for x in (batch(), {"b": batch()}, {"a": (batch(),)}, {"a": None}):
        with pytest.raises(ValueError, match="Delay: x has the structure"):
            delay(state, x)
    longer = Delay({"a": jnp.zeros(F, jnp.float32)}, 3).initialize_state(B)
    with pytest.raises(ValueError, match=r"state\['buffer'\]\['a'\] has shape"):
        delay(longer, {"a": batch()})
    other = Delay(jnp.zeros(F, jnp.float32), 2).initialize_state(B)
    with pytest.raises(ValueError, match=r"state\['buffer'\] has the structure"):
        delay(other, {"a": batch()})
    bare = delay.initialize_state(B)
    states: list[Any] = [(), None, bare["buffer"], [bare["idx"], bare["buffer"]]]
    for state in states:
        for call in (lambda s: delay(s, {"a": batch()}), delay.reset_state):
            with pytest.raises(TypeError, match=r"state is .*initialize_state"):
                call(state)
    shifted = bare | {"idx": jnp.zeros(B - 1, jnp.int32)}
    for call in (lambda s: delay(s, {"a": batch()}), delay.reset_state):
        with pytest.raises(ValueError, match=r"\['a'\] has shape.*state\['idx'\] has"):
            call(shifted)
