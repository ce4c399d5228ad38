# SPDX-License-Identifier: Apache-2.0
"""The example: its algorithm against plain loops, its learning, its command line.

Most of it runs in a small environment of its own, so that it runs on every stack;
environments of gymnax and brax are tested where those are installed. Run as a script,
this file is the example's command line with that environment added.
"""

import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import launcher
import numpy as np
import pytest
from flax import nnx
from jax import Array

from nnx_norm import Normalizer, NormalizerStatistics
from nnx_norm.examples import (
    catalogue,
    checkpoints,
    devices,
    ppo,
    report,
    training,
)
from nnx_norm.examples.agent import Categorical, Gaussian, observation_normalizer
from nnx_norm.examples.algorithm import train_step
from nnx_norm.examples.checkpoints import Checkpoints, Saved
from nnx_norm.examples.environments import (
    Continuous,
    Environment,
    Step,
    start_all,
    step_all,
)
from nnx_norm.examples.learner import Hyperparameters, Learner, new_learner
from nnx_norm.examples.loss import learn
from nnx_norm.examples.progress import Progress
from nnx_norm.examples.rollout import (
    Rollout,
    generalized_advantages,
    make_batch,
    roll_out,
)
from nnx_norm.examples.training import Interrupted, Settings

TIME_LIMIT = 25


def point_mass(name: str = "PointMass") -> Environment:
    """A point to keep in the middle of a line; it falls off at both ends.

    Seen in awkward units, as real sensors give them: millimetres from a far
    corner, kilometres per second.
    """

    def observe(state: Array) -> Array:
        return jnp.stack([5000 + 1000 * state[0], 0.001 * state[1]])

    def reset(key: Array) -> tuple[Array, Array]:
        state = jax.random.uniform(key, (2,), jnp.float32, -1.0, 1.0)
        return state, observe(state)

    def step(
        key: Array, state: Array, action: Array
    ) -> tuple[Array, Array, Array, Array]:
        velocity = state[1] + 0.3 * action[0]
        state = jnp.stack([state[0] + 0.3 * velocity, velocity])
        terminated = jnp.abs(state[0]) > 2
        return state, observe(state), 1 - jnp.abs(state[0]), terminated

    actions = Continuous(1, -1.0, 1.0)
    return Environment(name, ("position", "velocity"), actions, TIME_LIMIT, reset, step)


if __name__ == "__main__":
    catalogue.MAKERS["PointMass"] = point_mass
    sys.exit(ppo.main())


ELSEWHERE = {"gymnax": catalogue.GYMNAX_FEATURES, "brax": ["fast"]}
INSTALLED = [
    name
    for package, names in ELSEWHERE.items()
    if importlib.util.find_spec(package)
    for name in names
]
MASS = point_mass()
SMALL = Hyperparameters(environments=4, horizon=32, epochs=2, minibatches=4)
# Enough for the normalized agent; the other one learns nothing from these units.
LEARNING = Settings(env="PointMass", seeds=2, steps=60_000)


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(catalogue.MAKERS, "PointMass", point_mass)
    with jax.numpy_dtype_promotion("standard"):  # optax and gymnax mix types
        yield


class Silent(Progress):
    """Says nothing; calls back after every training step."""

    def __init__(self, after: Callable[[int], None] = lambda done: None):
        self.done, self.after = 0, after

    def compiling(self, variant: str) -> None: ...

    def training(self, variant: str, total: int, done: int) -> None:
        self.done = done

    def advance(self, metrics: Any) -> None:
        self.done += 1
        self.after(self.done)

    def finished(self) -> None: ...


@functools.cache
def trained() -> dict[str, training.History]:
    """What an uninterrupted run of `LEARNING` shows."""
    return training.train(LEARNING, MASS, Silent())[0]


@functools.cache
def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(lambda *args: function(*args, MASS, SMALL))


@functools.cache
def small_learner() -> Learner:
    """A learner of `SMALL` after two training steps."""
    learner = new_learner(jax.random.key(0), MASS, SMALL)
    for _ in range(2):
        learner, _ = jitted(train_step)(learner)
    return learner


def bits(tree: Any) -> list[tuple[str, bytes]]:
    return [
        (name, np.asarray(leaf).tobytes())
        for name, leaf in checkpoints.to_arrays(tree).items()
    ]


