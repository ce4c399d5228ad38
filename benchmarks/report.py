# SPDX-License-Identifier: Apache-2.0
"""Results on paper: Markdown tables, JSON, and the sections of README.md."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Results = dict[str, list[Row]]  # case name to its rows


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    rule = ["---", *["---:" for _ in head[1:]]]
    cells.insert(1, rule)
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def number(value: float | None, digits: int = 3) -> str:
    """A figure with as many significant digits as it deserves; a dash for none."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(places, 0)}f}"


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def details(case: str, rows: Sequence[Row]) -> str:
    """All figures of one case, a row per contender."""
    head = ["ms (quartiles)", "CPU ms", "speed", "CPU time", "GB/s", "of bound"]
    lines = []
    for row in rows:
        if "status" in row:
            lines.append([row["contender"], row["status"], *"-" * 7])
            continue
        low, high = map(number, row["wall_ms_quartiles"])
        share = row.get("share_of_bound")
        lines.append(
            [
                row["contender"],
                f"{number(row['wall_ms'])} ({low} - {high})",
                number(row["cpu_ms"]),
                f"{row['speed']:.2f}",
                f"{row['cpu_ratio']:.2f}",
                number(row.get("GB_per_s")),
                "-" if share is None else f"{share:.0%}",
                number(row["first_call_s"]),
                row["rounds"],
            ]
        )
    return table([case, *head, "first call s", "rounds"], lines)


def matrix(results: Results, key: str, title: str) -> str:
    """One figure of every contender and case, with the geometric mean of each row."""
    names = [row["contender"] for row in next(iter(results.values()))]
    lines = []
    for name in names:
        found = [
            next((r.get(key) for r in rows if r["contender"] == name), None)
            for rows in results.values()
        ]
        known = [value for value in found if value is not None]
        mean = f"{geometric_mean(known):.2f}" if len(known) == len(found) else "-"
        if not known:
            mean = "not installed"
        cells = ["-" if value is None else f"{value:.2f}" for value in found]
        lines.append([name, *cells, mean])
    return table([title, *results, "geometric mean"], lines)


def machine_line(machine: dict[str, Any]) -> str:
    """One line that says what ran."""
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    x64 = "x64 on" if machine["x64"] else "x64 off"
    return (
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} at "
        f"the start; {machine['device']}; {machine['system']}, Python "
        f"{machine['python']}, {versions}, {x64}."
    )


def write_json(path: str, content: dict[str, Any]) -> None:
    """All that was measured."""
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def write_markdown(path: str, section: str, text: str) -> None:
    """Into a file of its own, or between the section's markers where it has them."""
    target = Path(path)
    begin, end = f"<!-- begin {section} -->", f"<!-- end {section} -->"
    old = target.read_text() if target.exists() else ""
    block = f"{begin}\n\n{text}\n\n{end}"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if pattern.search(old):
        target.write_text(pattern.sub(lambda _: block, old))
    else:
        target.write_text(text + "\n")
