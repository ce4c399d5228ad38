# SPDX-License-Identifier: Apache-2.0
"""Running statistics as Flax NNX modules: exact, mergeable, read-only forward."""

from nnx_norm.modules import (
    Concat,
    Delay,
    Lift,
    Parallel,
    Sequential,
    StatefulModule,
    StatefulModuleOutput,
)
from nnx_norm.moments import Moments
from nnx_norm.normalizer import Normalizer
from nnx_norm.rewards import RewardNormalizer, RunningReturn
from nnx_norm.statistics import NormalizerStatistics

__all__ = [
    "Concat",
    "Delay",
    "Lift",
    "Moments",
    "Normalizer",
    "NormalizerStatistics",
    "Parallel",
    "RewardNormalizer",
    "RunningReturn",
    "Sequential",
    "StatefulModule",
    "StatefulModuleOutput",
]
