# SPDX-License-Identifier: Apache-2.0
"""Share of a PPO step that normalization takes, in the demo's own training step.

python -m benchmarks.bench_ppo [--quick] [--json PATH] [--markdown PATH]
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command
from benchmarks.harness import Call, Case

VARIANTS = ("none", "obs", "reward", "obs+reward")


def step(variant: str, seeds: int) -> Call:
    """One training step of all seeds: rollout, epochs of minibatches, statistics."""
    from nnx_norm.examples.catalogue import make
    from nnx_norm.examples.training import Settings, new_learners, train_steps

    settings = Settings(seeds=seeds)
    static: dict[str, Any] = {
        "environment": make(settings.env),
        "hyper": settings.hyper(variant),
    }
    learners = [new_learners(jnp.arange(seeds), **static)]

    def call() -> Any:
        learners[0], metrics = train_steps(learners[0], **static)
        return learners[0], metrics

    return call


def alone(part: str, seeds: int) -> Call:
    """A part of the step by itself, on a history of the demo's shape."""
    from nnx_norm import Normalizer
    from nnx_norm.examples.learner import Hyperparameters

    hyper = Hyperparameters()
    shape = (seeds, hyper.horizon, hyper.environments, 2)
    history = jax.random.normal(jax.random.key(0), shape) * 3 + 5
    norms = jax.vmap(lambda _: Normalizer(2, clip=10.0))(jnp.arange(seeds))

    def update(norm: Normalizer, history: jax.Array) -> Normalizer:
        norm.update_statistics(history)
        return norm

    def forward(norm: Normalizer, history: jax.Array) -> jax.Array:
        return norm.normalize(history)

    run = jax.jit(jax.vmap(update if part == "update" else forward))
    return lambda: run(norms, history)


def case(seeds: int) -> Case:
    """Steps with and without normalization, and its parts alone."""
    steps = {v: partial(step, v, seeds) for v in VARIANTS}
    parts = {
        "one update alone": partial(alone, "update", seeds),
        "one pass over the rollout alone": partial(alone, "forward", seeds),
    }
    return Case(f"{seeds} seeds", steps | parts, "none")


def main() -> None:
    """Run from the command line."""
    args = command.timing_parser(__doc__).parse_args()
    command.run_cases(args, "A step of PPO", [case(1 if args.quick else 5)])


if __name__ == "__main__":
    main()
