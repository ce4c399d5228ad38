# SPDX-License-Identifier: Apache-2.0
"""Shapes out of saved states of every form, and what is loaded afterwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, traverse_util

from nnx_norm import RunningMeanStd
from nnx_norm import materialize_lazy_running_stats_from_state_dict as materialize


class Encoder(nnx.Module):
    """A lazy normalizer, one in a list, one of known width, and parameters."""

    def __init__(self, width: int | None = None):
        self.obs_norm = RunningMeanStd(width)
        linear: Any = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.layers = nnx.List([RunningMeanStd(width), linear])
        self.goal = RunningMeanStd(2)


X = jnp.asarray(np.random.default_rng(0).normal(3, 2, (7, 3)), jnp.float32)


@pytest.fixture
def trained() -> Encoder:
    model = Encoder()
    for _ in range(2):
        model.obs_norm.record_moments(X)
        model.layers[0].record_moments(2 * X)
        model.goal.record_moments(X[:, :2])
    return model


class Tensor:
    """As much of a tensor on another device, with a gradient, as needs be."""

    def __init__(self, array: Any, ready: int = 0):
        self.array, self.ready, self.shape = np.asarray(array), ready, np.shape(array)

    def detach(self) -> "Tensor":
        return Tensor(self.array, self.ready + 1)

    cpu = detach

    def numpy(self) -> np.ndarray:
        if self.ready < 2:
            raise RuntimeError("detach it and take it to the CPU first")
        return self.array


def pure(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(model))


def dotted(model: nnx.Module) -> dict[str, Any]:
    flat = traverse_util.flatten_dict(pure(model))
    return {".".join(map(str, path)): np.asarray(v) for path, v in flat.items()}


FORMS: dict[str, Callable[[nnx.Module], Any]] = {
    "State": nnx.state,
    "pure": pure,
    "numpy": lambda m: jax.tree.map(np.asarray, pure(m)),
    "dotted": dotted,
    "tensors": lambda m: {k: Tensor(v) for k, v in dotted(m).items()},
    "tuples": lambda m: traverse_util.flatten_dict(pure(m)),
    "shapes": lambda m: jax.eval_shape(lambda: pure(m)),
}


def same(a: nnx.Module, b: nnx.Module) -> None:
    jax.tree.map(np.testing.assert_array_equal, pure(a), pure(b))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_state_gives_the_shapes(trained: Encoder, form: Any):
    model = Encoder()
    materialize(model, form(trained))
    assert model.obs_norm.shape == model.layers[0].shape == (3,)
    same(model.obs_norm, RunningMeanStd(3))
    nnx.update(model, nnx.state(trained))
    same(model, trained)


@pytest.mark.parametrize("form", ["State", "pure", "numpy", "tuples"])
def test_nnx_update_fits_afterwards(trained: Encoder, form: str):
    model, state = Encoder(), FORMS[form](trained)
    materialize(model, state)
    if form == "tuples":
        state = traverse_util.unflatten_dict(state)
    nnx.update(model, state)
    for stats in (model.obs_norm, trained.obs_norm):
        stats.record_moments(X)
    same(model, trained)


def test_only_lazy_modules_whose_mean_is_there_are_touched(trained: Encoder):
    model = Encoder()
    model.goal.record_moments(5 * X[:, :2])
    before = jax.tree.map(np.asarray, pure(model))
    state = {k: v for k, v in dotted(trained).items() if not k.startswith("obs_norm")}
    materialize(model, state)
    assert model.obs_norm.is_lazy and not model.layers[0].is_lazy
    after = pure(model)
    for untouched in ("obs_norm", "goal"):
        jax.tree.map(np.testing.assert_array_equal, before[untouched], after[untouched])
    np.testing.assert_array_equal(
        before["layers"][1]["kernel"], after["layers"][1]["kernel"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal.mean": np.zeros(5)}, r"goal\.mean is saved .*\(5,\).*\(2,\)"),
        ({"layers.0.var": np.zeros(4)}, r"layers\.0\.mean .*\(3,\).*\(4,\)"),
    ],
)
def test_other_widths_are_refused_before_anything_changes(
    trained: Encoder, change: Any, message: str
):
    model = Encoder()
    state = dotted(trained) | {"goal.var": change.get("goal.mean", np.ones(2))} | change
    with pytest.raises(ValueError, match=message):
        materialize(model, state)
    assert model.obs_norm.is_lazy and model.layers[0].is_lazy


def test_state_that_is_no_mapping_is_refused():
    with pytest.raises(TypeError, match="mapping"):
        materialize(Encoder(), [np.zeros(3)])


def test_trees_of_shapes_and_a_feature_named_value():
    for tree in ({"a": {"b": jnp.ones((4, 2))}}, {"value": jnp.ones((4, 2))}):
        saved = RunningMeanStd()
        saved.record_moments(tree)
        model = RunningMeanStd()
        materialize(model, nnx.state(saved))
        assert model.shape == saved.shape
        nnx.update(model, nnx.state(saved))
        same(model, saved)
        flat = RunningMeanStd()
        materialize(flat, dotted(saved))
        assert flat.shape == saved.shape


def test_orbax_restores_a_lazy_module(tmp_path: Path, trained: Encoder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(trained))
        checkpointer.wait_until_finished()
        shapes = checkpointer.metadata(tmp_path / "state").item_metadata.tree
        for saved in (shapes, checkpointer.restore(tmp_path / "state")):
            model = Encoder()
            materialize(model, saved)
            state = checkpointer.restore(tmp_path / "state", nnx.state(model))
            nnx.update(model, state)
            same(model, trained)
            assert model.obs_norm.to_numpy().count == 15


def test_orbax_restores_into_a_shaped_template(tmp_path: Path, trained: Encoder):
    template = nnx.state(nnx.eval_shape(lambda: Encoder(3)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(trained))
        checkpointer.wait_until_finished()
        model = Encoder(3)
        nnx.update(model, checkpointer.restore(tmp_path / "state", template))
    same(model, trained)


def test_orbax_restores_into_an_abstract_module(tmp_path: Path, trained: Encoder):
    model = nnx.eval_shape(Encoder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(trained))
        checkpointer.wait_until_finished()
        saved = checkpointer.metadata(tmp_path / "state").item_metadata.tree
        materialize(model, saved)
        nnx.update(model, checkpointer.restore(tmp_path / "state", nnx.state(model)))
    same(model, trained)


def test_orbax_saves_what_was_never_called_and_restores_it_so(tmp_path: Path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(RunningMeanStd()))
        checkpointer.wait_until_finished()
        model = RunningMeanStd()
        state = checkpointer.restore(tmp_path / "state", nnx.state(model))
        materialize(model, checkpointer.restore(tmp_path / "state"))
    nnx.update(model, state)
    assert model.is_lazy and model.to_numpy().count == 1


def test_update_of_a_lazy_module_makes_it_ready(trained: Encoder):
    full = trained.obs_norm.to_numpy()
    for state in (pure(trained.obs_norm), full._asdict()):
        model = RunningMeanStd()
        nnx.update(model, state)
        assert model.shape == (3,)
        np.testing.assert_allclose(model(X), trained.obs_norm(X), rtol=1e-6)
        np.testing.assert_allclose(model.to_numpy().mean, full.mean, rtol=1e-15)


def test_float64_and_int64_of_numpy_are_read_exactly():
    mean, count = np.array([1 / 3, 1e5 / 7]), np.int64(2**40 + 1)
    model = RunningMeanStd(2)
    nnx.update(model, {"mean": mean, "var": np.array([0.1, 0.2]), "count": count})
    full = model.to_numpy()
    assert full.mean.tolist() == mean.tolist() and full.count == 2**40 + 1
    model.record_moments(jnp.ones((1, 2)))
    assert model.to_numpy().count == 2**40 + 2
    assert {v.dtype.name for v in jax.tree.leaves(nnx.state(model))} == {"float32"}


def test_residuals_of_another_state_do_not_belong(trained: Encoder):
    model = trained.obs_norm
    nnx.update(model, {"mean": jnp.full(3, 2.0**-12), "count": jnp.float32(7)})
    assert model.to_numpy().mean.tolist() == [2.0**-12] * 3
    assert model.to_numpy().count == 7
