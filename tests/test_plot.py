# SPDX-License-Identifier: Apache-2.0
"""What is drawn of normalizers: the numbers of the module, in a file that opens."""

import runpy
import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.lines import Line2D

from nnx_norm import Normalizer, RunningMeanStd, Sequential, plot
from nnx_norm.plot import Recorder


def recorded(updates: int = 4) -> tuple[Recorder, Normalizer]:
    norm = Normalizer({"pos": 2, "wide": 9}, clip=1.0)
    model, recorder = Sequential([norm]), Recorder()
    rng = np.random.default_rng(0)
    for i in range(updates):
        x = {"pos": rng.normal(i, 1, (3, 4, 2)), "wide": rng.normal(0, 2, (3, 4, 9))}
        extras = [{k: jnp.asarray(v, jnp.float32) for k, v in x.items()}]
        model.update_statistics(extras)
        recorder.add(model, 12 * (i + 1), extras=extras)
    return recorder, norm


def curve(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xydata()).T


def test_points_are_the_statistics_of_their_time():
    recorder, norm = recorded()
    assert list(recorder.points) == ["layers/0/pos", "layers/0/wide"]
    last = recorder.points["layers/0/pos"][-1]
    np.testing.assert_array_equal(last.mean, norm.mean.get_value()["pos"])
    np.testing.assert_array_equal(last.std, norm.std["pos"])
    assert last.step == 48 and 0 < last.clipped < 1


def test_the_figure_shows_them(tmp_path: Path):
    recorder, norm = recorded()
    figure = recorder.figure(unit="samples", names={"layers/0/pos": ["x", "y"]})
    axes = {(i, a.get_title()): a for i, a in enumerate(figure.axes)}
    mean = axes[0, "layers/0/pos: mean ± std"]
    assert [line.get_label() for line in mean.lines] == ["x", "y"]
    x, y = curve(mean.lines[1])
    assert x.tolist() == [12, 24, 36, 48]
    assert y[-1] == float(norm.mean.get_value()["pos"][1])
    moved = axes[2, "drift since the point before; share clipped"].lines[0]
    means = [p.mean for p in recorder.points["layers/0/pos"]]
    last = recorder.points["layers/0/pos"][-1].std
    drift = np.max(np.abs(means[-1] - means[-2]) / last)
    np.testing.assert_allclose(curve(moved)[1][-1], drift)
    wide = axes[3, "layers/0/wide: mean of 9 features"].lines[0]
    median = np.median(norm.mean.get_value()["wide"])
    np.testing.assert_allclose(curve(wide)[1][-1], median)
    assert sum(a.get_xlabel() == "samples" for a in figure.axes) == 3
    figure.savefig(tmp_path / "normalizers.png", dpi=40)
    image = matplotlib.image.imread(tmp_path / "normalizers.png")
    assert image.std() > 0.05  # something was drawn


def test_one_point_a_constant_and_a_port_can_be_drawn(tmp_path: Path):
    recorder = Recorder()
    recorder.add(Normalizer(()), 0)
    recorder.figure().savefig(tmp_path / "one.png", dpi=40)
    recorder, stats = Recorder(), RunningMeanStd(2)
    for step in range(3):
        stats.record_moments(jnp.ones((4, 2)))
        recorder.add(stats, step)
    figure = recorder.figure()
    assert figure.axes[0].get_title() == "RunningMeanStd: mean ± std"
    figure.savefig(tmp_path / "port.png", dpi=40)


def test_nothing_recorded_is_told():
    with pytest.raises(ValueError, match="call add after an update first"):
        Recorder().figure()


def labels(axis: Axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels(which="both")]


def test_axes_are_labelled_and_no_legend_lies_over_a_line():
    recorder, _ = recorded()
    figure = recorder.figure()
    movement, share = figure.axes[2], figure.axes[-2]
    assert movement.get_ylabel() == "drift, in std"
    assert share.get_ylabel() == "clipped, % (dashed)"
    assert movement.get_legend() is None and share.get_legend() is None


def test_ticks_are_plain_numbers_on_narrow_and_on_wide_ranges():
    recorder, norm = Recorder(), Normalizer(2)
    for step, std in enumerate((0.95, 0.97, 0.99)):
        norm.set_statistics(float(step), std**2, 10)
        recorder.add(norm, step)
    assert recorder.figure().axes[1].get_yscale() == "linear"
    norm.set_statistics(9.0, np.array([1e-4, 1e6]), 10)
    recorder.add(norm, 3)
    figure = recorder.figure()
    figure.draw_without_rendering()
    wide = figure.axes[1]
    assert wide.get_yscale() == "log"
    for axes in figure.axes:
        assert not any("×" in text or "times" in text for text in labels(axes.yaxis))
    assert {"0.01", "1", "100"} & set(labels(wide.yaxis))


def test_no_drift_is_drawn_as_zero():
    recorder, norm = Recorder(), Normalizer(2, clip=1.0)
    norm.set_statistics(1.0, 4.0, 10)
    for step in range(3):
        recorder.add(norm, step, extras=jnp.ones((1, 1, 2)))
    figure = recorder.figure()
    for axes in (figure.axes[2], figure.axes[3]):
        (line,) = axes.lines
        assert not curve(line)[1].any()
        assert axes.get_ylim()[0] < 0 < axes.get_ylim()[1]


def test_names_that_fit_no_leaf_are_refused():
    recorder, _ = recorded(2)
    with pytest.raises(ValueError, match=r"'pos'; expected paths of leaves: \['layers"):
        recorder.figure(names={"pos": ["x", "y"]})
    for few in (["x"], "xy", ["x", "y", "z"]):
        with pytest.raises(ValueError, match="expected a list of 2 names"):
            recorder.figure(names={"layers/0/pos": few})


def test_another_model_is_refused_before_anything_is_recorded():
    recorder = Recorder()
    recorder.add(Normalizer({"a": 2, "b": 2}), 0)
    with pytest.raises(ValueError, match="b has 3 features, and had 2 at the point"):
        recorder.add(Normalizer({"a": 2, "b": 3}), 1)
    assert [len(points) for points in recorder.points.values()] == [1, 1]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nnx-norm\[plot\]'"):
        runpy.run_path(plot.__file__)
