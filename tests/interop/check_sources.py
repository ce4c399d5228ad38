# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Every importer with every other library's own objects: the right one is named."""

from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.decomposition
import sklearn.pipeline
import sklearn.preprocessing
import torch
from brax.training.acme import running_statistics as brax
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.utils import RunningMeanStd as GymnasiumRunningMeanStd
from rsl_rl.modules import (
    EmpiricalDiscountedVariationNormalization,
    EmpiricalNormalization,
)
from sklearn.preprocessing import StandardScaler
from skrl.resources.preprocessors.torch import RunningStandardScaler
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tensordict import TensorDict
from torchrl.envs.transforms import VecNorm

from nnx_norm import interop


@pytest.fixture(autouse=True)
def their_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
TENSOR = torch.from_numpy(X)


def pendulum(wrapper: Callable[..., Any]) -> Any:
    env = wrapper(gymnasium.make("Pendulum-v1"))
    env.reset(seed=0)
    for _ in range(3):
        env.step(env.action_space.sample())
    return env


def vec_normalize() -> Any:
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")]))
    env.reset()
    for _ in range(3):
        env.step(np.zeros((1, 1)))
    return env


def updated(module: Any) -> Any:
    module.update(TENSOR)
    return module


def scaled(module: Any, *arguments: Any, **settings: Any) -> Any:
    module(*arguments, **settings)
    return module


def vec_norm() -> Any:
    transform = VecNorm(in_keys=["observation"])
    transform._call(TensorDict({"observation": TENSOR}, batch_size=[20]))
    return transform


OBJECTS: dict[str, Callable[[], Any]] = {
    "from_gymnasium": lambda: pendulum(NormalizeObservation),
    "from_gymnasium_rewards": lambda: pendulum(NormalizeReward),
    "from_sb3": vec_normalize,
    "from_sklearn": lambda: StandardScaler().fit(X),
    "from_brax": lambda: brax.update(brax.init_state(jnp.zeros(3)), jnp.asarray(X)),
    "from_rsl_rl": lambda: updated(EmpiricalNormalization(3)),
    "from_rsl_rl_rewards": lambda: scaled(
        EmpiricalDiscountedVariationNormalization(shape=[]), TENSOR[:, 0]
    ),
    "from_skrl": lambda: scaled(RunningStandardScaler(3), TENSOR, train=True),
    "from_torchrl": vec_norm,
}
SAME = {"from_acme": "from_brax", "from_sb3_rewards": "from_sb3"}
IMPORTERS = [*OBJECTS, *SAME, "from_nnx_ppo", "from_flax_batch_norm"]


def read(importer: str, source: Any) -> Any:
    settings = {"count": 10} if importer == "from_flax_batch_norm" else {}
    return getattr(interop, importer)(source, **settings)


@pytest.mark.parametrize("library", OBJECTS)
def test_every_importer_takes_its_own_and_names_the_right_one(library: str):
    source = OBJECTS[library]()
    for importer in IMPORTERS:
        if SAME.get(importer, importer) == library:
            assert float(read(importer, source).count) > 0
            continue
        with pytest.raises(ValueError, match=rf"interop\.{library}\b"):
            read(importer, source)


def test_statistics_alone_are_gymnasiums_and_no_batch_norms():
    rms = GymnasiumRunningMeanStd(shape=(3,))
    with pytest.raises(ValueError, match=r"interop\.from_gymnasium\b"):
        read("from_flax_batch_norm", rms)
    assert float(read("from_gymnasium", rms).count) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "other",
    [
        sklearn.preprocessing.MinMaxScaler(),
        sklearn.preprocessing.MaxAbsScaler(),
        sklearn.preprocessing.RobustScaler(),
        sklearn.preprocessing.PowerTransformer(),
        sklearn.preprocessing.QuantileTransformer(n_quantiles=5),
        sklearn.decomposition.PCA(),
        sklearn.pipeline.make_pipeline(StandardScaler()),
    ],
    ids=lambda t: type(t).__name__,
)
def test_other_transformers_of_sklearn_are_refused(other: Any):
    with pytest.raises(ValueError, match=rf"{type(other).__name__} is no fitted Stan"):
        interop.from_sklearn(other.fit(X))


def test_bfloat16_states_of_torch():
    state = updated(EmpiricalNormalization(3)).bfloat16().state_dict()
    norm = interop.from_rsl_rl(state)
    assert norm.mean.get_value().tolist() == state["_mean"][0].tolist()
