# SPDX-License-Identifier: Apache-2.0
"""The benchmarks measure what they say: turns, ratios, tables, streams, a run each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bandwidth, bench_accuracy, harness, report, streams
from benchmarks.harness import Case, measure

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only when a contender says so."""
    now = SimpleNamespace(wall=0.0, cpu=0.0)
    fake = SimpleNamespace(perf_counter=lambda: now.wall, process_time=lambda: now.cpu)
    monkeypatch.setattr(harness, "time", fake)
    return now


def taking(
    clock: SimpleNamespace, wall: float, cpu: float, turns: list[str], name: str
) -> Callable[[], Callable[[], None]]:
    """A contender whose call takes these seconds."""

    def call() -> None:
        clock.wall += wall
        clock.cpu += cpu
        turns.append(name)

    return lambda: call


def test_ratios_are_the_baselines_time_over_ours(clock: SimpleNamespace):
    turns: list[str] = []
    contenders = {
        "base": taking(clock, 0.010, 0.020, turns, "base"),
        "fast": taking(clock, 0.005, 0.030, turns, "fast"),
    }
    base, fast = measure(Case("c", contenders, "base", nbytes=10**6), rounds=25)
    assert base["speed"] == base["cpu_ratio"] == pytest.approx(1)
    assert fast["speed"] == pytest.approx(2)
    assert fast["cpu_ratio"] == pytest.approx(1.5)
    assert fast["wall_ms"] == pytest.approx(5)
    assert fast["GB_per_s"] == pytest.approx(0.2)
    assert fast["rounds"] == 25


def test_contenders_take_turns_in_changing_order(clock: SimpleNamespace):
    turns: list[str] = []
    names = ["a", "b", "c"]
    contenders = {n: taking(clock, 0.01, 0.01, turns, n) for n in names}
    measure(Case("c", contenders, "a"), rounds=20)
    rounds = [turns[i : i + 3] for i in range(9, len(turns), 3)]  # after the warm-up
    assert [sorted(r) for r in rounds] == [names] * 20
    assert len({tuple(r) for r in rounds}) > 2


def test_short_calls_are_repeated_and_slow_ones_get_fewer_rounds(
    clock: SimpleNamespace,
):
    turns: list[str] = []
    contenders = {
        "short": taking(clock, 1e-4, 1e-4, turns, "short"),
        "slow": taking(clock, 1.0, 1.0, turns, "slow"),
    }
    short, slow = measure(Case("c", contenders, "short"), rounds=30)
    assert turns.count("short") == 3 + 30 * 10
    assert short["wall_ms"] == pytest.approx(0.1)
    assert slow["rounds"] == harness.SLOW_ROUNDS


def test_share_of_the_bound(clock: SimpleNamespace):
    turns: list[str] = []
    contenders = {
        "work": taking(clock, 0.004, 0.004, turns, "work"),
        "read": taking(clock, 0.001, 0.001, turns, "read"),
    }
    case = Case("c", contenders, "work", nbytes=8, bounds=["read"])
    work, read = measure(case, rounds=5)
    assert work["share_of_bound"] == pytest.approx(0.25)
    assert read["share_of_bound"] == pytest.approx(1)


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'peer'", name="peer")


