"""Charts of layers: what they draw, whatever the numbers."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import LogNorm

from rungs.commands.charts import charts
from rungs.report import layer_charts
from rungs.report.layer_charts import LAYER_CHARTS, LayeredRun, layered_runs
from rungs.report.run_charts import draw_run
from rungs.run import layer_record
from tests.support.recorded_layers import record_layers, statistics_of
from tests.support.recorded_runs import record_run, step

NAMES = sorted(LAYER_CHARTS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = record_run(tmp_path / "run", map(step, range(40)))
    record_layers(folder, range(0, 40, 10))
    return folder


def test_a_run_with_layers_has_their_charts(run: Path, tmp_path: Path) -> None:
    plain = record_run(tmp_path / "plain", map(step, range(40)))
    written = {path.name for path in draw_run(run)}
    assert {path.name for path in draw_run(plain)} == written - set(NAMES)
    assert set(NAMES) < written


def test_runs_are_compared_side_by_side(run: Path, tmp_path: Path) -> None:
    other = record_run(tmp_path / "other", map(step, range(40)))
    record_layers(other, [0, 5], layers=2, heads=1)
    no_layers = record_run(tmp_path / "none", map(step, range(40)))
    folders = tuple(map(str, (run, other, no_layers)))
    charts(folders, tmp_path / "out", None, False, None, False, None, False)
    assert set(NAMES) < {path.name for path in (tmp_path / "out").iterdir()}
    runs = layered_runs({"run": run, "other": other, "none": no_layers})
    figure = layer_charts.layers_chart(runs)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles[:2] == ["run: update ÷ weight", "other: update ÷ weight"]
    assert len(titles) == 2 * len(layer_charts.STATISTICS)


def test_colours_survive_outliers_and_steps_that_failed(run: Path) -> None:
    rows = layer_record.read(run / "layers.npy")
    assert rows is not None
    rows = np.concatenate([rows] * 30)
    rows["step"] = np.arange(len(rows))
    for value, place in ((np.nan, 1), (np.inf, 2), (1e30, 3), (0.0, 4)):
        rows["activations"]["residual"]["rms"][place] = value
    figure = layer_charts.layers_chart([LayeredRun("run", rows)])
    mesh = next(axes for axes in figure.axes if axes.get_title().startswith("residual")).collections
    low, high = mesh[0].get_clim()
    assert (low, high) == pytest.approx((1, 1.75), rel=1e-6)
    cells = mesh[0].get_array()
    assert cells is not None
    assert np.ma.getmaskarray(cells).any(axis=0).sum() == 2
    for draw in LAYER_CHARTS.values():
        draw([LayeredRun("run", rows)])


@pytest.mark.parametrize("steps", [[0], [3, 4]])
def test_few_steps_and_a_single_layer_are_drawn(tmp_path: Path, steps: list[int]) -> None:
    run = record_run(tmp_path / "run", map(step, range(5)))
    record_layers(run, steps, layers=1, heads=1)
    assert set(NAMES) < {path.name for path in draw_run(run)}


def test_a_model_without_some_parts_has_fewer_panels(tmp_path: Path) -> None:
    values = statistics_of(0, 3, 2)
    del values["heads"], values["dead_units"]
    layer_record.append(tmp_path / "layers.npy", layer_record.row_of(0, values))
    (run,) = layered_runs({"run": tmp_path})
    figure = layer_charts.layers_chart([run])
    assert len([axes for axes in figure.axes if axes.get_title()]) == 3


def test_scales_are_logarithmic_if_values_span_a_factor_of_ten() -> None:
    assert isinstance(layer_charts._norm([np.array([1.0, 20.0])]), LogNorm)
    assert not isinstance(layer_charts._norm([np.array([0.0, 0.0, 20.0])]), LogNorm)
    assert not isinstance(layer_charts._norm([np.array([1.0, 2.0])]), LogNorm)
    constant = layer_charts._norm([np.array([np.nan, 3.0])])
    assert constant.vmin == 3
    assert constant.vmax is not None
    assert constant.vmax > 3
