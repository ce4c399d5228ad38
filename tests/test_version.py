# SPDX-License-Identifier: Apache-2.0
"""The version, from a checkout, an installation and a bare copy."""

import importlib.metadata
import tomllib
from pathlib import Path

import nnx_norm
from nnx_norm.version import version_of

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_package_knows_its_version():
    version = tomllib.loads(PROJECT.read_text())["project"]["version"]
    assert nnx_norm.__version__ == version


def test_beside_a_checkout_what_is_installed_does_not_matter(tmp_path: Path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "numpy"\nversion = "0.0.7" # a comment\n')
    assert version_of(project, "numpy") == "0.0.7"


def test_otherwise_the_installation_is_asked(tmp_path: Path):
    project = tmp_path / "pyproject.toml"  # of something else that holds a copy
    project.write_text('[project]\nname = "other"\nversion = "0.0.7"\n')
    assert version_of(project, "numpy") == importlib.metadata.version("numpy")
    assert version_of(tmp_path / "none", "no-such-package-here") == "unknown"
