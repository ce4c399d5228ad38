# SPDX-License-Identifier: Apache-2.0
"""Whose extras are whose: in containers, in modules of one's own, by path."""

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_norm import Normalizer, Parallel, RewardNormalizer, Sequential
from nnx_norm.emitted import by_normalizer

X = jnp.ones((3, 2, 4))


class Agent(nnx.Module):
    """A module of one's own, with whatever it is given."""

    def __init__(self, **parts: Any):
        for name, part in parts.items():
            setattr(self, name, part)


def found(module: Any, extras: Any, *norms: Normalizer) -> list[Any]:
    parts = by_normalizer(module, extras)
    assert set(parts) <= {id(norm) for norm in norms}
    return [parts.get(id(norm)) for norm in norms]


def test_containers_cut_extras_as_in_an_update():
    a, b = Normalizer(4), Normalizer(4)
    graph = Sequential([a, Parallel(x=b, y=jnp.tanh)])
    assert found(graph, [1, {"x": 2, "y": None}], a, b) == [1, 2]
    with pytest.raises(TypeError, match="extras is"):
        by_normalizer(graph, X)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_normalizer_or_container_in_a_module_is_who_emitted(depth: int):
    norm = Normalizer(4)
    for part, extras in ((norm, X), (Sequential([jnp.tanh, norm]), [None, X])):
        agent: Any = part
        for _ in range(depth):
            agent = Agent(policy=agent, head=nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        agent.rewards = RewardNormalizer(0.9)
        assert found(agent, extras, norm) == [X]


def test_of_several_a_dict_by_path_tells():
    a, b = Normalizer(4), Normalizer(4)
    agent = Agent(actor=Sequential([a]), critic=b)
    assert found(agent, {"actor": [1], "critic": 2}, a, b) == [1, 2]
    assert found(agent, {"actor/layers/0": 1}, a, b) == [1, None]
    graph = Parallel(x=a, y=b)
    assert found(graph, {"components/y": 2}, a, b) == [None, 2]
    with pytest.raises(ValueError, match=r"Agent holds .*\['actor', 'critic'\]; give"):
        by_normalizer(agent, [X])
    with pytest.raises(ValueError, match=r"extras has \['nope'\]; expected paths of"):
        by_normalizer(agent, {"actor": [X], "nope": X})


def test_a_module_of_ones_own_in_a_container_is_asked_in_the_same_way():
    norm = Normalizer(4)
    graph = Sequential([jnp.tanh, norm])
    graph.layers[0] = Agent(norm=norm)
    assert found(graph, [X, None], norm) == [X]


def test_extras_of_a_model_without_a_normalizer_are_refused():
    for model in (Agent(rewards=RewardNormalizer(0.9)), nnx.Rngs(0)):
        with pytest.raises(ValueError, match="holds no Normalizer"):
            by_normalizer(model, X)
        assert by_normalizer(model, None) == {}
    assert by_normalizer(Sequential([jnp.tanh]), [None]) == {}
