# SPDX-License-Identifier: Apache-2.0
"""How every test runs: eight devices, strict dtype promotion, hypothesis profiles."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# A plugin for another pytest process: imported here, for its docstrings, it would put
# our class in the place of nnx-ppo's in every test.
collect_ignore = ["nnx_ppo_plugin.py"]

# For this process and for those that tests start. Set JAX_PLATFORMS to run elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A plugin may have imported jax before this file, so the environment alone is too late.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# An example of a new shape compiles, so a deadline would measure the compiler.
_quiet = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("default", max_examples=30, **_quiet)
hypothesis.settings.register_profile("ci", max_examples=10, derandomize=True, **_quiet)
# The run of record: HYPOTHESIS_PROFILE=record pytest -n 2 tests/test_machine.py
hypothesis.settings.register_profile("record", max_examples=5000, **_quiet)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


@pytest.fixture
def x64_off() -> Iterator[None]:
    """For other libraries that mix dtypes when x64 is on, and raise."""
    with jax.enable_x64(False):
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves tests against packages of the extra `interop` to those who name them."""
    named = any("interop" in argument for argument in config.args)
    return True if collection_path.name == "interop" and not named else None


def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: each has a JAX of its own, so more than four cost more."""
    return min(os.cpu_count() or 1, 4)


def pytest_report_header() -> list[str]:
    """Names the stack, so that a log says what was tested."""
    import flax
    import numpy

    versions = f"jax {jax.__version__}, flax {flax.__version__}"
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return [f"stack: {versions}, numpy {numpy.__version__}, x64 {x64}"]
