# SPDX-License-Identifier: Apache-2.0
"""Whether statistics are numbers yet: neither traced by JAX nor mere shapes."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer


def refuse_shapes(values: Any, what: str) -> None:
    """Raise if values are shapes without numbers, as `nnx.eval_shape` makes them.

    Args:
      values: Tree of arrays.
      what: Who needs numbers, for the message.

    Raises:
      ValueError: They have none.

    Example:
      >>> refuse_shapes([1.0], "summary")
    """
    if any(isinstance(v, jax.ShapeDtypeStruct) for v in jax.tree.leaves(values)):
        raise ValueError(
            f"{what} needs numbers, and a model of nnx.eval_shape has shapes only: "
            "restore a checkpoint into it first, or make the model itself."
        )


def refuse_traced(values: Any, what: str) -> None:
    """Raise if values are no numbers on the host: shapes, or traced by jit.

    Args:
      values: Tree of arrays.
      what: Who needs numbers, for the message.

    Raises:
      ValueError: They are.

    Example:
      >>> refuse_traced([1.0], "summary")
    """
    refuse_shapes(values, what)
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(values)):
        raise ValueError(
            f"{what} needs numbers on the host, and inside jit, vmap or grad there are "
            "none: call it outside. nnx_norm.metrics works inside."
        )
