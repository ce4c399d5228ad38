# SPDX-License-Identifier: Apache-2.0
"""Scalars about normalizers: found by path, right by NumPy, the same under jit."""

import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import bits

from nnx_norm import (
    Normalizer,
    Parallel,
    RewardNormalizer,
    RunningMeanStd,
    Sequential,
    metrics,
)
from nnx_norm.inspection import normalizers

T, B = 5, 4


class Agent(nnx.Module):
    def __init__(self):
        spec = {"goal": {"id": ()}, "pos": 3, "off": 2}
        observed = Normalizer(spec, clip=1.0, exclude=["off"])
        shared = Normalizer(3)
        heads = Parallel(actor=shared, critic=shared, value=jnp.negative)
        pick = Sequential([observed, lambda y: y["pos"], heads])
        self.policy, self.reward = pick, RewardNormalizer(0.9)
        self.value, self.lazy = RunningMeanStd(2), RunningMeanStd()


def history(seed: int = 0) -> dict:
    pos = np.random.default_rng(seed).normal(100, [1e-5, 1, 50], (T, B, 3))
    goal = np.full((T, B), 7, np.float32)
    return {"goal": {"id": jnp.asarray(goal)}, "pos": jnp.asarray(pos, jnp.float32)}


def extras_of(x: dict) -> list:
    return [x, None, {"actor": x["pos"], "critic": x["pos"], "value": None}]


def filled() -> Agent:
    agent = Agent()
    agent.policy.update_statistics(extras_of(history()))
    return agent


def test_every_normalizer_is_found_once():
    assert set(normalizers(Agent())) == {
        "policy/layers/0",
        "policy/layers/2/components/actor",
        "reward",
        "value",
        "lazy",
    }
    assert list(normalizers(Normalizer(2))) == [""]


def test_numbers_are_those_of_numpy():
    agent, x = filled(), history()
    m = metrics(agent.policy, extras=extras_of(x))
    pos = np.asarray(x["pos"], np.float64).reshape(-1, 3)
    var = pos.var(0)
    std = np.sqrt(np.maximum(var, 1e-6))
    right = {
        "count": T * B,
        "skipped": 0,
        "mean_min": pos.mean(0).min(),
        "mean_max": pos.mean(0).max(),
        "std_min": std.min(),
        "std_max": std.max(),
        "dead": 0,
        "floored": 1,
        "nonfinite": 0,
        "clipped": np.mean(np.abs(pos - pos.mean(0)) > std),
    }
    found = {k.removeprefix("layers/0/pos/"): v for k, v in m.items() if "/pos/" in k}
    assert found.keys() == right.keys() and 0 < right["clipped"] < 1
    for name, value in right.items():
        assert found[name].dtype == jnp.float32 and found[name].shape == ()
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    assert m["layers/0/goal/id/dead"] == m["layers/0/goal/id/floored"] == 1
    assert m["layers/2/components/actor/count"] == 2 * T * B  # what both branches saw


def test_before_any_sample_nothing_is_dead():
    m = metrics(Normalizer(2))
    assert (m["count"], m["dead"], m["floored"], m["std_max"]) == (0, 0, 0, 10)


def test_what_is_not_finite_is_counted():
    norm = Normalizer(2, nonfinite="propagate")
    norm.update_statistics(jnp.array([[[1.0, jnp.nan]]]))
    assert metrics(norm)["nonfinite"] == 1
    skipping = Normalizer(2)
    skipping.update_statistics(jnp.array([[[1.0, jnp.nan], [0.0, 0.0]]]))
    m = metrics(skipping)
    assert (m["nonfinite"], m["skipped"], m["count"]) == (0, 1, 1)


@pytest.mark.parametrize("form", ["nested", "flat", "json", "by path"])
def test_drift_is_in_standard_deviations_of_now(form):
    norm = Normalizer({"a": 2, "10": (), "9": ()})
    norm.set_statistics(1.0, 4.0, 10)
    since = norm.to_dict(flat=form == "flat")
    if form == "json":
        since = json.loads(json.dumps(since, default=np.ndarray.tolist))
    model = Sequential([norm]) if form == "by path" else norm
    at = "layers/0/" if form == "by path" else ""
    mean = {"a": np.array([1.0, 7.0]), "10": 1.0, "9": -1.0}
    norm.set_statistics(mean, 9.0, 10)
    m = metrics(model, since={"layers/0": since} if at else since)
    drift = {key: float(m[f"{at}{key}/drift"]) for key in ("a", "10", "9")}
    assert drift == pytest.approx({"a": 2.0, "10": 0.0, "9": 2 / 3})


def test_drift_since_a_clone_is_that_since_its_dicts_and_needs_no_host():
    agent, x = filled(), history(1)

    @nnx.jit
    def update(policy: Sequential, extras: list) -> dict:
        before = nnx.clone(policy)
        policy.update_statistics(extras)
        return metrics(policy, since=before)

    old = {path: n.to_dict() for path, n in normalizers(agent.policy).items()}
    found = update(agent.policy, extras_of(x))
    right = metrics(agent.policy, since=old)
    drifts = [name for name in right if name.endswith("drift")]
    assert len(drifts) == 3 and float(right["layers/0/pos/drift"]) > 0
    assert found.keys() == right.keys()
    for name in drifts:
        np.testing.assert_allclose(found[name], right[name], rtol=1e-6, err_msg=name)


