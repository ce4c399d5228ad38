# SPDX-License-Identifier: Apache-2.0
"""Rows of vector environments, apart from any environment."""

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_norm import RewardNormalizer, env_rows


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_histories_are_filled_up_with_rows_that_do_not_count(steps: int):
    rows = [(np.full((4, 2), i), np.full(4, i != 1)) for i in range(steps)]
    history, valid = env_rows.history(rows)
    length = {1: 1, 2: 2, 3: 4, 5: 8}[steps]
    assert history.shape == (length, 4, 2) and valid.shape == (length, 4)
    assert int(valid.sum()) == 4 * (steps - (steps > 1))
    assert history[:steps, 0, 0].tolist() == list(range(steps))


def test_final_observations_there_and_back():
    batch = {"pos": np.zeros((3, 2)), "goal": np.zeros(3, int)}
    final = np.array([None, {"pos": np.ones(2), "goal": 5}, None], object)
    there = np.array([False, True, False])
    rows = env_rows.in_rows(batch, final, there)
    assert rows["pos"].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert not batch["pos"].any()
    back = env_rows.by_row(rows, there)
    assert back[0] is None and back[1]["goal"] == 5
    back[1]["pos"][:] = 9
    assert rows["pos"].max() == 1  # an array of its own


def test_returns_restart_where_they_are_those_of_these_environments():
    rewards = RewardNormalizer(0.9, num_envs=3)
    for size, left in ((2, [1, 1, 1]), (3, [0, 1, 1])):
        rewards.running_return.set_value(jnp.ones(3))
        env_rows.restart(rewards, np.eye(size, dtype=bool)[0])
        assert rewards.running_return.get_value().tolist() == left
    env_rows.restart(RewardNormalizer(0.9), np.ones(3, bool))  # has none yet


def test_copies_are_writable_and_apart():
    read_only = np.asarray(jnp.ones(2))
    copy = env_rows.copied(read_only)
    copy[0] = 5
    assert read_only[0] == 1 and env_rows.copied("text") == "text"
