# SPDX-License-Identifier: Apache-2.0
"""The tests that nnx-ppo ships for its own Normalizer, passed by ours in its place."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PLUGIN = """
import nnx_ppo.networks.normalizer as theirs
from nnx_norm import Normalizer

{swap}


def pytest_report_header():
    name = theirs.Normalizer.__module__
    return "Normalizer from " + name
"""


def run(path: Path, swap: str, *options: str) -> str:
    """What pytest prints for their tests, with `swap` run before they are imported."""
    (path / "swapped.py").write_text(textwrap.dedent(PLUGIN.format(swap=swap)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "swapped",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--pyargs", "nnx_ppo.networks.normalizer_test", "--rootdir", str(path)]
    command += ["-c", os.devnull, "-v", *options]
    paths = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, env=environment, cwd=path, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr


def test_our_normalizer_passes_the_tests_of_the_one_it_replaces(tmp_path):
    output = run(tmp_path, "theirs.Normalizer = Normalizer")
    assert "Normalizer from nnx_norm.normalizer" in output, output
    passed = re.search(r"=+ (\d+) passed", output)
    assert passed and int(passed[1]) == 9, output
    assert not re.search(r"\d+ (failed|error|skipped|xfailed)", output), output


def test_the_swap_is_what_is_tested(tmp_path):
    broken = """
    class Broken(Normalizer):
        def update_statistics(self, rollout_extras, **settings):
            pass

    theirs.Normalizer = Broken
    """
    output = run(tmp_path, textwrap.dedent(broken), "-k", "pytree_update")
    assert re.search(r"=+ 1 failed", output), output
