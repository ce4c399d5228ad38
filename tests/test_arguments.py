# SPDX-License-Identifier: Apache-2.0
"""Arguments: what is in range comes back as it is, the rest is refused by name."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm import arguments
from nnx_norm.extended import double
from nnx_norm.spec import parse

FLOAT32 = np.finfo(np.float32)


@hypothesis.given(st.floats(), st.booleans())
@hypothesis.example(math.nan, True)
@hypothesis.example(math.inf, True)
@hypothesis.example(0.0, True)
@hypothesis.example(0.0, False)
@hypothesis.example(2.0, True)
def test_number_is_within_its_bounds_or_refused(x, strict):
    inside = (0 < x if strict else 0 <= x) and x <= 2  # never true for NaN
    if inside:
        assert arguments.number(x, "clip", 0, 2, strict=strict) == x
    else:
        with pytest.raises(ValueError, match="clip is .*; expected a number"):
            arguments.number(x, "clip", 0, 2, strict=strict)


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3)])
def test_number_gives_a_python_float(value):
    assert type(arguments.number(value, "clip", 0)) is float


@pytest.mark.parametrize("value", [True, "1", None, [1.0], 1j])
def test_number_refuses_other_kinds(value):
    with pytest.raises(TypeError, match="epsilon is .*; expected a number"):
        arguments.number(value, "epsilon", 0)


def test_number_says_its_bounds():
    with pytest.raises(ValueError, match=r"clip is -1; expected a number >= 0\."):
        arguments.number(-1, "clip", 0, strict=False)
    with pytest.raises(ValueError, match=r"decay is 2; expected .* > 0 and <= 1\."):
        arguments.number(2, "decay", 0, 1)


@hypothesis.given(st.floats(allow_nan=False))
@hypothesis.example(0.0)
@hypothesis.example(float(FLOAT32.tiny))
@hypothesis.example(float(FLOAT32.max))
@hypothesis.example(math.inf)
def test_positive_admits_exactly_what_float32_divides_by(x):
    with np.errstate(over="ignore", under="ignore"):
        held = np.float32(x) >= FLOAT32.tiny and x <= float(FLOAT32.max)
    if x >= float(FLOAT32.tiny) and held:
        assert arguments.positive(x, "epsilon") == x
    else:
        with pytest.raises(ValueError, match="epsilon"):
            arguments.positive(x, "epsilon")


@pytest.mark.parametrize("value", [0, 7, np.int32(7)])
def test_size_gives_a_python_int(value):
    assert type(arguments.size(value, "num_envs")) is int


@pytest.mark.parametrize("value, error", [(-1, ValueError), (1.5, TypeError)])
def test_size_refuses_what_is_no_number_of_things(value, error):
    with pytest.raises(error, match="num_envs is .*; expected an int"):
        arguments.size(value, "num_envs")
    with pytest.raises(TypeError, match="num_envs is True"):
        arguments.size(True, "num_envs")


def test_choice_lists_the_options():
    assert arguments.choice("skip", "nonfinite", "skip", "propagate") == "skip"
    with pytest.raises(ValueError, match="'Skip'; expected one of skip, propagate"):
        arguments.choice("Skip", "nonfinite", "skip", "propagate")


@pytest.mark.parametrize(
    "given, right",
    [(None, None), ("d", "d"), (["d", "e"], ("d", "e")), (("d",), ("d",))],
)
def test_axis_names_are_hashable(given, right):
    assert arguments.axis_names(given) == right


@pytest.mark.parametrize("value", [3, (), ["d", 1], True, [None]])
def test_axis_names_refuses_the_rest(value):
    with pytest.raises(TypeError, match="axis_name is .*; expected the name"):
        arguments.axis_names(value)


@pytest.mark.parametrize("value", ["", ["d", ""], ("d", "d")])
def test_axis_names_are_names_each_once(value):
    with pytest.raises(ValueError, match="not empty, each once"):
        arguments.axis_names(value)


@pytest.mark.parametrize(
    "value",
    [[1, 2], (1.0, 2.0), np.arange(2), jnp.arange(2.0), np.array([1, 2], np.float16)],
)
def test_float64_array_takes_lists_and_arrays(value):
    array = arguments.float64_array(value, (2,), "mean")
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, np.asarray(value, np.float64))


def test_float64_array_takes_bfloat16():
    array = arguments.float64_array(jnp.array([1, 2], jnp.bfloat16), (2,), "mean")
    assert array.tolist() == [1.0, 2.0]


def test_float64_array_keeps_every_digit():
    value = np.array([1 / 3, 2**53 - 1])
    assert arguments.float64_array(value, (2,), "mean").tobytes() == value.tobytes()
    assert arguments.float64_array(2**48 + 1, (), "count") == 2**48 + 1


def test_float64_array_fills_with_a_scalar_only_where_told():
    filled = arguments.float64_array(3, (2, 2), "mean", fill=True)
    assert filled.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    with pytest.raises(ValueError, match=r"mean has shape \(\); expected \(2, 2\)"):
        arguments.float64_array(3, (2, 2), "mean")
    with pytest.raises(ValueError, match=r"mean has shape \(2,\); expected \(2, 2\)"):
        arguments.float64_array([1, 2], (2, 2), "mean", fill=True)


@pytest.mark.parametrize(
    "value, message",
    [
        ([1, math.nan], "finite numbers"),
        ([1, math.inf], "finite numbers"),
        ([1, -1e-9], ">= 0"),
        ([1, 1e39], "1e[+]39, more than float32 holds"),
    ],
)
def test_float64_array_refuses_values_out_of_range(value, message):
    with pytest.raises(ValueError, match=f"^variance .*{message}"):
        arguments.float64_array(value, (2,), "variance", minimum=0.0)


def test_float64_array_lets_nan_in_where_told():
    array = arguments.float64_array([math.nan, math.inf], (2,), "mean", finite=False)
    assert np.isnan(array[0]) and np.isinf(array[1])


@pytest.mark.parametrize(
    "value",
    ["12", ["a", "b"], [None, 1], np.array(["2000", "2001"], "M8[Y]"), [1j, 2]],
)
def test_float64_array_refuses_what_holds_no_real_numbers(value):
    with pytest.raises(TypeError, match="^mean .*real numbers"):
        arguments.float64_array(value, (2,), "mean")


def test_float64_array_takes_traced_values():
    @jax.jit
    def double_of(x):
        array = arguments.float64_array(x, (2,), "mean", fill=True)
        with double():
            return (2 * array).astype(jnp.float32)

    assert double_of(jnp.float32(1.5)).tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="mean has shape"):
        double_of(jnp.zeros(3))


TREE = parse({"a": (2,), "b": {"c": (), "off": 3}}, exclude=["b/off"])
SHAPES = [(2,), ()]


def test_float64_leaves_takes_lists_where_the_spec_has_arrays():
    given = {"a": [1, 2], "b": {"c": 3, "off": None}}
    a, c = arguments.float64_leaves(TREE, SHAPES, given, "mean")
    assert (a.tolist(), c.tolist()) == ([1.0, 2.0], 3.0)


def test_float64_leaves_fills_with_one_scalar():
    a, c = arguments.float64_leaves(TREE, SHAPES, 7, "mean")
    assert (a.tolist(), c.tolist()) == ([7.0, 7.0], 7.0)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"a": [1, 2]}, r"mean\['b'\]\['c'\] is missing"),
        ({"a": [1, 2], "b": {"c": 0, "d": 0}}, r"mean\['b'\]\['d'\] is not in"),
        ({"a": 1.0, "b": {"c": 0}}, r"mean\['a'\] has shape \(\); expected \(2,\)"),
        ([1, 2], r"mean\[0\] is not in"),
    ],
)
def test_float64_leaves_names_what_does_not_fit(tree, message):
    with pytest.raises(ValueError, match=message):
        arguments.float64_leaves(TREE, SHAPES, tree, "mean")


def test_refuse_torn_names_the_leaf_without_samples():
    nothing, some = np.zeros(2), np.array([0.0, 3.0])
    arguments.refuse_torn(TREE, [nothing, np.zeros(())], [some, some], np.float64(0))
    with pytest.raises(ValueError, match=r"count is 0 where mean\['a'\]"):
        arguments.refuse_torn(TREE, [some, np.zeros(())], [some, some], np.float64(0))


def test_refuse_torn_looks_at_each_member_of_a_population():
    spec, M2 = parse(2), np.zeros((2, 2))
    mean, counts = np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([0.0, 5.0])
    arguments.refuse_torn(spec, [mean], [M2], counts)
    with pytest.raises(ValueError, match="count is 0"):
        arguments.refuse_torn(spec, [mean], [M2], counts[::-1])


def test_refuse_torn_refuses_an_m2_beyond_float32():
    with pytest.raises(ValueError, match="M2 holds 1e[+]39, more than float32"):
        arguments.refuse_torn(parse(1), [np.ones(1)], [np.full(1, 1e39)], np.float64(1))
