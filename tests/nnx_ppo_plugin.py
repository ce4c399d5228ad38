# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts our Normalizer in the place of nnx-ppo's own.

nnx-ppo's whole test suite runs with it, in an environment that has nnx-ppo and, for
five of its files, MuJoCo Playground, by

    PYTHONPATH=tests python -m pytest -p nnx_ppo_plugin -c /dev/null --pyargs nnx_ppo

With `NORMALIZER=theirs` in the environment it runs as it comes, to compare.
"""

import os

from jaxtyping import install_import_hook

# As nnx-ppo's conftest does, but before its modules are imported below.
install_import_hook("nnx_ppo", "beartype.beartype")

import nnx_ppo.networks.normalizer as theirs  # noqa: E402
from nnx_ppo.networks.types import StatefulModule  # noqa: E402

from nnx_norm import Normalizer  # noqa: E402

if os.environ.get("NORMALIZER") != "theirs":
    theirs.Normalizer = Normalizer
    # For what asks isinstance: the hook above, and the recording of activations.
    StatefulModule.register(Normalizer)


def pytest_report_header() -> str:
    """Names the class that is tested."""
    return f"Normalizer from {theirs.Normalizer.__module__}"
