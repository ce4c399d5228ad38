# SPDX-License-Identifier: Apache-2.0
"""What each importer takes and refuses; the libraries: interop/check_sources.py."""

import types
from typing import Any

import numpy as np
import pytest
from flax import nnx

from nnx_norm import Normalizer, RewardNormalizer, RunningMeanStd, interop
from nnx_norm.sources import readers


def named(**fields: Any) -> Any:
    return types.SimpleNamespace(**fields)


ONE, FOUR = np.ones(2), np.full(2, 4.0)
RMS = {"mean": ONE, "var": FOUR, "count": 10.0}
RETURNS = {"mean": np.float64(1), "var": np.float64(4), "count": 10.0}
BRAX = {"mean": ONE, "std": FOUR / 2, "summed_variance": 10 * FOUR, "count": 10.0}
SKRL = {"running_mean": ONE, "running_variance": FOUR, "current_count": 10.0}
RSL = {"_mean": ONE[None], "_var": FOUR[None], "count": 10}
# Of each library, as its objects and its saved states are.
OBJECTS: dict[str, list[Any]] = {
    "from_gymnasium": [
        named(env=None, obs_rms=named(**RMS), epsilon=1e-8),
        named(**RMS),
        RMS,
    ],
    "from_gymnasium_rewards": [
        named(env=None, return_rms=named(**RETURNS), gamma=0.9, epsilon=1e-8)
    ],
    "from_sb3": [
        named(
            **{"obs_rms": named(**RMS), "ret_rms": named(**RETURNS), "gamma": 0.9},
            **{"clip_obs": 3.0, "clip_reward": 3.0, "epsilon": 1e-8, "venv": None},
        )
    ],
    "from_sklearn": [
        named(
            **{"mean_": ONE, "var_": FOUR, "scale_": FOUR / 2, "n_samples_seen_": 10},
            **{"with_mean": True, "with_std": True, "n_features_in_": 2},
        )
    ],
    "from_nnx_ppo": [{"mean": ONE, "M2": 10 * FOUR, "counter": 10.0}],
    "from_brax": [BRAX, named(**BRAX)],
    "from_rsl_rl": [RSL, named(_buffers=RSL, **RSL)],
    "from_rsl_rl_rewards": [
        {"emp_norm": {"_mean": ONE[:1], "_var": FOUR[:1], "count": 10}}
    ],
    "from_skrl": [SKRL, named(**SKRL)],
    "from_torchrl": [
        named(
            **{"loc": {"observation": ONE}, "scale": {"observation": FOUR / 2}},
            **{"_count": {"observation": 10}, "decay": 1.0, "eps": 1e-4},
        )
    ],
    "from_flax_batch_norm": [nnx.BatchNorm(2, rngs=nnx.Rngs(0))],
}
# Importers that read the same objects, to the same numbers.
SAME = {"from_acme": "from_brax", "from_sb3_rewards": "from_sb3"}
IMPORTERS = [*OBJECTS, *SAME]


def read(importer: str, source: Any) -> Any:
    settings = {"count": 10} if importer == "from_flax_batch_norm" else {}
    return getattr(interop, importer)(source, **settings)


@pytest.mark.parametrize("importer", IMPORTERS)
@pytest.mark.parametrize("library", OBJECTS)
def test_every_importer_takes_its_own_and_names_the_right_one(
    library: str, importer: str
):
    for source in OBJECTS[library]:
        if SAME.get(importer, importer) == library:
            assert float(read(importer, source).count) == 10
            continue
        with pytest.raises(ValueError, match=rf"interop\.{library}\b"):
            read(importer, source)


@pytest.mark.parametrize("importer", IMPORTERS)
@pytest.mark.parametrize(
    "source",
    [None, "checkpoint.pt", 3, ONE, (1, 2), [1], {}, object()],
    ids=lambda v: type(v).__name__,
)
def test_what_holds_no_statistics_is_a_value_error(importer: str, source: Any):
    with pytest.raises(ValueError, match=r"expected|has no|no fitted"):
        read(importer, source)


@pytest.mark.parametrize("importer", IMPORTERS)
def test_normalizers_of_ours_lose_no_digits_in_an_importer(importer: str):
    for ours in (Normalizer(2), RunningMeanStd(2), RewardNormalizer(0.9)):
        with pytest.raises(ValueError, match="of nnx_norm itself.*copy_from"):
            read(importer, ours)


def test_the_parameters_of_brax_are_told_apart_from_their_statistics():
    with pytest.raises(ValueError, match=r"tuple of 3; .* pass its element \[0\]"):
        interop.from_brax((BRAX, {"params": 1}, {"params": 2}))


OTHERS = {
    "MinMaxScaler": named(scale_=ONE, min_=ONE, n_samples_seen_=9, n_features_in_=2),
    "MaxAbsScaler": named(scale_=ONE, n_samples_seen_=9, n_features_in_=2),
    "RobustScaler": named(scale_=ONE, center_=ONE, with_centering=True),
    "PCA": named(mean_=ONE, n_samples_=9, n_features_in_=2, components_=ONE),
    "Pipeline": named(steps=[]),
    "unfitted": named(with_mean=True, with_std=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_transformers_of_sklearn_are_refused(name: str):
    with pytest.raises(ValueError, match="no fitted StandardScaler: it has no"):
        interop.from_sklearn(OTHERS[name])


@pytest.mark.parametrize(
    ("importer", "state"),
    [("from_rsl_rl", RSL), ("from_skrl", SKRL)],
)
def test_prefixes_of_state_dicts(importer: str, state: dict[str, Any]):
    function = getattr(interop, importer)
    saved = {f"actor.norm.{k}": v for k, v in state.items()}
    assert function(saved, "actor.norm.").count == 10  # the dot is no matter
    for wrong in ("", "norm", "actor"):
        with pytest.raises(ValueError, match=r"it has them at \['actor\.norm'\]"):
            function(saved, wrong)
    with pytest.raises(ValueError, match="no entry at the prefix 'norm'"):
        function({"weight": ONE}, "norm")
    with pytest.raises(ValueError, match="prefix 'norm' with a SimpleNamespace"):
        function(named(**state), "norm")


def test_readers_of_what_nobody_knows():
    assert readers(named(weight=ONE)) == readers({}) == readers(nnx.Rngs(0)) == set()


def test_wrappers_are_found_in_a_model_and_the_other_importer_is_named():
    (venv,) = OBJECTS["from_sb3"]
    model = named(env=named(venv=venv))  # as a PPO of Stable-Baselines3 has it
    assert interop.from_sb3(model).clip == interop.from_sb3_rewards(model).clip == 3.0
    unseen = named(**(vars(venv) | {"obs_rms": None}))
    del unseen.obs_rms
    with pytest.raises(
        ValueError, match=r"has no 'obs_rms'.*yet; interop\.from_sb3_re"
    ):
        interop.from_sb3(unseen)
    with pytest.raises(ValueError, match=r"use interop\.from_gymnasium\.$"):
        interop.from_sb3(named(**RMS))
