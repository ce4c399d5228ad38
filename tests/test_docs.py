# SPDX-License-Identifier: Apache-2.0
"""The API reference: readable without a network, everything public in it."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import nnx_norm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nnx_norm"


def command() -> list[str]:
    """The documented command of the build, its braces written out as bash does."""
    found = re.search(r"^\.venv/bin/pdoc (.*)$", (ROOT / "README.md").read_text(), re.M)
    assert found
    words = []
    for word in found[1].split():
        start, _, inner = word.partition("{")
        names = inner.removesuffix("}").split(",") if inner else [""]
        words += [start + name for name in names]
    return words


def documented() -> list[str]:
    return [word for word in command() if word.startswith("nnx_norm")]


def test_the_package_names_every_module_of_the_reference():
    text = inspect.getdoc(nnx_norm) or ""
    assert set(re.findall(r"`(nnx_norm\.\w+)`", text)) == set(documented()[1:])
    for name in documented():
        assert inspect.getdoc(importlib.import_module(name))


def test_formulas_are_text_and_need_no_script():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "$" not in node.value, f"{path.name}: {node.value:.60}"
    assert "--math" not in command()


def test_the_build_has_every_member_and_no_warning(tmp_path: Path):
    words = [str(tmp_path) if w == "build/docs" else w for w in command()]
    run = subprocess.run(
        [sys.executable, "-m", "pdoc", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    page = (tmp_path / "nnx_norm.html").read_text()
    assert "url=./nnx_norm.html" in (tmp_path / "index.html").read_text()
    for name in nnx_norm.__all__:
        assert f'id="{name}"' in page
    for name in documented()[1:]:
        assert f'href="nnx_norm/{name.split(".")[1]}.html"' in page
    members = "__call__ to_dict load_dict freeze count std variance merge_from reset"
    for member in members.split():
        assert f'id="Normalizer.{member}"' in page
        assert member == "__call__" or f'id="RewardNormalizer.{member}"' in page
    for member in ("record_moments", "to_numpy", "normalize", "to"):
        assert f'id="RewardRunningMeanStd.{member}"' in page
    assert "MathJax" not in page and "https://cdn" not in page