def test_drift_since_a_clone_that_had_no_shape_is_unknown():
    stats = RunningMeanStd()
    before = nnx.clone(stats)
    stats.record_moments(jnp.ones((4, 2)))
    assert metrics(stats, since=before).keys() == metrics(stats).keys()
    assert "drift" in metrics(stats, since=nnx.clone(stats))


def test_drift_of_a_port():
    stats = RunningMeanStd(2, epsilon=0, initial_count=0)
    stats.update_from_moments(0.0, 4.0, 10)
    since = stats.to_numpy()._asdict()
    stats.update_from_moments(np.array([4.0, 0.0]), 4.0, 10)
    m = metrics(stats, since=since)
    assert float(m["drift"]) == pytest.approx(2 / np.sqrt(8))


def test_under_jit_one_trace_gives_the_same_and_writes_nothing():
    agent, x = filled(), history(1)
    before, since = bits(agent), {"layers/0": Agent().policy.layers[0].to_dict()}

    @chex.assert_max_traces(1)
    def logged(policy: Sequential, extras: list) -> dict:
        return metrics(policy, extras=extras, since=since)

    # Plain jax.jit would untie what two branches share.
    compiled: Any = nnx.jit(logged)
    for _ in range(2):
        found = compiled(agent.policy, extras_of(x))
    right = metrics(agent.policy, extras=extras_of(x), since=since)
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert bits(agent) == before


def test_a_population_gives_the_extremes_or_each_its_own():
    make = nnx.vmap(lambda _: Normalizer(2))
    norm = make(jnp.arange(3))
    mean = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 9.0]])
    norm.set_statistics(mean, 1.0, np.array([5, 6, 7]))
    m = metrics(norm)
    assert (m["count"], m["mean_max"], m["mean_min"]) == (5, 9, 0)
    each = nnx.vmap(lambda n: metrics(n))(norm)
    assert each["mean_max"].tolist() == [1, 3, 9]
    assert each["count"].tolist() == [5, 6, 7]


def test_moments_have_no_share_beyond_the_clip():
    norm = Normalizer(2, clip=1.0, emit="moments")
    out = jax.vmap(lambda x: norm((), x).rollout_extras)(jnp.ones((T, B, 2)))
    norm.update_statistics(out)
    assert "clipped" not in metrics(norm, extras=out)


def test_what_does_not_fit_is_refused():
    norm = Normalizer(2)
    with pytest.raises(ValueError, match=r"since has \['nope'\]; expected paths"):
        metrics(Sequential([norm]), since={"nope": norm.to_dict()})
    with pytest.raises(ValueError, match="mean"):
        metrics(norm, since=Normalizer(3).to_dict())
    with pytest.raises(ValueError, match=r"a mean \(3,\) at ''; expected \(2,\)"):
        metrics(norm, since=Normalizer(3))
    with pytest.raises(ValueError, match=r"since has \[''\]; expected paths"):
        metrics(Sequential([norm]), since=norm)
    with pytest.raises(ValueError, match="since is list"):
        metrics(norm, since=[1])
    with pytest.raises(ValueError, match="a list of 2"):
        metrics(Sequential([norm]), extras=[None, None])


class Own(nnx.Module):
    def __init__(self, policy: Any):
        self.policy = policy


def test_share_beyond_the_clip_in_a_module_of_ones_own():
    norm = Normalizer(2, clip=0.5)
    x = jnp.array([[[0.0, 5.0], [2.0, 5.0]]])
    norm.update_statistics(x)
    agent = Own(Sequential([norm]))
    for extras in ([x], {"policy": [x]}, {"policy/layers/0": x}):
        assert metrics(agent, extras=extras)["policy/layers/0/clipped"] == 0.5


def test_extras_of_another_shape_are_named():
    norm = Normalizer(2, clip=1.0)
    for bad in (jnp.ones((T, B, 3)), jnp.ones(())):
        with pytest.raises(
            ValueError, match=r"extras of layers/0 has shape .*expected"
        ):
            metrics(Sequential([norm]), extras=[bad])
    with pytest.raises(ValueError, match="extras has shape"):
        metrics(Normalizer(2), extras=jnp.ones((T, B, 3)))  # no clip to ask for
    many = nnx.vmap(lambda _: Normalizer(2, clip=1.0))(jnp.arange(3))
    x = jnp.ones((3, T, B, 2))
    with pytest.raises(ValueError, match=r"extras are those of a population \(3,\)"):
        metrics(many, extras=x)
    each = nnx.vmap(lambda n, x: metrics(n, extras=x))(many, x)
    assert each["clipped"].shape == (3,)
