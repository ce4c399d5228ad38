# SPDX-License-Identifier: Apache-2.0
"""The table of a model's normalizers, as it is printed."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnx_norm import (
    Normalizer,
    RewardNormalizer,
    RunningMeanStd,
    Sequential,
    summary,
)


def text(table: str) -> str:
    return "\n".join(line.rstrip() for line in table.strip("\n").splitlines())


def test_a_line_for_every_leaf():
    spec = {"goal": {"id": ()}, "pos": 3, "off": 2}
    norm = Normalizer(spec, clip=1.0, exclude=["off"])
    x = jnp.array([[0.0, 1e6, 7.0], [1.0, 1e6, 7.0], [2.0, -2e6, 7.0]])[None]
    extras = {"goal": {"id": jnp.full((1, 3), 2.5)}, "pos": x}
    since = norm.to_dict()
    norm.update_statistics(extras)
    assert summary(norm, extras=extras, since=since) == text("""
path     shape  count  skipped  mean    std                 dead  floored  nonfinite  clipped  drift
goal/id  ()     3      0        2.5     0.001               1     1        0          0.00%    2.5e+03
pos      (3,)   3      0        0 .. 7  0.001 .. 1.414e+06  1     1        0          33.33%   7e+03
""")  # noqa: E501


def test_exact_counts_ports_and_what_has_no_shape_yet():
    reward = RewardNormalizer(0.99)
    reward.set_statistics(0.0, 4.0, 2**40 + 1)
    model: Any = nnx.Dict(reward=reward, port=RunningMeanStd(2), lazy=RunningMeanStd())
    lines = summary(model).splitlines()
    assert lines[0].split() == (
        "path shape count skipped mean std dead floored nonfinite".split()
    )
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert cells["reward"] == ["()", "1099511627777", "0", "0", "2", "0", "0", "0"]
    assert cells["port"] == ["(2,)", "1", "0", "1", "0", "0", "0"]
    assert cells["lazy"] == ["none", "1"]


def test_a_population_has_ranges():
    norm = nnx.vmap(lambda _: Normalizer(()))(jnp.arange(3))
    norm.set_statistics(1.0, 4.0, jnp.array([5, 6, 7]))
    assert summary(norm).splitlines()[1].split("  ")[:2] == ["Normalizer", "(3,)"]
    assert "5 .. 7" in summary(norm)


def test_a_model_without_normalizers_says_so():
    assert summary(Sequential([jnp.tanh])) == "no normalizers"
    assert "Normalizer  none   0" in summary(Normalizer({}))
