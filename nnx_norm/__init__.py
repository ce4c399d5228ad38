# SPDX-License-Identifier: Apache-2.0
"""Running statistics as Flax NNX modules: exact, mergeable, read-only forward.

What isn't here by name:

- `nnx_norm.interop`: statistics of other libraries in and out, deployment.
- `nnx_norm.plot`: pictures over training (extra `plot`).
- `nnx_norm.vector_env`: around Gymnasium vector environments (extra `gymnasium`).
- `nnx_norm.jax_env`: where episodes end in environments in JAX.
- `nnx_norm.moments`, `nnx_norm.extended`: the monoid, pure, and its precision.
- `nnx_norm.increments`: what workers send to a learner.
- `nnx_norm.distributed`: moments united over devices and processes.
- `nnx_norm.conventions`: how libraries keep a divisor away from zero.
- `nnx_norm.running`: the ports, for code that moves over.
"""

from nnx_norm.combine import combine_moments
from nnx_norm.distributed import all_reduce_processes
from nnx_norm.increments import Collector
from nnx_norm.inspection import metrics
from nnx_norm.interop import (
    running_mean_std_from_state_dict,
    running_mean_std_to_state_dict,
)
from nnx_norm.lazy import materialize_lazy_running_stats_from_state_dict
from nnx_norm.ledger import Ledger
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
from nnx_norm.placement import place
from nnx_norm.processes import global_arrays, local_arrays
from nnx_norm.restored import check_statistics
from nnx_norm.returns import RunningReturn
from nnx_norm.reward_running_mean_std import RewardRunningMeanStd
from nnx_norm.rewards import RewardNormalizer
from nnx_norm.running_mean_std import RunningMeanStd
from nnx_norm.statistics import NormalizerStatistics
from nnx_norm.table import summary
from nnx_norm.version import __version__ as __version__

__all__ = [
    "Collector",
    "Concat",
    "Delay",
    "Ledger",
    "Lift",
    "Moments",
    "Normalizer",
    "NormalizerStatistics",
    "Parallel",
    "RewardNormalizer",
    "RewardRunningMeanStd",
    "RunningMeanStd",
    "RunningReturn",
    "Sequential",
    "StatefulModule",
    "StatefulModuleOutput",
    "all_reduce_processes",
    "check_statistics",
    "combine_moments",
    "global_arrays",
    "local_arrays",
    "materialize_lazy_running_stats_from_state_dict",
    "metrics",
    "place",
    "running_mean_std_from_state_dict",
    "running_mean_std_to_state_dict",
    "summary",
]
