# SPDX-License-Identifier: Apache-2.0
"""Speed of the forward pass [4096, 128] against the least that it can do.

All but `without a module` are modules whose state goes split into a `jax.jit`.

python -m benchmarks.bench_forward [--quick] [--json PATH] [--markdown PATH]
"""

from functools import partial

import jax

from benchmarks import bandwidth, command
from benchmarks.harness import Case
from benchmarks.peers import FORWARDS

SHAPES = [(4096, 128), (64, 17)]


def case(shape: tuple[int, int]) -> Case:
    """Every forward on one batch; read once, written once."""
    x = jax.random.normal(jax.random.key(0), shape) * 3 + 5
    contenders = {name: partial(make, x) for name, make in FORWARDS.items()}
    bounds = bandwidth.copiers(x)
    return Case(
        name="x".join(map(str, shape)),
        contenders=contenders | bounds,
        baseline="(x - m) * s",
        nbytes=2 * x.nbytes,
        bounds=list(bounds),
    )


def main() -> None:
    """Run from the command line."""
    args = command.timing_parser(__doc__).parse_args()
    args.rounds = args.rounds or (25 if args.quick else 301)
    command.run_cases(args, "Forward pass", [case(shape) for shape in SHAPES])


if __name__ == "__main__":
    main()
