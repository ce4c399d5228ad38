# SPDX-License-Identifier: Apache-2.0
"""Statistics of other libraries in and out, and deployment without a normalizer.

Every importer takes an object of the other library, or its saved state, by its
attributes: none of these libraries is imported. It gives a module that normalizes as
the source does, to 1e-6, with the source's count: a `Normalizer` or `RewardNormalizer`
with the source's clip, or the module given as `into`, in place. What can't carry over
is said in each docstring. Every exporter gives plain NumPy arrays under the other
library's names.

Where libraries keep their divisor away from zero in different ways, see
`nnx_norm.conventions`: the importer folds theirs into the variance where it shows.

Example:
  >>> from nnx_norm import interop
  >>> saved = {"running_mean": [1.0], "running_variance": [4.0], "current_count": 10}
  >>> norm = interop.from_skrl(saved)
  >>> norm.count, norm.clip, interop.to_gymnasium(norm)["var"].tolist()
  (10, 5.0, [4.0])
"""

from nnx_norm.interop_gymnasium import (
    from_gymnasium,
    from_gymnasium_rewards,
    from_sb3,
    from_sb3_rewards,
    to_gymnasium,
    to_sb3,
)
from nnx_norm.interop_jax import (
    from_acme,
    from_brax,
    from_flax_batch_norm,
    from_nnx_ppo,
    to_acme,
    to_brax,
    to_flax_batch_norm,
    to_nnx_ppo,
)
from nnx_norm.interop_sklearn import from_sklearn, to_sklearn
from nnx_norm.interop_state_dicts import (
    running_mean_std_from_state_dict,
    running_mean_std_to_state_dict,
)
from nnx_norm.interop_torch import (
    from_rsl_rl,
    from_rsl_rl_rewards,
    from_skrl,
    from_torchrl,
    to_rsl_rl,
    to_skrl,
)
from nnx_norm.linear import fold_denormalize_into_linear, fold_into_linear

__all__ = [
    "fold_denormalize_into_linear",
    "fold_into_linear",
    "from_acme",
    "from_brax",
    "from_flax_batch_norm",
    "from_gymnasium",
    "from_gymnasium_rewards",
    "from_nnx_ppo",
    "from_rsl_rl",
    "from_rsl_rl_rewards",
    "from_sb3",
    "from_sb3_rewards",
    "from_sklearn",
    "from_skrl",
    "from_torchrl",
    "running_mean_std_from_state_dict",
    "running_mean_std_to_state_dict",
    "to_acme",
    "to_brax",
    "to_flax_batch_norm",
    "to_gymnasium",
    "to_nnx_ppo",
    "to_rsl_rl",
    "to_sb3",
    "to_sklearn",
    "to_skrl",
]
