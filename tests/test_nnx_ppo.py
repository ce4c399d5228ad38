# SPDX-License-Identifier: Apache-2.0
"""Our Normalizer in nnx-ppo, in the place of its own: see nnx_ppo_plugin.py too."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_ppo.algorithms import checkpointing, ppo
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig
from nnx_ppo.networks import factories
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.graph import PopulationGraph
from nnx_ppo.networks.normalizer import Normalizer as Theirs
from nnx_ppo.networks.recording import extract_activations, with_recording
from nnx_ppo.networks.types import StatefulModule as TheirModule
from small_env import Walk

from nnx_norm import Normalizer, Sequential, check_statistics

TESTS = Path(__file__).resolve().parent

pytestmark = pytest.mark.usefixtures("x64_off")


RECORDED = """
import jax.numpy as jnp
from flax import nnx
from nnx_ppo.networks import factories, normalizer, recording


def test_recording_where_types_are_checked():
    rngs = nnx.Rngs(0, action_sampling=0)
    net = factories.make_mlp_actor_critic(3, 2, [4], [4], rngs)
    assert type(net.layers[0]) is normalizer.Normalizer
    recorded = recording.with_recording(net)
    out = recorded(recorded.initialize_state(4), jnp.ones((4, 3)))
    assert recording.extract_activations(out.metrics)
"""


def run(path: Path, plugin: str, *options: str) -> str:
    """What pytest prints for the tests of nnx-ppo's own normalizer, with a plugin."""
    (path / "recorded_test.py").write_text(RECORDED)
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider"]
    command += ["recorded_test.py", "--rootdir", str(path)]
    command += ["--pyargs", "nnx_ppo.networks.normalizer_test"]
    command += ["-c", os.devnull, "-v", *options]
    paths = [str(path), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "JAX_ENABLE_X64": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = subprocess.run(
        command, env=environment, cwd=path, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr


def test_our_normalizer_passes_the_tests_of_the_one_it_replaces(tmp_path: Path):
    output = run(tmp_path, "nnx_ppo_plugin")
    assert "and nnx_norm.normalizer" in output, output
    passed = re.search(r"=+ (\d+) passed", output)
    assert passed and int(passed[1]) == 9 + 1, output
    assert not re.search(r"\d+ (failed|error|skipped|xfailed)", output), output


BROKEN = """
from nnx_ppo_plugin import *


class Broken(Normalizer):
    def update_statistics(self, rollout_extras, **settings):
        pass


theirs.Normalizer = Broken
"""


def test_the_swap_is_what_is_tested(tmp_path: Path):
    (tmp_path / "broken_plugin.py").write_text(BROKEN)
    output = run(tmp_path, "broken_plugin", "-k", "pytree_update")
    assert re.search(r"=+ 1 failed", output), output


def graph(normalizer: Any) -> PopulationGraph:
    net = PopulationGraph(nnx.Rngs(0))
    net.add_input("seen", 3, input_from="obs")
    net.add_output("known", 3)
    net.connect("seen", "known", transform=normalizer)
    net.finalize()
    return net


def test_as_a_connection_of_a_population_graph():
    history = 5 + 2 * jax.random.normal(jax.random.key(0), (3, 4, 3))
    outputs = []
    for kind in (Normalizer, Theirs):
        norm: Any = kind(3)
        net = graph(norm)
        state = net.initialize_state(4)
        steps = [net(state, {"obs": x}) for x in history]
        extras = jax.tree.map(
            lambda *v: jnp.stack(v), *[o.rollout_extras for o in steps]
        )
        net.update_statistics(extras)
        assert float(norm.counter.get_value()) == 12
        outputs.append(net(state, {"obs": history[0]}).output["known"])
    assert np.allclose(*outputs, atol=1e-6)


def test_their_layers_in_our_containers():
    policy = Sequential([Normalizer(3), Dense(3, 2, nnx.Rngs(0)), Theirs(2)])
    x = jnp.ones((4, 3))
    out = policy(policy.initialize_state(4), x)
    policy.update_statistics(jax.tree.map(lambda v: v[None], out.rollout_extras))
    assert policy[0].count == 4 and float(policy[2].counter.get_value()) == 4


@pytest.fixture
def registered() -> None:
    """What the decorator in the README does. It can't be undone, and does no harm."""
    TheirModule.register(Normalizer)


@pytest.mark.usefixtures("registered")
def test_recording_of_activations_takes_registering():
    net: Any = factories.make_mlp_actor_critic(
        3, 2, [4], [4], nnx.Rngs(0, action_sampling=0)
    )
    net.layers[0] = Normalizer(3)
    recording = with_recording(net)
    x = jnp.ones((4, 3))
    out = recording(recording.initialize_state(4), x)
    activations = jax.tree.leaves(extract_activations(out.metrics)[0])
    assert np.allclose(activations, net.layers[0].normalize(x))


def agent(normalizer: Any) -> Any:
    net: Any = factories.make_mlp_actor_critic(
        2, 2, [8], [8], nnx.Rngs(0, action_sampling=0)
    )
    net.layers[0] = normalizer
    return net


def test_their_ppo_trains_and_resumes_from_their_checkpoint(tmp_path: Path):
    config = TrainConfig(
        ppo=PPOConfig(
            n_envs=8, rollout_length=4, total_steps=64, n_epochs=1, n_minibatches=1
        ),
        eval=EvalConfig(enabled=False),
        checkpoint_every_steps=64,
    )
    net = agent(Normalizer(2, clip=10.0))
    save = checkpointing.make_checkpoint_fn(str(tmp_path))
    with jax.numpy_dtype_promotion("standard"):  # theirs
        result = ppo.train_ppo(Walk(), net, config, checkpoint_fn=save)
    norm = net.layers[0]
    assert norm.count == 64 and 3000 < norm.to_dict()["mean"][0] < 7000
    other = agent(Normalizer(2, clip=10.0))
    fresh = ppo.new_training_state(Walk(), other, 8, 0)
    path = str(tmp_path / "step_0000000064")
    checkpointing.load_checkpoint(path, fresh.networks, fresh.optimizer)
    check_statistics(fresh.networks)
    d, e = norm.to_dict(), other.layers[0].to_dict()
    assert all(np.array_equal(d[k], e[k]) for k in ("mean", "M2", "count"))
    assert int(result.total_steps) == 64
