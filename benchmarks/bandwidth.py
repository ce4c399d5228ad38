# SPDX-License-Identifier: Apache-2.0
"""The bound: how fast this machine reads a buffer once, whatever is computed.

A plain C loop that adds up the words of a buffer, compiled when a benchmark starts. It
runs among the contenders, over the very buffers that they read.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SOURCE = r"""
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef struct { const uint64_t *start; size_t words; uint64_t sum; } Part;

static void *read_part(void *argument) {
  Part *part = argument;
  uint64_t sum[32] = {0};
  size_t i = 0;
  for (; i + 32 <= part->words; i += 32)
    for (int j = 0; j < 32; ++j) sum[j] += part->start[i + j];
  for (; i < part->words; ++i) sum[0] += part->start[i];
  for (int j = 0; j < 32; ++j) part->sum += sum[j];
  return 0;
}

uint64_t sweep(const void *buffer, size_t bytes, int threads) {
  Part part[64];
  pthread_t other[64];
  uint64_t total = 0;
  size_t words = bytes / 8, from = 0;
  if (threads > 64) threads = 64;
  for (int t = 0; t < threads; ++t) {
    size_t to = words * (size_t)(t + 1) / threads;
    part[t] = (Part){(const uint64_t *)buffer + from, to - from, 0};
    from = to;
  }
  for (int t = 1; t < threads; ++t)
    pthread_create(&other[t], 0, read_part, &part[t]);
  read_part(&part[0]);
  for (int t = 1; t < threads; ++t) pthread_join(other[t], 0);
  for (int t = 0; t < threads; ++t) total += part[t].sum;
  return total;
}
"""

Sweep = Callable[[int, int, int], int]


@functools.cache
def compile_sweep() -> Sweep | None:
    """Build the C loop with the system's compiler; None where there is none."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "sweep.c"), Path(folder, "sweep.so")
        source.write_text(SOURCE)
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        command = [compiler, *flags, "-o", str(library), str(source)]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        sweep = ctypes.CDLL(str(library)).sweep
    sweep.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    sweep.restype = ctypes.c_uint64
    return sweep


def readers(buffer: jax.Array) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Contenders that read a buffer once: one name, one way.

    On an accelerator the buffer is out of C's reach, and XLA's own sum stands in.
    """
    if jax.default_backend() != "cpu":
        return {"XLA sum": lambda: lambda: _device_sum(buffer)}
    view = np.asarray(buffer)  # shares the memory of the JAX array
    sweep = compile_sweep()
    if sweep is None:
        words = view.reshape(-1).view(np.uint8)
        words = words[: words.size // 8 * 8].view(np.uint64)
        return {"numpy sum (no C compiler found)": lambda: lambda: words.sum()}

    def reader(threads: int) -> Callable[[], Callable[[], Any]]:
        return lambda: lambda: sweep(view.ctypes.data, view.nbytes, threads)

    return {"C sweep, 1 thread": reader(1), "C sweep, 2 threads": reader(2)}


def copiers(buffer: jax.Array) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The same for what reads a buffer and writes one of its size."""
    if jax.default_backend() != "cpu":
        return {"XLA copy": lambda: lambda: _device_copy(buffer)}
    view = np.asarray(buffer)
    target = np.empty_like(view)
    return {"memory copy": lambda: lambda: np.copyto(target, view)}


_device_copy = jax.jit(lambda x: x + 1)
_device_sum = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