# The algorithm against plain loops


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_a_loop_in_float64(seed: int):
    random = np.random.default_rng(seed)
    T, B, gamma, lambda_ = 40, 5, 0.97, 0.9
    reward, value, next_value = random.normal(size=(3, T, B))
    terminated = random.random((T, B)) < 0.15
    truncated = (random.random((T, B)) < 0.15) & ~terminated
    want = np.zeros((T, B))
    for b in range(B):
        following = 0.0
        for t in reversed(range(T)):
            # Nothing comes after a terminated episode; after a truncated one there
            # would have been more, worth the value of its last observation.
            future = 0.0 if terminated[t, b] else next_value[t, b]
            if terminated[t, b] or truncated[t, b]:
                following = 0.0
            delta = reward[t, b] + gamma * future - value[t, b]
            following = delta + gamma * lambda_ * following
            want[t, b] = following
    got = generalized_advantages(
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(value, jnp.float32),
        jnp.asarray(next_value, jnp.float32),
        jnp.asarray(terminated),
        jnp.asarray(truncated),
        gamma,
        lambda_,
    )
    # Sums of some 1 / (1 - gamma lambda) terms, each rounded.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_only_a_truncated_episode_has_a_future(kind: str):
    ended = {"terminated": jnp.array([[False]]), "truncated": jnp.array([[False]])}
    ended[kind] = jnp.array([[True]])
    one = jnp.ones((1, 1))
    got = generalized_advantages(one, one, 5 * one, **ended, gamma=0.5, lambda_=1.0)
    assert float(got[0, 0]) == (0.0 if kind == "terminated" else 2.5)


def test_ends_and_last_observations_are_never_lost():
    keys = jax.random.split(jax.random.key(1), 4)
    episodes = start_all(MASS, keys)
    # Two that are pushed off the line, two that are held on it.
    push = jnp.array([[1.0], [-1.0], [0.0], [0.0]])
    still = jnp.zeros((4, 2)).at[:2].set(episodes.state[:2])
    episodes = episodes._replace(state=still)
    step = jax.jit(lambda e, k: step_all(MASS, e, push, k))
    ends: list[list[tuple[int, str]]] = [[] for _ in range(4)]
    returns = np.zeros(4)
    for t in range(TIME_LIMIT):
        before = episodes
        episodes, stepped = step(episodes, jax.random.key(t))
        returns += np.asarray(stepped.reward)
        for b in range(4):
            off = abs(float(stepped.next_observation[b, 0]) - 5000) > 2000
            assert bool(stepped.terminated[b]) == off
            assert bool(stepped.truncated[b]) == (int(before.time[b]) == 24 and not off)
            if stepped.terminated[b] or stepped.truncated[b]:
                ends[b].append((t, "off" if off else "time"))
                assert abs(float(episodes.observation[b, 0]) - 5000) <= 1000  # anew
                assert int(episodes.time[b]) == 0
                np.testing.assert_allclose(episodes.last[b], returns[b], rtol=1e-5)
                returns[b] = 0
            elif not ends[b]:
                assert np.isnan(episodes.last[b])
    assert ends[2] == ends[3] == [(24, "time")]
    assert ends[0] and ends[1] and {how for _, how in ends[0] + ends[1]} == {"off"}


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_distributions_are_those_of_the_books(kind: str):
    x = np.random.default_rng(0).normal(size=(2, 3))
    if kind == "gaussian":
        policy = Gaussian(
            jnp.asarray(x[0], jnp.float32), jnp.asarray(x[1], jnp.float32)
        )
        action = policy.sample(jax.random.key(0))
        std, z = np.exp(x[1]), (np.asarray(action) - x[0]) / np.exp(x[1])
        log_prob = np.sum(-0.5 * z**2 - np.log(std * np.sqrt(2 * np.pi)))
        entropy = np.sum(np.log(std * np.sqrt(2 * np.pi * np.e)))
    else:
        policy = Categorical(jnp.asarray(x[0], jnp.float32))
        action = policy.sample(jax.random.key(0))
        p = np.exp(x[0]) / np.exp(x[0]).sum()
        log_prob, entropy = np.log(p[int(action)]), -np.sum(p * np.log(p))
    np.testing.assert_allclose(policy.log_prob(action), log_prob, rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(), entropy, rtol=1e-5)


# The one update


