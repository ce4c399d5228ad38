# SPDX-License-Identifier: Apache-2.0
"""What is drawn of normalizers: the numbers of the module, in a file that opens."""

from pathlib import Path

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from matplotlib.lines import Line2D

from nnx_norm import Normalizer, RunningMeanStd, Sequential
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
