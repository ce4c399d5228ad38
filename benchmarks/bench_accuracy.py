# SPDX-License-Identifier: Apache-2.0
"""Accuracy of running statistics on streams that lose digits.

    python -m benchmarks.bench_accuracy [--quick] [--json PATH] [--markdown PATH]

Each cell: error of the mean in true standard deviations / relative error of the
variance, worst feature.
"""

import warnings
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import command, machine, report
from benchmarks.running import STATISTICS
from benchmarks.streams import Exact, Stream, exact, streams

Figures = dict[str, Any]


def feed(statistic: Any, stream: Stream) -> None:
    """Fold the whole stream."""
    if stream.prior is not None:
        statistic.preset(stream.prior)
    for batch in stream.batches():
        if not stream.one_row:
            statistic.update(batch)
        elif statistic.update_rows is not None:
            statistic.update_rows(batch)
        else:
            for row in batch:
                statistic.update(row[None])


def errors(statistic: Any, stream: Stream, truth: Exact) -> Figures:
    """How far the statistic is from the truth."""
    mean, variance, count = statistic.moments()
    out: Figures = {"count": count, "true_count": truth.count}
    spread = np.sqrt(truth.variance)
    if not spread.any():  # a constant feature has no unit to measure in
        last = list(stream.batches())[-1]
        worst = float(np.abs(statistic.normalize(last)).max())
        return out | {"variance": float(np.max(variance)), "worst_output": worst}
    out["mean_error"] = float(np.max(np.abs(mean - truth.mean) / spread))
    out["variance_error"] = float(np.max(np.abs(variance / truth.variance - 1)))
    if stream.prior is not None:
        moved = truth.mean - stream.prior.mean
        out["absorbed"] = float(np.mean((mean - stream.prior.mean) / moved))
    return out


def judge(name: str, stream: Stream, truth: Exact) -> Figures:
    """One cell."""
    try:
        statistic = STATISTICS[name]()
    except ImportError as error:
        return {"status": "not installed", "detail": str(error)}
    if stream.one_row and stream.prior is None and statistic.update_rows is None:
        return {"status": "not run"}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # overflow is what is measured
            feed(statistic, stream)
            return errors(statistic, stream, truth)
    except (TypeError, ValueError) as error:
        return {"status": "refused", "detail": str(error)}


def cell(figures: Figures) -> str:
    """The figures in a table's cell."""
    if "status" in figures:
        return figures["status"]
    if not figures["count"]:
        return "refused, nothing folded"
    if "worst_output" in figures:
        variance, output = (
            report.number(figures[k], 1) for k in ("variance", "worst_output")
        )
        return f"var {variance}, output {output}"
    text = " / ".join(
        report.number(figures[key], 1) if np.isfinite(figures[key]) else "lost"
        for key in ("mean_error", "variance_error")
    )
    if "absorbed" in figures:  # by how much the mean followed; 1 is right
        text += f", moved {figures['absorbed']:.2f}"
    short = figures["count"] / figures["true_count"]
    return text if abs(short - 1) < 1e-3 else f"{text}, {short:.0%} counted"


def main() -> None:
    """Run from the command line."""
    parser = command.parser(__doc__)
    parser.add_argument("--only", action="append", help="only this stream (repeat)")
    args = parser.parse_args()
    described = machine.describe()
    chosen = [s for s in streams(args.quick) if not args.only or s.name in args.only]
    results: dict[str, dict[str, Figures]] = {}
    turns = [(stream, name) for stream in chosen for name in STATISTICS]
    with tqdm(turns, disable=None, leave=False) as bar:
        truth: dict[str, Exact] = {}
        for stream, name in bar:
            bar.set_description(f"{stream.name} {name}")
            if stream.name not in truth:
                truth = {stream.name: exact(stream.batches(), stream.prior)}
            figures = judge(name, stream, truth[stream.name])
            results.setdefault(stream.name, {})[name] = figures
    rows = [
        [f"{s.name}: {s.about}", *(cell(results[s.name][n]) for n in STATISTICS)]
        for s in chosen
    ]
    table = report.table(["stream", *STATISTICS], rows)
    title = "Accuracy: error of the mean in standard deviations / of the variance"
    command.publish(args, title, [table], {"machine": described, "results": results})


if __name__ == "__main__":
    main()