def test_missing_peers_are_reported_and_a_missing_baseline_is_an_error(
    clock: SimpleNamespace,
):
    here = taking(clock, 0.01, 0.01, [], "here")
    contenders = {"peer": missing, "here": here}
    peer, _ = measure(Case("c", contenders, "here"), rounds=5)
    assert peer["status"] == "not installed"
    with pytest.raises(ImportError, match="baseline peer"):
        measure(Case("c", contenders, "peer"), rounds=5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("words", [1, 31, 1000, 4097])
def test_sweep_reads_every_word_once(threads: int, words: int):
    sweep = bandwidth.compile_sweep()
    if sweep is None:  # then the benchmarks say so in their tables
        assert "no C compiler" in next(iter(bandwidth.readers(jnp.zeros(8))))
        return
    buffer = np.random.default_rng(0).integers(0, 2**32, words, np.uint64)
    assert sweep(buffer.ctypes.data, buffer.nbytes, threads) == int(buffer.sum())


def test_readers_run_over_the_buffer():
    for make in bandwidth.readers(jnp.ones((64, 3), jnp.float32)).values():
        assert int(make()()) == 96 * 0x3F800000_3F800000 % 2**64


def test_matrix_has_geometric_means_and_names_missing_peers():
    results = {
        "s": [{"contender": "a", "speed": 2.0}, {"contender": "b", "status": "no"}],
        "t": [{"contender": "a", "speed": 8.0}, {"contender": "b", "status": "no"}],
    }
    lines = report.matrix(results, "speed", "speed").splitlines()
    assert lines[0] == "| speed | s | t | geometric mean |"
    assert lines[2:] == ["| a | 2.00 | 8.00 | 4.00 |", "| b | - | - | not installed |"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.2345, "1.23"), (123.45, "123"), (1.5e-7, "1.50e-07"), (None, "-")],
)
def test_numbers(value: float | None, text: str):
    assert report.number(value) == text


def test_markdown_goes_between_the_markers_of_its_section(tmp_path: Path):
    page = tmp_path / "README.md"
    page.write_text("top\n<!-- begin x -->\nold\n<!-- end x -->\nbottom\n")
    for text in ["first", r"second \1"]:
        report.write_markdown(str(page), "x", text)
    assert page.read_text() == (
        "top\n<!-- begin x -->\n\nsecond \\1\n\n<!-- end x -->\nbottom\n"
    )
    report.write_markdown(str(tmp_path / "other.md"), "x", "alone")
    assert (tmp_path / "other.md").read_text() == "alone\n"


def test_exact_moments_agree_with_fractions():
    rng = np.random.default_rng(0)
    batches = [
        (1e4 + rng.standard_normal((n, 8))).astype(np.float32) for n in (3, 1, 7)
    ]
    found = streams.exact(batches)
    rows = np.concatenate(batches)
    for feature in range(8):
        column = [Fraction(float(x)) for x in rows[:, feature]]
        mean = sum(column) / len(column)
        variance = sum((x - mean) ** 2 for x in column) / len(column)
        assert float(found.mean[feature]) == pytest.approx(float(mean), rel=1e-15)
        assert float(found.variance[feature]) == pytest.approx(
            float(variance), rel=1e-13
        )
    assert found.count == 11


def test_exact_moments_leave_broken_rows_out_and_start_from_a_prior():
    batch = np.arange(32, dtype=np.float32).reshape(4, 8)
    batch[1, 0], batch[2, 7] = np.nan, np.inf
    assert streams.exact([batch]).count == 2
    prior = streams.preset(2.0, 2)
    total = streams.exact([np.full((2, 8), 4, np.float32)], prior)
    assert float(total.mean[0]) == 3 and float(total.variance[0]) == 1.5


def test_streams_are_the_ones_of_the_table_and_come_again_the_same():
    names = "S1 S2 S3 S4a S4b S5 S6 S7 S8 S9 S10 S11h S11b S12 S13 S14".split()
    found = streams.streams(quick=True)
    assert [s.name for s in found] == names
    for stream in found:
        one, two = next(stream.batches()), next(stream.batches())
        assert one.shape[1:] == (8,) and one.tobytes() == two.tobytes()


class Skewed:
    """A statistic that is exact but for a known error."""

    def __init__(self, mean_error: float, variance_error: float):
        self.errors = mean_error, variance_error
        self.batches: list[np.ndarray] = []

    def update(self, batch: np.ndarray) -> None:
        self.batches.append(batch)

    def moments(self) -> tuple[np.ndarray, np.ndarray, float]:
        truth = streams.exact(self.batches)
        mean = truth.mean + self.errors[0] * np.sqrt(truth.variance)
        variance = truth.variance * (1 + self.errors[1])
        return mean.astype(float), variance.astype(float), truth.count


