# SPDX-License-Identifier: Apache-2.0
"""Time of the first update: tracing, lowering, compiling and one run.

python -m benchmarks.bench_compile [--quick] [--json PATH] [--markdown PATH]

Every call forgets what was compiled before. On CPU it is the number of different
kernels that counts, 10 to 15 ms each; the runs take less than one of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from benchmarks import command
from benchmarks.harness import Call, Case
from benchmarks.peers import UPDATES

SHAPES = [(20, 256, 128), (1000, 1, 8), (4, 16, 84, 84)]
COMPILED = ("nnx_norm", "nnx-ppo", "brax", "flax BatchNorm")


def compiled_anew(make: Callable[[jax.Array], Call], history: jax.Array) -> Call:
    """A call that compiles whatever it runs."""
    update = make(history)

    def call() -> Any:
        jax.clear_caches()
        return update()

    return call


def case(shape: tuple[int, ...]) -> Case:
    """All libraries that are compiled."""
    history = jax.random.normal(jax.random.key(0), shape)
    contenders = {
        name: partial(compiled_anew, UPDATES[name], history) for name in COMPILED
    }
    return Case("x".join(map(str, shape)), contenders, "nnx-ppo")


def main() -> None:
    """Run from the command line."""
    args = command.timing_parser(__doc__).parse_args()
    args.rounds = args.rounds or (3 if args.quick else 11)
    shapes = SHAPES[:1] if args.quick else SHAPES
    command.run_cases(args, "First call of the update", [case(s) for s in shapes])


if __name__ == "__main__":
    main()
