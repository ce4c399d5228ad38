# SPDX-License-Identifier: Apache-2.0
"""The README runs: its Python blocks, in order, print what the page says they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of the fenced blocks."""
    return BLOCK.findall(text)


def run(text: str) -> list[tuple[str, str]]:
    """Runs the Python blocks in one namespace; pairs of printed and promised output.

    A `text` block right after a `python` block is what that one prints.
    """
    found = blocks(text)
    names: dict[str, object] = {"__name__": "readme"}
    pairs = []
    for (language, code), (after, promised) in zip(
        found, [*found[1:], ("", "")], strict=True
    ):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "README.md", "exec"), names)
            pairs.append((printed.getvalue(), promised if after == "text" else ""))
    return pairs


@pytest.mark.usefixtures("x64_off")  # the layers of its models are float32
def test_readme_blocks_print_what_they_promise():
    pairs = run((ROOT / "README.md").read_text())
    assert pairs
    for printed, promised in pairs:
        assert printed == promised


def test_readme_check_sees_a_wrong_promise():
    (printed, promised), silent = run(
        "```python\nx = 1\nprint(x + 1)\n```\n\n```text\n3\n```\n\n"
        "```python\ny = x\n```\n"
    )
    assert (printed, promised) == ("2\n", "3\n")
    assert silent == ("", "")


def test_readme_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_figures_are_those_of_the_benchmarks():
    text, full = ((ROOT / p).read_text() for p in ("README.md", "benchmarks/README.md"))
    section = text.split("\n## Accuracy and speed\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    assert [row for row in rows if row not in full.splitlines()] == []


def test_readme_shows_the_picture_of_the_demo():
    text = (ROOT / "README.md").read_text()
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    head = (ROOT / picture).read_bytes()[:8]
    assert head == b"\x89PNG\r\n\x1a\n"
