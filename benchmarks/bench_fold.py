# SPDX-License-Identifier: Apache-2.0
"""Speed of update_statistics: a history [T, B, *feat] into the running statistics.

python -m benchmarks.bench_fold [--quick] [--json PATH] [--markdown PATH]
"""

from functools import partial

import jax

from benchmarks import bandwidth, command
from benchmarks.harness import Case
from benchmarks.peers import UPDATES

SHAPES = [
    (32, 1024, 64),
    (20, 4096, 128),
    (128, 64, 17),
    (16, 2048, 348),
    (1000, 1, 8),
    (64, 16, 84, 84),
    (1000, 1024, 64),
]
QUICK_SHAPES = [(32, 1024, 64), (128, 64, 17), (1000, 1, 8)]


def case(shape: tuple[int, ...]) -> Case:
    """All libraries and the C sweep on one history of standard normal numbers."""
    history = jax.random.normal(jax.random.key(0), shape)
    bounds = bandwidth.readers(history)
    contenders = {name: partial(make, history) for name, make in UPDATES.items()}
    return Case(
        name="x".join(map(str, shape)),
        contenders=contenders | bounds,
        baseline="nnx-ppo",
        nbytes=history.nbytes,
        bounds=list(bounds),
    )


def main() -> None:
    """Run from the command line."""
    args = command.timing_parser(__doc__).parse_args()
    shapes = QUICK_SHAPES if args.quick else SHAPES
    command.run_cases(args, "Update of the statistics", [case(s) for s in shapes])


if __name__ == "__main__":
    main()
