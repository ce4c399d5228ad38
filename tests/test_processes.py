# SPDX-License-Identifier: Apache-2.0
"""Moments of several real processes, over gloo on this machine; it always ends."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnx_norm import distributed, moments

WORKER = """
import json, os, sys
import jax
import numpy as np

rank, size, port, uneven = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=size, process_id=rank,
    initialization_timeout=60, heartbeat_timeout_seconds=10,
)
from nnx_norm import RunningMeanStd, distributed, moments
from nnx_norm.extended import double

try:
    rng = np.random.default_rng(rank)
    features = 3 + (rank if uneven else 0)
    x = np.float32(1e4 + rng.normal(size=(5 + rank, features)))
    with double():  # a mean of 1e4 in float32 would be off by 5e-4
        batch = distributed.all_reduce_processes(moments.from_batch(x))
    stats = RunningMeanStd((3,), initial_count=0)
    stats.update_from_moments(batch.mean, batch.M2 / batch.count, batch.count)
    state = {k: np.asarray(v).tolist() for k, v in stats.to_numpy()._asdict().items()}
    print("RESULT", json.dumps(state), flush=True)
except Exception as error:
    print("ERROR", type(error).__name__, error, flush=True)
    os._exit(3)  # a normal exit would wait for the others
"""


def launch(size: int, uneven: bool = False) -> list[tuple[int, str]]:
    """Exit status and output of every process; killed after a minute and a half."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, (rank, size, port, int(uneven)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        outputs = [worker.communicate(timeout=90)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(w.returncode, out) for w, out in zip(workers, outputs, strict=True)]


def test_two_processes_unite_their_moments_bit_for_bit():
    results = []
    for status, output in launch(2):
        assert status == 0, output
        line = next(v for v in output.splitlines() if v.startswith("RESULT"))
        results.append(json.loads(line.removeprefix("RESULT")))
    assert results[0] == results[1]
    x = [
        np.float32(1e4 + np.random.default_rng(rank).normal(size=(5 + rank, 3)))
        for rank in range(2)
    ]
    whole = np.concatenate(x).astype(np.float64)
    np.testing.assert_allclose(results[0]["mean"], whole.mean(0), rtol=1e-11)
    np.testing.assert_allclose(results[0]["var"], whole.var(0), rtol=5e-7)
    assert results[0]["count"] == 11


def test_processes_with_other_shapes_all_refuse():
    for status, output in launch(2, uneven=True):
        assert status == 3
        assert "ERROR ValueError The moments have the shapes" in output


@pytest.mark.parametrize("count", [0, 3])
def test_one_process_keeps_its_moments(count):
    batch = moments.from_batch(np.arange(2.0 * count).reshape(count, 2))
    out = distributed.all_reduce_processes(batch)
    assert float(out.count) == count
    np.testing.assert_array_equal(out.mean, batch.mean)
    np.testing.assert_array_equal(out.M2, batch.M2)
