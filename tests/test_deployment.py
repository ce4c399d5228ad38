# SPDX-License-Identifier: Apache-2.0
"""Policies where this package isn't: in NumPy, and exported, with JAX alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_norm import Normalizer, Sequential


def filled(shape: Any = 4, **settings: Any) -> Normalizer:
    norm = Normalizer(shape, **settings)
    rng = np.random.default_rng(0)
    for _ in range(2):
        noise = rng.normal(size=(8, 4, 4)) * [1e-3, 1.0, 300.0, 0.0]
        norm.update_statistics(np.float32(noise + [0.0, 1e4, -5.0, 3.3]))
    return norm


@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("seen", [True, False])
def test_the_lines_of_the_readme_reproduce_the_module_to_4_ulp(clip: Any, seen: bool):
    norm = filled(clip=clip) if seen else Normalizer(4, clip=clip)
    d = json.loads(json.dumps(norm.to_dict(), default=np.ndarray.tolist))
    d = {k: np.array(v) if isinstance(v, list) else v for k, v in d.items()}
    rng = np.random.default_rng(1)
    observation = d["mean"] + 2 * d["std"] * rng.normal(size=(100, 4))
    observation = np.float32(observation)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    start = readme.index('y = (observation - d["mean"])')
    names: dict[str, Any] = {"np": np, "d": d, "observation": observation}
    exec(readme[start : readme.index("print(y)", start)], names)
    y, module = names["y"], np.asarray(norm.normalize(observation), np.float64)
    ulp = np.spacing(np.abs(y).astype(np.float32))
    assert np.max(np.abs(module - y) / ulp) <= 4
    assert clip is None or not seen or np.abs(y).max() == clip


CODE = """
import importlib
import sys

for name in ("flax", "nnx_norm", "optax", "orbax"):
    sys.modules[name] = None  # as if it weren't installed: every import of it raises
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(name + " can be imported")

import numpy as np
import jax

policy = jax.export.deserialize(open(sys.argv[1], "rb").read())
print(np.asarray(policy.call(np.load(sys.argv[2]))).tolist())
"""


def test_exported_policy_runs_where_flax_cannot_be_imported(tmp_path: Path):
    rngs = nnx.Rngs(0)
    norm = filled(clip=1.5)
    policy = Sequential([norm, nnx.Linear(4, 2, rngs=rngs), jnp.tanh])

    def act(x: Any) -> jax.Array:
        return policy(policy.initialize_state(x.shape[0]), x).output

    (rows,) = jax.export.symbolic_shape("rows")
    spec = jax.ShapeDtypeStruct((rows, 4), jnp.float32)  # any number of rows
    exported = jax.export.export(jax.jit(act))(spec)
    d, noise = norm.to_dict(), np.random.default_rng(2).normal(size=(3, 4))
    x = np.float32(d["mean"] + 2 * d["std"] * noise)  # some of it beyond the clip
    assert np.abs(norm.normalize(x)).max() == 1.5
    (tmp_path / "policy").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "policy", "x.npy"],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    y = np.array(json.loads(done.stdout))
    assert y.shape == (3, 2) and np.ptp(y) > 0.5
    assert y == pytest.approx(np.asarray(act(x)), abs=1e-6)
