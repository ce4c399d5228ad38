# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a test and always ends: `launch("ranks:train", size=2)`.

A rank that dies or fails takes the others with it: `jax.distributed` lets them wait in
a collective or in the barrier at exit, for ever or until a heartbeat is missed. So a
rank that raises leaves by `os._exit`, which the others notice at once, and what is left
after `grace` seconds is killed. Run as a script this file is one rank.
"""

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FAILED = 3
"""Exit status of a rank whose program raised."""


class Rank(NamedTuple):
    """How one process ended.

    Attributes:
      status: Exit status, negative for a signal.
      output: What it wrote, both streams.
      seconds: When it ended, after the start of all.
      killed: Whether the launcher had to end it.
    """

    status: int
    output: str
    seconds: float
    killed: bool

    def results(self) -> dict[str, Any]:
        """What the rank told with `tell`, by name."""
        lines = (v for v in self.output.splitlines() if v.startswith("RESULT "))
        told = (json.loads(line.removeprefix("RESULT ")) for line in lines)
        return {name: value for name, value in told}


def tell(name: str, value: Any) -> None:
    """In a rank: hand a value that JSON knows to the test."""
    print("RESULT", json.dumps([name, value]), flush=True)


def launch(
    program: str,
    size: int,
    *arguments: str,
    devices: int = 1,
    timeout: float = 150.0,
    grace: float = 30.0,
) -> list[Rank]:
    """Run a function in several processes of `jax.distributed` on this machine.

    Args:
      program: `module:function` of this folder, called with rank, size and arguments.
      size: Number of processes.
      *arguments: Strings for the function.
      devices: Devices of each process.
      timeout: Seconds after which all that is left is killed.
      grace: Seconds for the others to end once one has failed.

    Returns:
      One `Rank` per process, in order.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    here = Path(__file__).resolve()
    # Nothing of the devices that the tests of one process have.
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("XLA", "JAX"))}
    path = os.pathsep.join([str(here.parent), str(here.parents[1])])
    mine |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    commands = [
        [sys.executable, str(here), program, *map(str, (rank, size, port, devices))]
        + [str(timeout), *arguments]
        for rank in range(size)
    ]
    return run(commands, environment=mine, timeout=timeout, grace=grace)


def run(
    commands: Sequence[Sequence[str]],
    *,
    environment: dict[str, str] | None = None,
    timeout: float,
    grace: float,
) -> list[Rank]:
    """Run commands side by side to their end, or end them.

    Args:
      commands: One per process.
      environment: Their environment; None is ours.
      timeout: Seconds after which all that is left is killed.
      grace: Seconds for the others to end once one has failed.

    Returns:
      One `Rank` per command, in order.
    """
    files = [tempfile.TemporaryFile() for _ in commands]  # a pipe could fill up
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, tuple[float, bool]] = {}
    deadline = start + timeout
    try:
        for command, file in zip(commands, files, strict=True):
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=file, stderr=subprocess.STDOUT
                )
            )
        while len(ended) < len(processes) and time.monotonic() < deadline:
            for i, process in enumerate(processes):
                if i not in ended and process.poll() is not None:
                    ended[i] = (time.monotonic() - start, False)
                    if process.returncode:
                        deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.05)
    finally:
        for i, process in enumerate(processes):
            if i not in ended:
                process.kill()
                process.wait()
                ended[i] = (time.monotonic() - start, True)
    ranks = []
    for i, (process, file) in enumerate(zip(processes, files, strict=True)):
        file.seek(0)
        ranks.append(Rank(process.returncode, file.read().decode(), *ended[i]))
        file.close()
    return ranks


def main(arguments: list[str]) -> None:
    """Be one rank; never come to an exit that waits for others."""
    program, timeout = arguments[0], float(arguments[5])
    rank, size, port, devices = map(int, arguments[1:5])
    faulthandler.dump_traceback_later(timeout, exit=True)  # if nobody kills us
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=size,
        process_id=rank,
        initialization_timeout=60,
        heartbeat_timeout_seconds=10,
    )
    module, function = program.split(":")
    try:
        getattr(importlib.import_module(module), function)(rank, size, *arguments[6:])
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
