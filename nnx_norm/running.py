# SPDX-License-Identifier: Apache-2.0
"""Ports of `RunningMeanStd` and `RewardRunningMeanStd`, for code that moves to JAX.

They keep the names, defaults and numbers of the PyTorch classes of that name in
ProtoMotions and its kin. Conventions differ between libraries:

| class | history is dropped | epsilon in the variance | fresh instance |
|---|---|---|---|
| `RunningMeanStd` | - | 1e-5, added | mean 0, var 1, count 1 |
| `RewardRunningMeanStd` | before the last reward (a) | 1e-5, added | var 1, count 1 |
| ProtoMotions' two | before the last reward (a, b) | 1e-5, added | var 1, count 1 |
| Gymnasium 1.4 | before the last reward (a, c) | 1e-8, added | var 1, count 1e-4 |
| Stable-Baselines3 2.9 | after the last reward (b) | 1e-8, added | var 1, count 1e-4 |
| `RewardNormalizer` | after the last reward | 1e-8, floor | divides by 1, count 0 |
| `Normalizer` | - | 1e-6, floor | mean 0, divides by 10, count 0 |

All of them divide rewards and centre none. The last reward is that of the step which
ends an episode, terminated or truncated.

(a) It leaks into the next episode, and only `terminated` counts: truncation drops
nothing.
(b) The running return is also lost with every checkpoint or pickle; here it is a
Variable.
(c) Its vector form also leaves out the step after an end, or in same-step mode starts
anew after an end of either kind.

A fresh Gymnasium or Stable-Baselines3 instance folds the first reward before it
divides. `RewardNormalizer` divides by 1 until two returns differ.
"""

from __future__ import annotations

from nnx_norm.combine import combine_moments
from nnx_norm.lazy import materialize_lazy_running_stats_from_state_dict
from nnx_norm.reward_running_mean_std import RewardRunningMeanStd
from nnx_norm.running_mean_std import RunningMeanStd

__all__ = [
    "RewardRunningMeanStd",
    "RunningMeanStd",
    "combine_moments",
    "materialize_lazy_running_stats_from_state_dict",
]
