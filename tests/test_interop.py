# SPDX-License-Identifier: Apache-2.0
"""The door to the statistics of other libraries."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from nnx_norm import interop

ROOT = Path(__file__).parents[1]
PEERS = (
    "acme brax gymnasium nnx_ppo rsl_rl skrl sklearn stable_baselines3 torch torchrl"
)


def test_door_leads_to_all_that_stands_behind_it():
    assert interop.__all__ == sorted(
        name
        for name, value in vars(interop).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    )
    imports = {name for name in interop.__all__ if name.startswith("from_")}
    exports = {name for name in interop.__all__ if name.startswith("to_")}
    rewards = {name for name in imports if name.endswith("_rewards")}
    other = rewards | {"from_torchrl"}
    assert {"from_" + name[3:] for name in exports} == imports - other


def test_no_other_library_is_imported():
    code = f"""
import sys
from nnx_norm import interop, Normalizer
norm = Normalizer(2)
norm.set_statistics(0.0, 1.0, 9)
interop.from_rsl_rl(interop.to_rsl_rl(norm))
interop.from_brax(interop.to_brax(norm))
print([name for name in {PEERS.split()} if name in sys.modules])
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
