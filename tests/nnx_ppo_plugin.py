# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts our Normalizer in the place of nnx-ppo's own.

nnx-ppo's whole test suite runs with it, 195 tests, in an environment that has the test
extra and, for five of its files, MuJoCo Playground:

    pip install -e '.[test]' playground==0.2.0 warp-lang==1.19.0
    PYTHONPATH=tests python -m pytest -p nnx_ppo_plugin -c /dev/null --pyargs nnx_ppo

With `NORMALIZER=theirs` in the environment it runs as it comes, to compare. It takes a
quarter of an hour on two cores, most of it for compiling: JAX_COMPILATION_CACHE_DIR and
JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 spare the second run some. nnx-ppo's dev
extra asks for warp-lang < 1.13, with which MuJoCo's MJX 3.17 can't be imported.
"""

import os
from typing import Any

from jaxtyping import install_import_hook

# As nnx-ppo's conftest does, but before its modules are imported below.
install_import_hook("nnx_ppo", "beartype.beartype")

import nnx_ppo.networks.normalizer as theirs  # noqa: E402
from nnx_ppo.networks.types import StatefulModule, StatefulModuleOutput  # noqa: E402

import nnx_norm  # noqa: E402


@StatefulModule.register
class Normalizer(nnx_norm.Normalizer):
    """Ours, for what asks isinstance: of it the recording of activations does, and of
    what it returns the hook above, where the recording hands that on.
    """

    def __call__(self, *args: Any) -> Any:
        return StatefulModuleOutput(**vars(super().__call__(*args)))


if os.environ.get("NORMALIZER") != "theirs":
    theirs.Normalizer = Normalizer


def pytest_report_header() -> str:
    """Names the class that is tested, and the one whose statistics it has."""
    bases = [c.__module__ for c in theirs.Normalizer.__mro__[:2]]
    return f"Normalizer from {' and '.join(bases)}"
