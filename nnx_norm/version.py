# SPDX-License-Identifier: Apache-2.0
"""The version of the package: that of pyproject.toml, by way of what installed it."""

import importlib.metadata
import re
from pathlib import Path


def version_of(project: Path, name: str) -> str:
    """The version of a package.

    Args:
      project: The pyproject.toml beside it, if it runs from a checkout: what is
        installed may be of another time.
      name: Its name, asked for otherwise.

    Returns:
      The version; "unknown" for a copy that nothing installed.

    Example:
      >>> version_of(Path("nowhere"), "numpy") == importlib.metadata.version("numpy")
      True
    """
    text = project.read_text(encoding="utf-8") if project.is_file() else ""
    if f'\nname = "{name}"' in text:
        if found := re.search(r'^version = "(.+?)"', text, re.MULTILINE):
            return found[1]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


__version__ = version_of(Path(__file__).parents[1] / "pyproject.toml", "nnx-norm")
