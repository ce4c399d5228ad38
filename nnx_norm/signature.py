# SPDX-License-Identifier: Apache-2.0
"""What `help` and notebooks show of how a module is made."""

from __future__ import annotations

import inspect
from typing import Any


class OfConstructor:
    """The signature of a class as its constructor has it, as `__signature__`.

    The metaclass of Flax's modules takes `(*args, **kwargs)`, which is what `help`
    would show. A descriptor, since subclasses have constructors of their own, and
    since their instances are called with something else.

    Example:
      >>> from flax import nnx
      >>> class Module(nnx.Module):
      ...     __signature__ = OfConstructor()
      ...     def __init__(self, shape, *, clip=None): ...
      >>> inspect.signature(Module)
      <Signature (shape, *, clip=None)>
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        """The signature for the class; an instance has none of it."""
        if instance is not None:
            raise AttributeError("__signature__")
        own = inspect.signature(owner.__init__)
        parameters = list(own.parameters.values())[1:]
        return own.replace(parameters=parameters, return_annotation=own.empty)
