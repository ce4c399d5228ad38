# SPDX-License-Identifier: Apache-2.0
"""The Variables of running statistics: their types, and what a residual serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from flax import nnx
from jax.errors import TracerArrayConversionError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import bits, programs, statistics

from nnx_norm import (
    Normalizer,
    NormalizerStatistics,
    RewardNormalizer,
    RewardRunningMeanStd,
    RunningMeanStd,
    Sequential,
    place,
)

TREE = {"a": 2, "b": {"c": ()}}
KINDS = {
    "Normalizer": lambda: Normalizer(TREE),
    "RewardNormalizer": lambda: RewardNormalizer(0.5, shape=TREE, num_envs=2),
}
both = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


@both
def test_variables_are_float32_of_their_own_type(make):
    norm = make()
    found = nnx.state(norm, NormalizerStatistics)
    assert {"mean", "M2", "counter", "skipped"} < set(found)
    for name in ("mean", "M2"):
        value = getattr(norm, name).get_value()
        assert {k: v.shape for k, v in value.items() if k == "a"} == {"a": (2,)}
        assert value["b"]["c"].shape == ()
    assert norm.counter.get_value().shape == norm.skipped.get_value().shape == ()
    kinds = {(dtype, weak) for dtype, _, weak, _ in bits(norm).values()}
    assert kinds == {("float32", False)}
    assert not jax.tree.leaves(nnx.state(norm, nnx.Param))
    assert issubclass(NormalizerStatistics, nnx.Variable)
    assert not issubclass(NormalizerStatistics, (nnx.Param, nnx.BatchStat))


@both
def test_fresh_statistics_hold_no_invented_sample(make):
    norm = make()
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(nnx.state(norm)))
    assert norm.count == 0 and type(norm.count) is int


# A residual serves its own value only


def written_directly(name: str) -> Normalizer:
    """Statistics with a residual everywhere, then one Variable written."""
    norm = Normalizer(1)
    norm.set_statistics(np.array([1 / 3]), np.array([0.7]), 2**24 + 1)
    variable = getattr(norm, name)
    variable.set_value(jnp.full_like(variable.get_value(), 2.0**-40))
    return norm


@pytest.mark.parametrize(
    "name, key", [("mean", "mean"), ("M2", "M2"), ("counter", "count")]
)
def test_a_foreign_residual_counts_as_zero_wherever_it_is_read(name, key):
    norm = written_directly(name)
    plain = written_directly(name)
    rest = plain.residual.get_value()
    plain.residual.set_value({**rest, name: jnp.zeros_like(rest[name])})
    assert np.all(norm.to_dict()[key] == 2.0**-40)
    assert norm.count == plain.count
    x = jnp.array([[0.5], [2.0]])
    np.testing.assert_array_equal(norm.normalize(x), plain.normalize(x))
    np.testing.assert_array_equal(norm.denormalize(x), plain.denormalize(x))
    for n in (norm, plain):
        n.update_statistics(x[None])
    assert statistics(norm) == statistics(plain)
    copied = Normalizer(1)
    copied.copy_from(written_directly(name))
    assert statistics(copied)[2] == written_directly(name).count


def test_every_read_agrees_on_what_is_stored():
    norm = Normalizer(1)
    mean, variance, count = 1e6 + 1 / 3, 0.7, 2**24 + 1
    norm.set_statistics(np.array([mean]), np.array([variance]), count)
    d = norm.to_dict()
    assert d["mean"][0] == pytest.approx(mean, rel=2.0**-48)
    assert d["M2"][0] == pytest.approx(variance * count, rel=2.0**-48)
    assert norm.mean.get_value()[0] == np.float32(mean)
    assert norm.counter.get_value() == np.float32(count)


def test_statistics_that_were_set_go_with_a_history_on_a_mesh():
    mesh = Mesh(jax.devices(), "d")
    x = jax.device_put(
        jnp.ones((2, 8, 2)), NamedSharding(mesh, PartitionSpec(None, "d"))
    )
    for norm in (Normalizer(2), place(Normalizer(2), mesh)):
        norm.set_statistics(0.0, 1.0, 16)
        norm.update_statistics(x)
        assert norm.count == 32
        sharding = norm.mean.get_value().sharding
        norm.load_dict(norm.to_dict())
        assert norm.mean.get_value().sharding == sharding


def test_reading_and_writing_statistics_compiles_nothing():
    # Shapes that no other test has: what is compiled once isn't compiled again.
    norm, other = (Normalizer({"a": (3, 17), "b": 19}) for _ in range(2))
    with programs() as compiled:
        norm.set_statistics(1 / 3, 0.7, 2**24 + 1)
        other.load_dict(norm.to_dict())
        assert other.count == norm.count == 2**24 + 1
    assert compiled == []
    assert bits(norm) == bits(other)


def test_statistics_can_be_set_and_loaded_while_tracing():
    d = {"mean": np.array([1 / 3]), "M2": np.array([2 / 7]), "count": 7, "skipped": 1}
    expected, norm = Normalizer(1), Normalizer(1)
    expected.load_dict(d)

    @nnx.jit
    def load(norm, count):
        norm.load_dict(d)
        norm.set_statistics(np.array([1 / 3]), np.array([2 / 49]), count)

    load(norm, 7.0)
    assert statistics(norm)[0] == statistics(expected)[0]
    assert norm.to_dict()["M2"][0] == pytest.approx(2 / 7, rel=2.0**-48)
    assert norm.count == 7 and norm.to_dict()["skipped"] == 1


@both
def test_what_is_read_on_the_host_says_so_inside_jit(make):
    for read in (lambda norm: norm.count, lambda norm: norm.to_dict()):
        with pytest.raises(TracerArrayConversionError, match="outside of jit. Inside"):
            nnx.jit(read)(make())
    port = RunningMeanStd(2)
    with pytest.raises(TypeError, match="outside of jit. Inside, read `counter`"):
        nnx.jit(lambda port: port.to_numpy().count)(port)


@pytest.mark.parametrize("name", ["copy_from", "merge_from"])
def test_abstract_statistics_are_no_statistics(name):
    norm = Normalizer(2)
    before = bits(norm)
    abstract = nnx.eval_shape(lambda: Normalizer(2))
    with pytest.raises(TypeError, match="abstract.*nnx.eval_shape"):
        getattr(norm, name)(abstract)
    with pytest.raises(TypeError, match="abstract.*nnx.eval_shape"):
        abstract.to_dict()
    assert bits(norm) == before


# What a person sees of it


def seen(norm: Normalizer) -> Normalizer:
    """A normalizer of 3 features after 12 samples."""
    norm.update_statistics(jnp.ones((2, 6, 3)))
    return norm


PRINTED = {
    "Normalizer": (lambda: seen(Normalizer(3, clip=5.0)), "clip=5.0"),
    "tree": (lambda: Normalizer(TREE), "spec=Spec({a: (2,), b/c: ()})"),
    "RewardNormalizer": (lambda: RewardNormalizer(0.5, num_envs=1), "gamma=0.5"),
    "RunningMeanStd": (lambda: RunningMeanStd(3), "ema_decay=None"),
    "RunningMeanStd, lazy": (lambda: RunningMeanStd(), "ema_decay=None"),
    "RewardRunningMeanStd": (lambda: RewardRunningMeanStd((), gamma=0.5), "gamma=0.5"),
    "Sequential": (lambda: Sequential([Normalizer(3, clip=5.0)]), "clip=5.0"),
}
printed = pytest.mark.parametrize("make, setting", PRINTED.values(), ids=PRINTED.keys())
# Of numpy >= 2.5, where treescope looks at its classes.
treescope_runs = pytest.mark.filterwarnings("ignore:The chararray class")


def text_of(model: nnx.Module) -> str:
    """What `print` shows, once that and what treescope shows are known to be short."""
    text, name = repr(model), type(model).__name__
    assert text == str(model) and text.startswith(name)
    assert "residual" not in text and "tail" not in text
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) < 120
    notebook = treescope.render_to_text(model, ignore_exceptions=False)
    assert notebook.startswith(name) and "treedef" not in notebook
    return text


@printed
@treescope_runs
def test_repr_shows_class_and_settings_and_changes_nothing(make, setting):
    model = make()
    before = bits(model)
    assert setting in text_of(model)
    assert bits(model) == before


@printed
@treescope_runs
def test_repr_needs_no_values(make, setting):
    def look(model: nnx.Module) -> None:
        assert setting in text_of(model)

    model, members = make(), nnx.vmap(lambda _: make())(jnp.arange(2))
    for m in (nnx.eval_shape(make), members):
        look(m)
    nnx.jit(look)(model)
    nnx.vmap(look)(members)
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()  # as a donation does; flax alone raises on the scalars
    look(model)
    assert "<deleted>" in repr(model)


@treescope_runs
def test_repr_shows_the_count_and_of_arrays_the_shape():
    assert "Array(12., dtype=float32)" in text_of(seen(Normalizer(3)))
    assert "shape=(500, 400)" in text_of(Normalizer((500, 400)))


@treescope_runs
def test_repr_of_a_model_shows_a_shared_normalizer_once():
    norm = Normalizer(3)
    text = text_of(Sequential([norm, norm]))
    assert text.count("initial_std") == 1 and text.count("Normalizer(...)") == 1