def test_ratio_is_one_before_the_first_gradient_step():
    learner, rollout = jitted(roll_out)(small_learner())

    @jax.jit
    def replayed(learner: Learner, rollout: Rollout) -> Array:
        def step(_: None, now: Rollout) -> tuple[None, Array]:
            out = learner.network(now.network_state, now.observation, now.extras)
            return None, out.output["policy"].log_prob(now.action)

        return jax.lax.scan(step, None, rollout)[1]

    ratio = jnp.exp(replayed(learner, rollout) - rollout.log_prob)
    assert (np.asarray(ratio) == 1).all()
    # And had the statistics moved before the replay, it would not be.
    learner.network.update_statistics(rollout.extras)
    moved = jnp.exp(replayed(learner, rollout) - rollout.log_prob)
    assert float(jnp.max(jnp.abs(moved - 1))) > 1e-4


def test_statistics_move_in_the_one_update_and_nowhere_else():
    def all_but_the_update(learner: Learner, *settings: Any) -> tuple[Learner, Any]:
        learner, rollout = roll_out(learner, *settings)
        reward = rollout.reward
        batch = make_batch(learner.network, rollout, reward, SMALL)
        network, optimizer, _ = learn(
            learner.network, learner.optimizer, batch, learner.key, SMALL
        )
        return learner._replace(network=network, optimizer=optimizer), rollout

    def statistics(learner: Learner) -> list[tuple[str, bytes]]:
        return bits(nnx.state(learner.network, NormalizerStatistics))

    before = small_learner()
    after, rollout = jitted(all_but_the_update)(before)
    assert statistics(after) == statistics(before)
    assert bits(nnx.state(after.network, nnx.Param)) != bits(
        nnx.state(before.network, nnx.Param)
    )
    normalizer = observation_normalizer(after.network)
    assert normalizer is not None
    count = normalizer.count
    whole, _ = jitted(train_step)(before)
    updated = observation_normalizer(whole.network)
    assert updated is not None
    assert updated.count == count + SMALL.steps_per_iteration
    # The same samples by hand: the very observations the rollout saw.
    normalizer.update_statistics(rollout.observation)
    for name in ("mean", "std"):
        ours, theirs = normalizer.to_dict()[name], updated.to_dict()[name]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_nothing_is_clipped_before_the_first_update():
    normalizer = Normalizer(2, clip=10.0)
    network = new_learner(jax.random.key(0), MASS, SMALL).network
    ours = observation_normalizer(network)
    assert ours is not None and ours.clip == 10
    far = jnp.array([[5000.0, -0.001]])
    assert float(jnp.max(jnp.abs(normalizer.normalize(far)))) == 10  # the default would
    assert float(jnp.max(jnp.abs(ours.normalize(far)))) < 0.01


# Learning


def test_normalization_is_what_makes_it_learn():
    final = {name: history["return"][-1] for name, history in trained().items()}
    # 25 steps of reward 1 would be perfect; held where it started it gets some 12.
    assert (final["obs+reward"] > 18).all(), final
    assert (final["none"] < 8).all(), final


def test_histories_count_every_step_once():
    history = trained()["obs+reward"]
    n = LEARNING.iterations
    per_iteration = Hyperparameters().steps_per_iteration
    counts = per_iteration * np.arange(1, n + 1)
    np.testing.assert_array_equal(history["count"], np.stack([counts] * 2, axis=1))
    assert history["mean"].shape == history["std"].shape == (n, 2, 2)
    assert (history["clip_share"][0] == 0).all()
    assert (np.abs(history["mean"][..., 0] - 5000) < 1000).all()


# Interruptions


def test_ctrl_c_stops_after_a_step_and_resuming_is_bit_identical(tmp_path: Path):
    handler = signal.getsignal(signal.SIGINT)
    presses = 0

    def press_in_second_variant(done: int) -> None:
        nonlocal presses
        presses += done == 5
        if done == 5 and presses == 2:
            os.kill(os.getpid(), signal.SIGINT)

    saves = Checkpoints(tmp_path)
    with pytest.raises(Interrupted):
        training.train(
            LEARNING, MASS, Silent(press_in_second_variant), saves, save_every=3
        )
    assert signal.getsignal(signal.SIGINT) is handler
    steps: list[int] = []
    histories, _ = training.train(
        LEARNING, MASS, Silent(steps.append), Checkpoints(tmp_path)
    )
    assert steps == list(range(6, LEARNING.iterations + 1))  # none was done twice
    assert bits(histories) == bits(trained())


