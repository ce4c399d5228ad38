# SPDX-License-Identifier: Apache-2.0
"""The step of a running return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import RewardNormalizer, check_statistics, place
from nnx_norm.returns import advance


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9999, 1.0])
def test_thousand_steps_are_those_of_float64(gamma: float):
    rng = np.random.default_rng(0)
    rewards = rng.normal(1, 1, (1000, 4)).astype(np.float32)
    value, rest, exact = (
        [np.zeros(4, np.float32)],
        [np.zeros(4, np.float32)],
        np.zeros(4),
    )
    for reward in rewards:
        ended = rng.random(4) < 0.002
        value, rest = advance(value, rest, [jnp.asarray(reward)], ended, gamma)
        exact = exact * gamma * (1 - ended) + reward
    np.testing.assert_allclose(value[0], exact, rtol=1e-7)


def test_history_is_dropped_before_the_reward_is_added():
    old, rest, one = ([np.full((2, 3), v, np.float32)] for v in (4.0, 0.0, 1.0))
    new, _ = advance(old, rest, one, jnp.array([False, True]), 0.5)
    assert new[0].tolist() == [[3.0] * 3, [1.0] * 3]


def test_what_is_not_there_yet_stays_so_by_its_own_name():
    norm = RewardNormalizer(0.9)
    before = nnx.graphdef(norm)
    norm.running_return.set_value(norm.running_return.get_value())
    place(norm, jax.make_mesh((2,), ("d",)), environments="d")
    assert nnx.graphdef(norm) == before
    check_statistics(norm)
    norm.update(np.ones((1, 2), np.float32), np.zeros((1, 2)))
    assert norm.running_return.get_value().tolist() == [1, 1]
