"""Charts of one run. To add one, write a function and list it in `TRAINING_CHARTS`, in
`POLICY_CHARTS`, or for both kinds of runs in `STEP_CHARTS` of `step_charts.py`.

`python -m rungs.charts.run_charts RUN` draws them all for each line of its input, until an empty
line or the end; training runs that in a separate process. Comparisons of several runs are in
`comparison_charts.py`.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rungs.charts import drawing
from rungs.charts.loss_chart import loss_chart
from rungs.charts.policy_charts import POLICY_CHARTS
from rungs.charts.step_charts import STEP_CHARTS, AnySteps
from rungs.common.errors import reason
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
        return drawing.write_all(charts, run, output_folder or run_folder)


def main(run_folder: Path, lines: Iterable[str]) -> None:
    """Draw the charts of a run for each line, until an empty one."""
    for line in lines:
        if line == "\n":
            return
        try:
            draw_run(run_folder)
        except Exception as error:  # the next drawing may work
            print(f"not drawn: {reason(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # what is printed goes to the run's log: failures only
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.stdin)