# Orbax leaves tasks of its reading behind when it fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damaged", ["**/*", "state/d/*"])
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
):
    arrays = {"a": np.arange(3.0), "key": np.zeros(2, np.uint32)}
    saves = Checkpoints(tmp_path)
    for position in range(5):
        history = {"none": {"return": np.full((position + 1, 2), position)}}
        saves.save(Saved(position, arrays, history, {"seeds": 2}))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["2", "3", "4"]  # the last few
    files = [path for path in (tmp_path / "4").glob(damaged) if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:7])
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()  # what a kill while writing leaves
    saves = Checkpoints(tmp_path)
    latest = saves.latest()
    assert latest is not None
    assert (latest.position, latest.about) == (3, {"seeds": 2})
    assert bits(latest.learners) == bits(arrays)
    np.testing.assert_array_equal(
        latest.histories["none"]["return"], np.full((4, 2), 3)
    )
    assert "checkpoint 4 is damaged" in capsys.readouterr().err
    saves.save(latest._replace(position=4))  # its place is free again
    assert Checkpoints(tmp_path).latest() is not None
    [aside] = tmp_path.glob("damaged-4-*")
    assert {p.name for p in aside.iterdir()} >= {"state", "about"}


def files_in(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_read_is_neither_deleted_nor_taken_for_nothing(tmp_path: Path):
    Checkpoints(tmp_path / "run").save(Saved(3, {"a": np.zeros(1)}, {"none": {}}, {}))
    for path in (tmp_path / "run" / "3").rglob("*"):
        if path.is_file():
            path.write_bytes(b"rubbish")
    before = files_in(tmp_path / "run")
    with pytest.raises(checkpoints.Unusable, match=r"none of the checkpoints \[3\]"):
        Checkpoints(tmp_path / "run").latest()
    assert files_in(tmp_path / "run") == before

    (tmp_path / "data" / "2024").mkdir(parents=True)
    (tmp_path / "data" / "2024" / "notes.txt").write_text("precious")
    with pytest.raises(checkpoints.Unusable, match=r"holds \['2024'\], which no run"):
        Checkpoints(tmp_path / "data")
    assert len(files_in(tmp_path / "data")) == 1
    with pytest.raises(checkpoints.Unusable, match="is a file"):
        Checkpoints(tmp_path / "data" / "2024" / "notes.txt")


def test_keys_and_modules_survive_the_way_through_arrays():
    learner = small_learner()
    arrays = checkpoints.to_arrays(learner)
    fresh = new_learner(jax.random.key(7), MASS, SMALL)
    restored = checkpoints.from_arrays(fresh, arrays)
    assert bits(restored) == bits(learner)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    normalizer = observation_normalizer(restored.network)
    assert normalizer is not None and normalizer.count == 2 * SMALL.steps_per_iteration


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command line in a process of its own, in an empty folder."""
    started: list[subprocess.Popen[str]] = []
    environment = os.environ | {
        "PYTHONPATH": str(Path(ppo.__file__).parents[2]),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        line = [sys.executable, __file__, "--env", "PointMass", *arguments]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                line, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_killed_and_resumed_ends_bit_identical(
    tmp_path: Path, command: Callable[..., subprocess.Popen[str]]
):
    run = "--normalize obs+reward --seeds 2 --steps 80000".split()
    saving = "--checkpoint saved --checkpoint-every 1 --out resumed".split()
    whole = command(*run, "--out", "whole")
    assert whole.wait(300) == 0
    killed = command(*run, *saving)
    assert killed.stderr is not None
    for line in killed.stderr:
        if "40%" in line:
            break
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    resumed = command(*run, *saving, "--resume")
    assert resumed.wait(300) == 0
    assert resumed.stderr is not None
    told = resumed.stderr.read()
    assert "continuing saved" in told and "20%" not in told
    found = []
    for folder in ("whole", "resumed"):
        numbers = json.loads((tmp_path / folder / "PointMass.json").read_text())
        del numbers["seconds"]
        found.append((numbers, (tmp_path / folder / "PointMass.png").read_bytes()))
    assert found[0] == found[1]


# Several devices


def test_devices_train_as_one_and_another_number_goes_on(tmp_path: Path):
    settings = dataclasses.replace(LEARNING, variants=("obs+reward",))

    def press(done: int) -> None:
        if done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        training.train(
            settings,
            MASS,
            Silent(press),
            Checkpoints(tmp_path),
            mesh=devices.mesh_of(2),
        )
    histories, _ = training.train(settings, MASS, Silent(), Checkpoints(tmp_path))
    found, right = histories["obs+reward"], trained()["obs+reward"]
    np.testing.assert_array_equal(found["count"], right["count"])
    # As far as rounding goes, of which training makes more with every step.
    for name, bound in {"mean": 1e-6, "std": 1e-4, "return": 1e-4}.items():
        np.testing.assert_allclose(found[name][:5], right[name][:5], bound, 1e-6)
    np.testing.assert_allclose(found["return"], right["return"], 0.05)


def test_a_step_over_devices_stays_where_it_was_put():
    settings = dataclasses.replace(LEARNING, variants=("obs+reward",))
    run = training.VariantRun(settings, "obs+reward", MASS, devices.mesh_of(2))
    before = [leaf.sharding for leaf in jax.tree.leaves(run.learners)]
    run.step()
    after = [leaf.sharding for leaf in jax.tree.leaves(run.learners)]
    assert after == before
    assert run.learners.rewards is not None
    split = run.learners.rewards.running_return.get_value()
    assert split.addressable_shards[0].data.shape == (2, 16)
    assert not run.learners.episodes.observation.is_fully_replicated


def test_two_processes_train_as_one_and_the_first_writes(tmp_path: Path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    options = "--env PointMass --normalize obs+reward --seeds 2 --steps 4096".split()
    options += ["--coordinator", address, "--processes", "2"]
    options += ["--checkpoint", str(tmp_path / "saved")]
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("XLA", "JAX"))}
    ours |= {"PYTHONPATH": str(Path(ppo.__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    start = [sys.executable, __file__, *options]
    lines = [
        [*start, "--process", str(i), "--out", str(tmp_path / str(i))] for i in range(2)
    ]
    ranks = launcher.run(lines, environment=ours, timeout=200, grace=30)
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert "wrote" in ranks[0].output and "wrote" not in ranks[1].output
    assert not list((tmp_path / "1").iterdir())
    numbers = json.loads((tmp_path / "0" / "PointMass.json").read_text())
    history, right = (
        numbers["variants"]["obs+reward"]["history"],
        trained()["obs+reward"],
    )
    assert history["count"] == [[4096, 4096]]
    np.testing.assert_allclose(history["mean"], right["mean"][:1], 1e-6)
    np.testing.assert_allclose(history["reward_std"], right["reward_std"][:1], 1e-5)
    saved = Checkpoints(tmp_path / "saved").latest()
    assert saved is not None and saved.position == 1
    shapes = {name: array.shape for name, array in saved.learners.items()}
    assert shapes["rewards.running_return.value"] == shapes["episodes.time"] == (2, 32)


# The command line


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses these arguments."""
    assert ppo.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("ppo: ")
    return err


def test_unknown_environment_is_one_line_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = refusal(capsys, "--env", "Foo", "--out", str(tmp_path))
    assert "'Foo'" in line and "Pendulum-v1" in line and "inverted_pendulum" in line


@pytest.mark.parametrize(
    "env, package, extra",
    [("Pendulum", "gymnax", "examples"), ("fast", "brax", "brax")],
)
def test_missing_environment_is_one_line_with_the_extra(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    env: str,
    package: str,
    extra: str,
):
    monkeypatch.setitem(sys.modules, package, None)
    line = refusal(capsys, "--env", env, "--out", str(tmp_path))
    assert f"needs {package}" in line and f"pip install 'nnx-norm[{extra}]'" in line


def test_missing_package_is_one_line_with_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delitem(sys.modules, "nnx_norm.examples.progress")
    line = refusal(capsys, "--env", "PointMass")
    assert "needs tqdm" in line and "pip install 'nnx-norm[examples]'" in line


def test_wrong_scale_is_one_line_with_the_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = refusal(
        capsys, "--env", "pointmass", "--scale", "1,2,3", "--out", str(tmp_path)
    )
    assert "2 features (position, velocity)" in line and "3 factors" in line


def test_a_run_is_neither_overwritten_nor_continued_as_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    saved = dataclasses.asdict(LEARNING)
    Checkpoints(tmp_path).save(Saved(0, {"a": np.zeros(1)}, {"none": {}}, saved))
    into = ["--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path)]
    assert "add --resume" in refusal(capsys, *into)
    line = refusal(capsys, *into, "--resume", "--seeds", "4")
    assert "trained with seeds 2, not 4" in line
    line = refusal(capsys, *into, "--resume", "--normalize", "obs")
    assert "trained with variants ('none', 'obs+reward'), not ('obs',)" in line
    assert "--resume needs --checkpoint" in refusal(capsys, "--resume")
    line = refusal(capsys, "--checkpoint-every", "5")
    assert "--checkpoint-every needs --checkpoint" in line
    (tmp_path / "2024").mkdir()
    assert "which no run wrote there" in refusal(capsys, *into, "--resume")


def test_devices_that_there_are_not_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert jax.local_device_count() == 8  # and so they were made before
    into = ["--env", "PointMass", "--out", str(tmp_path), "--devices"]
    assert "--devices 99: there are only 8" in refusal(capsys, *into, "99")
    line = refusal(capsys, *into, "3")
    assert "32 environments can't be split evenly over 3 devices" in line


def settings_of(*arguments: str) -> Settings:
    return ppo.decide_settings(ppo.parser().parse_args(arguments), None)


def test_options_combine():
    both = ("none", "obs+reward")
    assert settings_of() == Settings("MountainCarContinuous-v0", variants=both)
    assert settings_of("--normalize", "obs").variants == ("obs",)
    assert settings_of("--compare").variants == ppo.VARIANTS
    assert settings_of("--compare", "reward", "none").variants == ("none", "reward")
    chosen = settings_of("--normalize", "obs", "--compare", "none")
    assert chosen.variants == ("none", "obs")
    quick = settings_of("--quick", "--steps", "2e4", "--env", "PENDULUM")
    assert (quick.seeds, quick.steps, quick.env) == (3, 20_000, "Pendulum-v1")
    assert settings_of("--scale", "1,1,57.3").scale == (1, 1, 57.3)


WRONG = ["--steps 0", "--steps inf", "--steps 1.5", "--seeds x", "--normalize both"]
WRONG += ["--scale nan,1", "--scale a,1", "--scale 1,", "--learning-rate inf"]
WRONG += ["--checkpoint ", "--out "]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_are_refused(capsys: pytest.CaptureFixture[str], wrong: str):
    with pytest.raises(SystemExit) as exit:
        ppo.parser().parse_args(wrong.split(" "))
    assert exit.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err


# What comes out


def test_json_and_picture_hold_what_was_trained(tmp_path: Path):
    numbers = report.numbers(LEARNING, MASS, trained(), {})
    report.write_json(tmp_path / "a.json", numbers)
    read = json.loads((tmp_path / "a.json").read_text())
    ours = read["variants"]["obs+reward"]
    assert ours["final"] == trained()["obs+reward"]["return"][-1].tolist()
    assert ours["median"] == np.median(ours["final"])
    history = ours["history"]
    assert history["count"][-1] == [read["steps"][-1]] * 2
    assert {"return", "drift", "clip_share", "mean", "std", "reward_std"} <= set(
        history
    )
    report.write_picture(tmp_path / "a.png", LEARNING, MASS, trained())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    figure = report.draw(LEARNING, MASS, trained())
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 5 and {"position (obs+reward)", "velocity (obs+reward)"} <= {
        *titles
    }
    assert all(axes.get_xlabel() for axes in figure.axes)
    [suptitle] = [text.get_text() for text in figure.texts]
    assert (
        "PointMass" in suptitle and "61,440 steps" in suptitle and "2 seeds" in suptitle
    )


def test_rows_before_every_environment_finished_are_not_drawn():
    unfinished = np.array([[np.nan, 90.0], [np.nan, 80.0], [50.0, 40.0], [60.0, 50.0]])
    settings = Settings(env="PointMass", seeds=2, steps=4 * 4096, variants=("none",))
    histories = {"none": {"return": unfinished}}
    [axes] = report.draw(settings, MASS, histories).axes
    drawn = np.asarray(axes.lines[0].get_ydata())
    np.testing.assert_array_equal(drawn, [np.nan, np.nan, 45, 55])
    numbers = report.numbers(settings, MASS, histories, {})
    assert numbers["variants"]["none"]["history"]["return"][0] == [None, 90.0]
    assert "55.0       50.0       60.0" in report.table(settings, MASS, histories)
    early = {"none": {"return": unfinished[:2]}}
    assert "has not finished an episode" in report.table(settings, MASS, early)


def test_one_training_step_can_be_drawn_and_divergence_is_told(tmp_path: Path):
    variants = {name: rows[:1] for name, rows in trained()["obs+reward"].items()}
    settings = dataclasses.replace(LEARNING, steps=4096, variants=("obs+reward",))
    report.write_picture(tmp_path / "a.png", settings, MASS, {"obs+reward": variants})
    assert (tmp_path / "a.png").exists()
    nothing = np.full((1, 2), np.nan)
    diverged = variants | {"return": nothing, "policy_loss": nothing}
    diverged |= {"skipped": np.array([[3.0, 7.0]])}
    told = report.table(settings, MASS, {"obs+reward": diverged})
    assert "diverged, losses are not finite: obs+reward" in told
    assert "obs+reward: 7 observations were not finite" in told
    assert "has not finished an episode" not in told


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_sparse_lines_elsewhere(terminal: bool):
    file = io.StringIO()
    file.isatty = lambda: terminal
    progress = Progress(steps_per_iteration=1000, file=file)
    progress.compiling("obs")
    progress.training("obs", 100, 0)
    metrics = {"return": np.array([np.nan, 1.0]), "count": np.array([5e3, 5e3])}
    metrics["clip_share"] = np.array([0.25, 0.75])
    for i in range(100):
        metrics["return"][0] = np.nan if i < 50 else 3.0
        progress.advance(metrics)
    progress.finished()
    text = file.getvalue()
    assert "compiling" in text
    assert "return 2.0" in text and "count 5000" in text and "clipped 50.00%" in text
    assert "steps/s" in text
    lines = [line for line in text.splitlines() if "%" in line]
    if terminal:
        assert "\r" in text
    else:
        assert "\r" not in text and len(lines) == 5 and "return -" in lines[0]


# Environments of others


@pytest.mark.filterwarnings("ignore")  # those of brax and what it imports
@pytest.mark.parametrize("name", ["PointMass", *INSTALLED])
def test_every_environment_trains_under_one_type(name: str):
    environment = catalogue.make(name)
    hyper = dataclasses.replace(SMALL, horizon=8)
    given = {"environment": environment, "hyper": hyper}
    new = functools.partial(new_learner, **given)
    learner = jax.eval_shape(new, jax.random.key(0))
    step = functools.partial(train_step, **given)
    after, metrics = jax.eval_shape(step, learner)
    assert types(after) == types(learner)
    assert metrics["mean"].shape == (len(environment.features),)


def types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


if importlib.util.find_spec("gymnax"):

    @pytest.mark.usefixtures("x64_off")
    @pytest.mark.parametrize("name", catalogue.GYMNAX_FEATURES)
    def test_episodes_end_where_gymnax_ends_them(name: str):
        gymnax = importlib.import_module("gymnax")
        theirs, parameters = gymnax.make(name)
        environment = catalogue.make(name)
        random = theirs.action_space(parameters)
        B = 3

        @functools.partial(jax.jit, static_argnums=1)
        def run(key: Array, steps: int) -> Any:
            def step(carry: Any, key: Array) -> Any:
                ours, state = carry
                action = jax.vmap(random.sample)(jax.random.split(key, B))
                ours, stepped = step_all(environment, ours, action, key)
                keys = jax.random.split(key, B)
                _, state, reward, terminated, truncated, info = jax.vmap(
                    theirs.step, in_axes=(0, 0, 0, None)
                )(keys, state, action, parameters)
                final = info["final_observation"]
                want = Step(reward, terminated, truncated & ~terminated, final)
                return (ours, jax.tree.map(catalogue.strong, state)), (stepped, want)

            start = start_all(environment, jax.random.split(key, B))
            keys = jax.random.split(key, steps)
            return jax.lax.scan(step, (start, start.state), keys)[1]

        got, want = run(jax.random.key(0), environment.time_limit)
        ends = np.asarray(want.terminated | want.truncated)
        assert ends.any(axis=0).all()
        # After their first end both have gone on from starts of their own.
        both = np.cumsum(ends, axis=0) - ends == 0
        for ours, their in zip(got, want, strict=True):
            # Acrobot is chaotic: it makes much of differences in rounding.
            np.testing.assert_allclose(
                np.asarray(ours, float)[both], np.asarray(their, float)[both], atol=0.01
            )
