# SPDX-License-Identifier: Apache-2.0
"""A training state on disk: whole, on other devices, torn, cast, foreign, killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1
from support import bits

import nnx_norm
from nnx_norm import (
    Delay,
    Normalizer,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    Sequential,
    check_statistics,
)


class Agent(nnx.Module):
    """Every kind of statistics, a policy and a buffer that is none of them."""

    def __init__(self):
        linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.policy = Sequential([Normalizer(2), Delay(jnp.zeros(2), 1), linear])
        self.goals = Normalizer({"goal": {"id": ()}, "off": 3}, exclude=["off"])
        self.reward = RewardNormalizer(0.9, num_envs=4)
        self.values = RunningMeanStd(2)
        self.returns = RewardRunningMeanStd(gamma=0.9, num_envs=4)


def training_state() -> tuple[Agent, nnx.Optimizer]:
    agent = Agent()
    return agent, nnx.Optimizer(agent, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def step(agent: Agent, optimizer: nnx.Optimizer, i: jax.Array) -> None:
    """Something of everything, different for every `i`."""
    x = jax.random.normal(jax.random.key(i), (3, 4, 2)) + 1e4
    ends = x[..., 0] > 1e4 + 1
    agent.policy.update_statistics([x, None, None])
    agent.goals.update_statistics({"goal": {"id": x[..., 1]}})
    agent.reward.update(x[..., 0], ends)
    agent.values.record_moments(x[0])
    agent.returns.record_reward(x[0, :, 0], ends[0])

    def loss(agent: Agent) -> jax.Array:
        out = agent.policy(agent.policy.initialize_state(4), x[0])
        return jnp.sum(jnp.square(out.output - 1))

    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(agent, nnx.grad(loss)(agent))


def trained(steps: int = 3) -> tuple[Agent, nnx.Optimizer]:
    state = training_state()
    for i in range(steps):
        step(*state, jnp.int32(i))
    return state


def placed(state: Any, sharding: Any) -> Any:
    """The template that restores a state to where it is wanted."""

    def like(v: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding)

    return jax.tree.map(like, state)


def standard(path: Path, state: Any) -> Callable[[Any], Any]:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)

    def load(template: Any) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, template)

    return load


def version1(path: Path, state: Any) -> Callable[[Any], Any]:
    v1.save(str(path), state)
    return lambda template: v1.load(str(path), template)


def managed(path: Path, state: Any) -> Callable[[Any], Any]:
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))

    def load(template: Any) -> Any:
        with ocp.CheckpointManager(path) as manager:
            return manager.restore(0, args=ocp.args.StandardRestore(template))

    return load


ways = pytest.mark.parametrize("save", [standard, version1, managed])
ONE = SingleDeviceSharding(jax.devices()[0])
MANY = NamedSharding(Mesh(jax.devices(), "d"), PartitionSpec())


@ways
def test_a_whole_training_state_goes_on_as_if_it_had_not_stopped(save, tmp_path):
    before = trained()
    load = save(tmp_path / "state", nnx.state(before))
    again = nnx.eval_shape(training_state)
    nnx.update(again, load(placed(nnx.state(again), ONE)))
    check_statistics(again[0])
    assert bits(again[0]) == bits(before[0]) and bits(again[1]) == bits(before[1])
    for state in (before, again):
        step(*state, jnp.int32(7))
    assert bits(again[0]) == bits(before[0]) and bits(again[1]) == bits(before[1])


@pytest.mark.parametrize(("there", "here"), [(ONE, MANY), (MANY, ONE)])
def test_another_number_of_devices_restores_the_same_bits(there, here, tmp_path):
    before, _ = trained()
    saved = jax.device_put(nnx.state(before), there)
    load = standard(tmp_path / "state", saved)
    again = nnx.eval_shape(Agent)
    nnx.update(again, load(placed(nnx.state(again), here)))
    check_statistics(again)
    assert bits(again) == bits(before)
    assert again.goals.counter.get_value().sharding == here


# What can't be used


def tampered(change: Callable[[Agent], Any]) -> Agent:
    agent, _ = AGENT
    agent = nnx.clone(agent)
    change(agent)
    return agent


AGENT = trained()


def bfloat16(variable: nnx.Variable[Any]) -> None:
    value = variable.get_value()
    variable.set_value(jax.tree.map(lambda v: v.astype(jnp.bfloat16), value))


TORN: dict[str, tuple[Callable[[Agent], Any], str]] = {
    "placeholder": (
        lambda a: a.goals.counter.set_value(jax.ShapeDtypeStruct((), jnp.float32)),
        "goals: counter holds ShapeDtypeStruct; expected an array",
    ),
    "cast": (lambda a: bfloat16(a.goals.M2), "goals: M2/goal/id is bfloat16; expected"),
    "cast residual": (
        lambda a: bfloat16(a.values.tail),
        "values: tail/count is bfloat16",
    ),
    "integer count": (
        lambda a: a.reward.counter.set_value(jnp.uint32(3)),
        "reward: counter is uint32; expected float32",
    ),
    "level of Orbax": (
        lambda a: a.goals.mean.set_value({"value": a.goals.mean.get_value()}),
        "goals: mean has the shapes {'value/goal/id': ()}; expected {'goal/id': ()}",
    ),
    "level in a port": (
        lambda a: a.values.mean.set_value({"value": a.values.mean.get_value()}),
        "values: var has the shapes {'': (2,)}; expected {'value': (2,)}",
    ),
    "shape": (
        lambda a: a.policy.layers[0].mean.set_value(np.zeros(3, np.float32)),
        "policy/layers/0: mean has the shapes {'': (3,)}; expected {'': (2,)}",
    ),
    "residual": (
        lambda a: a.reward.residual.set_value({"mean": jnp.float32(0)}),
        "reward: residual has the shapes {'mean': ()}; expected {'M2': (), 'counter'",
    ),
    "returns": (
        lambda a: a.reward.running_return.set_value(np.zeros((4, 2), np.float32)),
        "reward: running_return has the shapes {'': (4, 2)}; expected those of mean",
    ),
    "no count": (
        lambda a: a.goals.counter.set_value(jnp.float32(0)),
        "goals: counter is 0 where mean/goal/id is not",
    ),
    "no count of a policy": (
        lambda a: a.policy.layers[0].counter.set_value(jnp.float32(0)),
        "policy/layers/0: counter is 0 where mean is not",
    ),
    "negative": (
        lambda a: a.reward.M2.set_value(jnp.float32(-1)),
        "reward: M2 is negative",
    ),
    "negative count": (
        lambda a: a.returns.count.set_value(jnp.float32(-1)),
        "returns: count is negative",
    ),
    "negative variance of a port": (
        lambda a: a.values.var.set_value(jnp.float32([1, -1e-3])),
        "values: var is negative",
    ),
    "NaN count of a port": (
        lambda a: a.values.count.set_value(jnp.float32(jnp.nan)),
        "values: count is not finite",
    ),
    "infinite count": (
        lambda a: a.goals.counter.set_value(jnp.float32(jnp.inf)),
        "goals: counter is not finite",
    ),
    "no returns": (
        lambda a: a.reward.running_return.set_value(None),
        "reward: running_return holds None",
    ),
    "NaN returns": (
        lambda a: a.reward.running_return.set_value(jnp.full(4, jnp.nan, jnp.float32)),
        "reward: running_return is not finite",
    ),
    "NaN": (
        lambda a: a.policy.layers[0].mean.set_value(jnp.float32([0.0, jnp.nan])),
        "policy/layers/0: mean is not finite",
    ),
}


@pytest.mark.parametrize(("change", "told"), TORN.values(), ids=TORN.keys())
def test_a_torn_state_is_refused_with_its_path(change, told):
    with pytest.raises(ValueError) as refusal:
        check_statistics(tampered(change))
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        nnx.split(Normalizer(2)),
        nnx.to_pure_dict(nnx.state(Normalizer(2))),
        nnx.state(Normalizer(2)),
    ],
    ids=["dict", "list", "split", "pure dict", "state"],
)
def test_what_holds_no_module_is_not_passed_as_sound(state):
    with pytest.raises(TypeError, match="expected a module, .*: nnx.update"):
        check_statistics(state)


def test_modules_in_a_list_are_looked_at_and_one_without_statistics_is_sound():
    check_statistics(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    norm = Normalizer(1)
    norm.M2.set_value(jnp.float32([-1]))
    models: Any = {"a": [norm]}
    with pytest.raises(ValueError, match="a/0: M2 is negative"):
        check_statistics(models)


def test_a_residual_of_another_value_is_sound_and_counts_as_zero():
    # As where mean, M2 and counter of an older checkpoint meet a trained model.
    norm = Normalizer(1)
    norm.set_statistics(np.array([1e8 + 1 / 3]), 2.0, 2**30 + 1)
    for variable, value in ((norm.mean, [3.0]), (norm.M2, [8.0]), (norm.counter, 4.0)):
        variable.set_value(jnp.float32(value))
    check_statistics(norm)
    d = norm.to_dict()
    assert (d["mean"], d["M2"], d["count"]) == ([3.0], [8.0], 4)


def test_all_that_is_wrong_is_told_at_once():
    def change(agent: Agent) -> None:
        bfloat16(agent.goals.mean)
        agent.reward.M2.set_value(jnp.float32(-1))

    with pytest.raises(ValueError, match=r"goals: mean[^\n]*\n  reward: M2 is nega"):
        check_statistics(tampered(change))


def test_what_is_in_order_is_not_refused():
    @nnx.vmap
    def population(key: jax.Array) -> Any:
        modules = {
            "obs": Normalizer({"a": 2, "off": 3}, exclude=["off"]),
            "reward": RewardNormalizer(0.9, shape={"x": 2}, num_envs=4),
            "port": RewardRunningMeanStd(2, gamma=0.9, num_envs=4),
        }
        return nnx.Dict(modules)

    models: list[Any] = [
        Agent(),
        AGENT[0],
        population(jax.random.split(jax.random.key(0), 3)),
        Normalizer({}),
        RunningMeanStd(),
        RewardRunningMeanStd(gamma=0.9),
        RewardNormalizer(0.9),
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    ]
    for model in models:
        check_statistics(model)
    lets_in = Normalizer(1, nonfinite="propagate")
    lets_in.update_statistics(jnp.full((1, 1, 1), jnp.nan))
    check_statistics(lets_in)


@pytest.mark.parametrize("name", ["mean", "M2", "counter", "residual"])
def test_statistics_cast_by_a_template_are_not_read(name, tmp_path):
    before = Normalizer(2)
    before.update_statistics(jnp.arange(8.0).reshape(2, 2, 2))
    load = standard(tmp_path / "state", nnx.state(before))
    template = nnx.state(before)
    template[name] = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, jnp.bfloat16, sharding=v.sharding),
        template[name],
    )
    nnx.update(before, load(template))  # without a word
    for call in (
        lambda: before.normalize(jnp.zeros(2)),
        lambda: before((), jnp.zeros((1, 2))),
        lambda: before.update_statistics(jnp.zeros((1, 1, 2))),
        lambda: jax.jit(lambda n: n.normalize(jnp.zeros(2)))(before),
    ):
        with pytest.raises(TypeError, match=r"bfloat16.*expected float32 throughout"):
            call()
    with pytest.raises(ValueError, match=f"{name}.* is bfloat16"):
        check_statistics(before)


def test_a_pure_dict_comes_back_without_a_template(tmp_path):
    saved = Agent()
    saved.goals.update_statistics({"goal": {"id": jnp.arange(6.0).reshape(2, 3)}})
    saved.reward.update(jnp.ones((3, 4)), jnp.zeros((3, 4), bool))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(saved)))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state")
    again = Agent()
    nnx.update(again, nnx.restore_int_paths(restored))
    check_statistics(again)
    assert bits(again) == bits(saved)


def test_a_partial_restore_leaves_what_is_told_of(tmp_path):
    norm = Normalizer(2)
    norm.update_statistics(jnp.arange(8.0).reshape(2, 2, 2))
    saved = nnx.to_pure_dict(nnx.state(norm))
    del saved["counter"], saved["residual"]  # of an older version, say
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        template = placed(nnx.to_pure_dict(nnx.state(Normalizer(2))), ONE)
        restored = checkpointer.restore(
            tmp_path / "state",
            args=ocp.args.PyTreeRestore(
                template,
                restore_args=ocp.checkpoint_utils.construct_restore_args(template),
                partial_restore=True,
            ),
        )
    again = Normalizer(2)
    nnx.update(again, restored)
    with pytest.raises(ValueError, match="counter holds ShapeDtypeStruct"):
        check_statistics(again)
    kept = {k: v for k, v in restored.items() if k not in ("counter", "residual")}
    again = Normalizer(2)
    nnx.update(again, kept)
    with pytest.raises(ValueError, match="counter is 0 where mean is not"):
        check_statistics(again)
    # The way over: what is known, by name, and the count from wherever it is.
    again.load_dict({"mean": kept["mean"], "M2": kept["M2"], "count": 4})
    check_statistics(again)
    assert (again.count, again.mean.get_value().tolist()) == (4, [3.0, 4.0])


def test_a_state_is_not_taken_for_a_model_without_normalizers():
    state: Any = nnx.state(AGENT[0])
    for call in (check_statistics, nnx_norm.summary, nnx_norm.metrics):
        with pytest.raises(TypeError, match=r"Got a State.*nnx.update\(model, state\)"):
            call(state)
    with pytest.raises(TypeError, match="Got a NoneType; expected a module"):
        check_statistics(None)  # pyright: ignore[reportArgumentType]


# Killed

KILLS = 20 if hypothesis.settings().max_examples >= 1000 else 2
STEPS = 12 * KILLS + 4  # a kill comes at most 0.2 s, some steps, after the first one


def run(folder: Path, steps: int) -> None:
    """Train from the last complete checkpoint on, and save after every step."""
    with ocp.CheckpointManager(
        folder / "saved",
        options=ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False
        ),
    ) as manager:
        state, done = training_state(), manager.latest_step() or 0
        if done:
            template = placed(nnx.state(state), ONE)
            nnx.update(
                state, manager.restore(done, args=ocp.args.StandardRestore(template))
            )
            check_statistics(state[0])
        for i in range(done, steps):
            step(*state, jnp.int32(i))
            manager.save(i + 1, args=ocp.args.StandardSave(nnx.state(state)))
            print(i + 1, flush=True)
    np.save(folder / "end.npy", np.array([str(bits(m)) for m in state]))


def test_killed_at_random_moments_ends_bit_identical(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(Path(nnx_norm.__file__).parents[1]),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(name: str) -> subprocess.Popen[str]:
        line = [sys.executable, __file__, str(tmp_path / name), str(STEPS)]
        return subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, text=True
        )

    moments = random.Random(0)
    for _ in range(KILLS):
        with start("killed") as process:
            assert process.stdout is not None
            process.stdout.readline()  # it has restored, trained and saved once
            time.sleep(moments.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
    for name in ("killed", "whole"):
        with start(name) as process:
            assert process.wait(300) == 0
    ends = [np.load(tmp_path / name / "end.npy") for name in ("killed", "whole")]
    assert ends[0].tolist() == ends[1].tolist()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
