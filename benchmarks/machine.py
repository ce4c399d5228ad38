# SPDX-License-Identifier: Apache-2.0
"""What ran: processor, cores, versions and load, for the head of every table."""

import importlib.metadata
import os
import platform
from pathlib import Path

import jax

PACKAGES = "nnx-norm jax jaxlib flax numpy nnx-ppo brax torch scikit-learn".split()


def processor() -> str:
    """Model name of the processor, with its family where the name says little."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    name = fields.get("model name", platform.machine())
    family = [fields.get(key) for key in ("cpu family", "model")]
    return f"{name} (family {family[0]}, model {family[1]})" if all(family) else name


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """Processes that wanted to run in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """Versions of what is installed among the contenders and below them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, object]:
    """All of it, ready for JSON."""
    device = jax.devices()[0]
    return {
        "processor": processor(),
        "cores": cores(),
        "load": load(),
        "device": f"{device.platform}: {device.device_kind}",
        "x64": jax.config.read("jax_enable_x64"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
    }
