# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Brax and Acme themselves, in and out. nnx-ppo and Flax: tests/test_interop_jax.py."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_agreement, assert_moments, batches
from brax.training.acme import running_statistics as brax
from brax.training.types import UInt64

from nnx_norm import Normalizer
from nnx_norm.interop import from_acme, from_brax, to_acme, to_brax


@pytest.fixture(autouse=True)
def their_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def acme() -> Any:
    """Acme's file of running statistics, without the rest of the package.

    The last release doesn't import with a JAX of today; this file runs, with the two
    helpers that make its zeros and ones.
    """
    spec = importlib.util.find_spec("acme")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for name in ("acme", "acme.utils", "acme.jax", "acme.jax.utils"):
        module: Any = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    sys.modules["acme"].jax = sys.modules["acme.jax"]  # pyright: ignore
    utils: Any = sys.modules["acme.jax.utils"]
    sys.modules["acme.jax"].utils = utils  # pyright: ignore
    for name, full in (("zeros_like", jnp.zeros), ("ones_like", jnp.ones)):

        def like(nest: Any, dtype: Any = None, full: Any = full) -> Any:
            return jax.tree.map(lambda x: full(x.shape, dtype or x.dtype), nest)

        setattr(utils, name, like)
    return importlib.import_module("acme.jax.running_statistics")


@pytest.fixture
def ours() -> Normalizer:
    norm = Normalizer({"body": 5})
    for x in batches():
        norm.update_statistics({"body": x[None]})
    return norm


def shape(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), tree)


@pytest.mark.parametrize("mode", ["welford", "ema"])
@pytest.mark.parametrize("std_eps", [0.0, 1e-2])
def test_brax(mode: str, std_eps: float):
    data = [{"body": jnp.asarray(x)} for x in batches()]
    state = brax.init_state(shape(data[0]), std_eps=std_eps, mode=mode)
    fresh = from_brax(state)
    theirs = brax.normalize(data[0], state)
    assert_agreement(fresh, fresh.normalize(data[0]), theirs)
    for x in data:
        state = brax.update(state, x)
    norm = from_brax(state, clip=2.0)
    theirs = brax.normalize(data[0], state, max_abs_value=2.0)
    assert norm.count == 192
    assert_agreement(norm, norm.normalize(data[0]), theirs)


def test_brax_count_of_two_halves():
    state = brax.init_state(jnp.zeros(5))
    for x in batches():
        state = brax.update(state, jnp.asarray(x))
    large = state.replace(count=UInt64(hi=jnp.uint32(3), lo=jnp.uint32(5)))
    assert from_brax(large).count == 3 * 2**32 + 5


def test_brax_of_ours_goes_on(ours: Normalizer):
    fields = to_brax(ours)
    count = UInt64(**{k: jnp.asarray(v) for k, v in fields.pop("count").items()})
    state = brax.RunningStatisticsState(count=count, **fields)
    state = jax.tree.map(jnp.asarray, state)
    x = {"body": jnp.asarray(batches(seed=9)[0])}
    assert_agreement(ours, ours.normalize(x), brax.normalize(x, state))
    state = brax.update(state, x)
    samples = np.concatenate([*batches(), *batches(seed=9)[:1]])
    assert_moments(from_brax(jax.tree.map(lambda v: v, state)), samples)


def test_acme_both_ways(ours: Normalizer):
    theirs = acme()
    data = [{"body": jnp.asarray(x)} for x in batches()]
    state = theirs.init_state(shape(data[0]))
    for x in data:
        state = theirs.update(state, x)
    norm, x = from_acme(state, clip=2.0), data[0]
    assert norm.count == 192
    wanted = theirs.normalize(x, state, max_abs_value=2.0)
    assert_agreement(norm, norm.normalize(x), wanted)
    back = theirs.RunningStatisticsState(**to_acme(ours))
    assert_agreement(ours, ours.normalize(x), theirs.normalize(x, back))
