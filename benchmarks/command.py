# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common on the command line."""

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, report


def parser(description: str | None) -> argparse.ArgumentParser:
    """Flags that every benchmark has."""
    out = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    out.add_argument("--quick", action="store_true", help="small and few, a first look")
    out.add_argument("--json", metavar="PATH", help="write all figures as JSON")
    out.add_argument(
        "--markdown",
        metavar="PATH",
        help="write the tables; into README.md between this benchmark's markers",
    )
    return out


def timing_parser(description: str | None) -> argparse.ArgumentParser:
    """Flags of the benchmarks that take times."""
    out = parser(description)
    out.add_argument(
        "--rounds", type=int, help="samples of each contender (default 31)"
    )
    out.add_argument("--seed", type=int, default=0, help="of the order of the turns")
    out.add_argument("--only", action="append", help="only cases of this name (repeat)")
    return out


def publish(
    args: argparse.Namespace, title: str, tables: Sequence[str], figures: dict[str, Any]
) -> None:
    """Print the tables and write the files that were asked for."""
    section = Path(sys.argv[0]).stem
    described = figures["machine"]
    text = "\n\n".join(
        [f"{title} ({date.today()}). {report.machine_line(described)}", *tables]
    )
    print(text)
    if args.json:
        report.write_json(args.json, {"benchmark": section, "title": title} | figures)
    if args.markdown:
        report.write_markdown(args.markdown, section, text)


def run_cases(
    args: argparse.Namespace,
    title: str,
    cases: Sequence[harness.Case],
) -> dict[str, list[dict[str, Any]]]:
    """Measure the cases, print and write their tables."""
    described = machine.describe()
    rounds = args.rounds or (5 if args.quick else 31)
    chosen = [case for case in cases if not args.only or case.name in args.only]
    if not chosen:
        known = ", ".join(case.name for case in cases)
        raise SystemExit(f"--only {args.only}: no such case; there are {known}")
    results = {case.name: harness.measure(case, rounds, args.seed) for case in chosen}
    baseline = chosen[0].baseline
    tables = [report.details(name, rows) for name, rows in results.items()]
    if len(results) > 1:
        tables = [
            report.matrix(results, "speed", f"speed, in multiples of {baseline}'s"),
            report.matrix(results, "cpu_ratio", f"CPU time, {baseline} is 1"),
            "<details><summary>All figures</summary>",
            *tables,
            "</details>",
        ]
    figures = {"machine": described, "baseline": baseline, "rounds": rounds}
    publish(args, title, tables, figures | {"results": results})
    return results
