# SPDX-License-Identifier: Apache-2.0
"""Memory of a rollout with its update, for both kinds of extras, and of the update.

    python -m benchmarks.bench_memory [--quick] [--json PATH] [--markdown PATH]

The compiler's own account of the temporaries, and the peak that the system saw.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import bench_fold, command, machine, report
from nnx_norm import Normalizer

Figures = dict[str, Any]
MB = 1e6


def peak_of(run: Any) -> float | None:
    """Growth of the resident memory's peak while a function runs, in bytes."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not status.exists():
        return None

    def kilobytes(field: str) -> int:
        lines = [x for x in status.read_text().splitlines() if x.startswith(field)]
        return int(lines[0].split()[1])

    try:
        reset.write_text("5")  # forget the peak so far
    except OSError:
        return None
    before = kilobytes("VmRSS")
    jax.block_until_ready(run())
    return 1024.0 * (kilobytes("VmHWM") - before)


def account(function: Any, *args: Any) -> Figures:
    """Temporaries and results of the compiled function, and its measured peak."""
    compiled = jax.jit(function).lower(*args).compile()
    analysis: Any = compiled.memory_analysis()
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "peak_bytes": peak_of(lambda: compiled(*args)),
    }


def rollout(steps: int, environments: int, features: int, emit: str | None) -> Figures:
    """A scan over the steps of a toy environment, then one update.

    `emit` None leaves the normalizer out: what the rollout alone takes.
    """
    normalizer = Normalizer(features, emit=emit or "inputs")
    graphdef, state = nnx.split(normalizer)

    def train(state: Any, x: jax.Array, key: jax.Array) -> Any:
        module: Any = nnx.merge(graphdef, state)

        def step(x: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
            if emit is None:
                action, extras = x, None
            else:
                out = module((), x)
                action, extras = out.output, out.rollout_extras
            noise = jax.random.normal(key, x.shape)
            return 0.9 * x + 0.01 * action + noise, (action.mean(-1), extras)

        x, (rewards, extras) = jax.lax.scan(step, x, jax.random.split(key, steps))
        if emit is not None:
            module.update_statistics(extras)
        return nnx.state(module), x, rewards

    x = jnp.zeros((environments, features))
    return account(train, state, x, jax.random.key(0))


def update(shape: tuple[int, ...]) -> Figures:
    """The update alone; no temporary should have the size of the history."""
    graphdef, state = nnx.split(Normalizer(shape[2:]))

    def fold(state: Any, history: jax.Array) -> Any:
        module: Any = nnx.merge(graphdef, state)
        module.update_statistics(history)
        return nnx.state(module)

    history = jax.random.normal(jax.random.key(0), shape)
    figures = account(fold, state, history)
    figures["history_bytes"] = history.nbytes
    return figures | {"share": figures["temporary_bytes"] / history.nbytes}


def megabytes(value: float | None) -> str:
    """Bytes for a table."""
    return "-" if value is None else f"{value / MB:.2f}"


def main() -> None:
    """Run from the command line."""
    args = command.parser(__doc__).parse_args()
    described = machine.describe()
    size = (32, 256, 64) if args.quick else (128, 1024, 64)
    shapes = bench_fold.QUICK_SHAPES if args.quick else bench_fold.SHAPES
    modes = {
        "no normalizer": None,
        'emit="moments"': "moments",
        'emit="inputs"': "inputs",
    }
    rollouts = {name: rollout(*size, emit) for name, emit in modes.items()}
    updates = {"x".join(map(str, shape)): update(shape) for shape in shapes}
    keys = ["temporary_bytes", "peak_bytes"]
    head = f"rollout and update, {'x'.join(map(str, size))}"
    tables = [
        report.table(
            [head, "temporaries MB", "measured peak MB"],
            [[n, *(megabytes(f[k]) for k in keys)] for n, f in rollouts.items()],
        ),
        report.table(
            ["update alone", "history MB", "temporaries MB", "share", "peak MB"],
            [
                [
                    name,
                    megabytes(figures["history_bytes"]),
                    megabytes(figures["temporary_bytes"]),
                    f"{figures['share']:.2%}",
                    megabytes(figures["peak_bytes"]),
                ]
                for name, figures in updates.items()
            ],
        ),
    ]
    results = {"rollouts": rollouts, "updates": updates}
    command.publish(args, "Memory", tables, {"machine": described, "results": results})


if __name__ == "__main__":
    main()
