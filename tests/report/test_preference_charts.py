"""The charts of a run that learns from preferences."""

from pathlib import Path
from typing import Any

import pytest

from rungs.report import run_charts
from rungs.report.preference_charts import PREFERENCE_CHARTS
from rungs.run.metrics import PreferenceFigures, StepMetrics
from rungs.run.recorded_run import RecordedRun
from tests.support.tiny_run import make_run


def make(folder: Path, with_reference: bool = True) -> Path:
    run = make_run(folder / "run", objective="dpo", start_from="runs/none", dataset="prefs")
    lines = []
    for step in range(12):
        kl = 0.1 * step if with_reference else None
        figures = PreferenceFigures(0.2 * step, 0.5 + step / 30, -1.0 - step, -2.0 - step, kl)
        metrics: dict[str, Any] = {"preferences": None if step == 3 else figures}
        if step % 5 == 0:
            metrics |= {"validation_loss": 0.6, "validation_preferences": figures}
        common = (step, 8 * step, 0.69, 0.01, 1.0, False, 0, 0.5, 16.0)
        lines.append(StepMetrics(*common, **metrics).as_line())
    run.metrics.write_text("".join(lines))
    return run.path


def test_each_figure_has_a_curve(tmp_path: Path) -> None:
    run = RecordedRun.load(make(tmp_path))
    (axes, *_) = PREFERENCE_CHARTS["answers-chart.png"](run).axes
    held_out = [line for line in axes.get_lines() if line.get_marker() == "s"]
    assert [line.get_ydata()[1] for line in held_out] == pytest.approx([-6.0, -7.0])  # type: ignore[index]
    assert axes.get_ylabel() == "nats per answer"


@pytest.mark.long
@pytest.mark.parametrize("with_reference", [True, False])
def test_all_charts_are_drawn(tmp_path: Path, with_reference: bool) -> None:
    written = {path.name for path in run_charts.draw_run(make(tmp_path, with_reference))}
    assert written >= {*PREFERENCE_CHARTS, "loss-chart.png"}
