# SPDX-License-Identifier: Apache-2.0
"""What libraries divide by: the ways in which an epsilon keeps it away from zero.

A variance that goes from one library to another is *fitted*: it stays as it is where
both divide by the same, to rounding, and becomes what makes the other divide by the
same where they differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

SAME = 3e-7
"""Relative difference of two divisors up to which a variance is left as it is."""

CLOSE = 1e-6
"""Relative difference of two divisors that is an error."""


@dataclasses.dataclass(frozen=True)
class Convention:
    """A way from a variance to a divisor, and back.

    Attributes:
      text: The formula, for messages.
      divisor: The divisor of a variance under an epsilon; float64 arrays.
      variance: The variance of a divisor; below zero where there is none.
    """

    text: str
    divisor: Callable[[Any, float], Any]
    variance: Callable[[Any, float], Any]

    def fitted(self, variance: Any, std: Any, epsilon: float, where: str) -> Any:
        """The variance of which this convention makes the divisor `std`.

        Args:
          variance: float64 array `[*feat]` that is kept where it fits.
          std: float64 array of that shape: the divisors to get.
          epsilon: The epsilon of this convention.
          where: What the statistics are called in messages.

        Returns:
          float64 array of that shape, not negative.

        Raises:
          ValueError: No variance gives one of the divisors.

        Example:
          >>> one, tiny = np.float64([1.0]), np.float64([1e-9])
          >>> FLOORED.fitted(one, np.sqrt(one + 1e-8), 1e-8, "a").tolist()
          [1.0]
          >>> FLOORED.fitted(tiny, np.sqrt(tiny + 1e-8), 1e-8, "b").round(12).tolist()
          [1.1e-08]
        """
        fits = np.abs(self.divisor(variance, epsilon) - std) <= SAME * std
        other = np.maximum(self.variance(std, epsilon), 0.0)
        fitted = np.where(fits, variance, other)
        off = np.abs(self.divisor(fitted, epsilon) - std) > CLOSE * std
        if np.any(off):
            raise ValueError(
                f"{where} would be divided by {self.text} with epsilon {epsilon:g}, "
                f"which can't be the {np.asarray(std)[off][0]:g} that it is divided by "
                f"now. Give an epsilon that is small beside it."
            )
        return fitted


ADDED_TO_VARIANCE = Convention(
    "sqrt(variance + epsilon)",
    lambda variance, epsilon: np.sqrt(variance + epsilon),
    lambda std, epsilon: std**2 - epsilon,
)

ADDED_TO_STD = Convention(
    "sqrt(variance) + epsilon",
    lambda variance, epsilon: np.sqrt(variance) + epsilon,
    lambda std, epsilon: np.maximum(std - epsilon, 0.0) ** 2,
)

FLOORED = Convention(
    "sqrt(max(variance, epsilon))",
    lambda variance, epsilon: np.sqrt(np.maximum(variance, epsilon)),
    lambda std, epsilon: std**2,
)

FLOORED_OR_ONE = Convention(
    "sqrt(max(variance, epsilon)), or 1 where the variance is 0",
    lambda variance, epsilon: np.where(
        variance == 0, 1.0, FLOORED.divisor(variance, epsilon)
    ),
    FLOORED.variance,
)
