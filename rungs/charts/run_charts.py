"""Charts of one run. To add one, write a function and list it in `TRAINING_CHARTS`, in
`POLICY_CHARTS`, or for both kinds of runs in `STEP_CHARTS` of `step_charts.py`.

Training draws them in a separate process (`drawer.py`). Comparisons of several runs are in
`comparison_charts.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rungs.charts import drawing
from rungs.charts.loss_chart import loss_chart
from rungs.charts.policy_charts import POLICY_CHARTS
from rungs.charts.step_charts import STEP_CHARTS, AnySteps
from rungs.config.run_config import REINFORCE_FILE, config_files
from rungs.run.recorded_run import RecordedPolicyRun, RecordedRun

TRAINING_CHARTS: dict[str, Callable[[Any], Figure]] = {"loss-chart.png": loss_chart}


def draw_run(
    run_folder: Path, output_folder: Path | None = None, chart_style: str | None = None
) -> list[Path]:
    """Draw the charts of a run from its metrics and configs, and return the files written.

    Changes Matplotlib's settings for the whole process, so draw in one thread only.

    Args:
        output_folder: where to write the charts; the run folder if None.
        chart_style: one of `drawing.STYLES`; as `train.json` says if None.

    Returns:
        The files written; none if no step has been recorded yet.

    Raises:
        UserError: a config is wrong, or a chart cannot be written.
    """
    is_policy = config_files(run_folder)[1] == REINFORCE_FILE
    run: AnySteps = (RecordedPolicyRun if is_policy else RecordedRun).load(run_folder)
    if not len(run):
        return []
    charts = (POLICY_CHARTS if is_policy else TRAINING_CHARTS) | STEP_CHARTS
    with drawing.use_style(chart_style or run.config.train.chart_style):
        # A run folder that was deleted while its charts are drawn stays deleted.
        creates = output_folder is not None
        return drawing.write_all(charts, run, output_folder or run_folder, creates=creates)