def test_accuracy_sees_an_error_of_known_size(monkeypatch: pytest.MonkeyPatch):
    stream = streams.Stream("S", "", streams.normal(10_000, 5.0))
    truth = streams.exact(stream.batches())
    monkeypatch.setitem(bench_accuracy.STATISTICS, "it", lambda: Skewed(1e-3, -2e-3))
    figures = bench_accuracy.judge("it", stream, truth)
    assert figures["mean_error"] == pytest.approx(1e-3, rel=1e-6)
    assert figures["variance_error"] == pytest.approx(2e-3, rel=1e-6)
    assert bench_accuracy.cell(figures) == "0.001 / 0.002"
    monkeypatch.setitem(bench_accuracy.STATISTICS, "it", missing)
    assert bench_accuracy.cell(bench_accuracy.judge("it", stream, truth)) == (
        "not installed"
    )


def bench(tmp_path: Path, name: str, *flags: str) -> tuple[str, dict[str, Any]]:
    """Runs a benchmark as its README says; what it printed and its JSON."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *flags]
    run = subprocess.run(
        [*command, "--json", str(figures)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(figures.read_text())


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("bench_fold", "1000x1x8"),
        ("bench_forward", "64x17"),
        ("bench_compile", "20x256x128"),
    ],
)
def test_timings_run_from_the_command_line(tmp_path: Path, name: str, case: str):
    text, found = bench(tmp_path, name, "--rounds", "3", "--only", case)
    rows = {row["contender"]: row for row in found["results"][case]}
    for ours_or_baseline in ("nnx_norm", found["baseline"], "nnx-ppo"):
        assert rows[ours_or_baseline]["wall_ms"] > 0
        assert f"| {ours_or_baseline} |" in text
    assert found["machine"]["versions"]["jax"] in text


def test_accuracy_runs_from_the_command_line(tmp_path: Path):
    _, found = bench(tmp_path, "bench_accuracy", "--only", "S2", "--only", "S6")
    ours, peer = (found["results"]["S2"][name] for name in ("nnx_norm", "nnx-ppo"))
    assert ours["mean_error"] < 1e-7 < peer["mean_error"]
    assert ours["variance_error"] < 2e-7 < peer["variance_error"]
    assert found["results"]["S6"]["nnx_norm"]["worst_output"] == 0


def test_memory_runs_from_the_command_line(tmp_path: Path):
    _, found = bench(tmp_path, "bench_memory")
    used = {k: v["temporary_bytes"] for k, v in found["results"]["rollouts"].items()}
    history = 32 * 256 * 64 * 4
    assert used['emit="inputs"'] - used["no normalizer"] >= 0.9 * history
    assert used['emit="moments"'] < used['emit="inputs"'] / 4


def test_devices_run_from_the_command_line(tmp_path: Path):
    text, found = bench(
        tmp_path, "bench_devices", "--rounds", "1", "--only", "2 devices"
    )
    ours = found["communication"]["shard_map, axis_name"]
    assert ours["always_collectives"] == 1 and ours["rarely_collectives"] == 0
    assert ours["always_bytes"] == 8 * 8 * (2 * (3 + 4) + 3)
    assert found["communication"]["two-pass, per leaf"]["always_collectives"] > 1
    assert found["results"].keys() == {"2 devices"} and "| 2 devices |" in text


def test_ppo_contenders_train_and_its_parts_run():
    from benchmarks import bench_ppo

    case = bench_ppo.case(1)
    assert list(case.contenders)[:4] == ["none", "obs", "reward", "obs+reward"]
    for part in ("update", "forward"):
        out = bench_ppo.alone(part, 2)()
        assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(out))
