"""Draw the charts of a run, or compare several runs.

uv run charts.py runs/a             draw the charts of one run again
uv run charts.py runs/a runs/b …    compare runs: charts under comparisons/, tables printed
uv run charts.py --power-law …      also fit a power law of loss against compute to the runs
uv run charts.py … --page FILE      one HTML page to look at runs and compare them, without network
uv run charts.py … --watch          the same page on 127.0.0.1, with new steps as the runs train
uv run charts.py runs/a --samples   what the run said to its sample_prompts, at each checkpoint
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any, get_args

import click

from rungs.config.option_values import ChartStyle


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--output-dir", type=click.Path(path_type=Path), help="Where to write the charts.")
@click.option(
    "--style", "chart_style", type=click.Choice(get_args(ChartStyle)), help="Chart style."
)
@click.option(
    "--power-law",
    is_flag=True,
    help="Fit a power law of loss against compute to three or more RUNS.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one HTML page with the curves, samples, keys and figures of all RUNS instead.",
)
@click.option(
    "--watch", is_flag=True, help="Serve that page on 127.0.0.1 and add steps as the runs train."
)
@click.option("--port", type=click.IntRange(0, 65535), help="With --watch: where to listen.")
@click.option(
    "--samples",
    "shows_samples",
    is_flag=True,
    help="Print what the RUNS said to their sample_prompts at each checkpoint instead.",
)
def main(**options: Any) -> None:
    """Redraw the charts of one run, or compare several RUNS.

    A run is a folder, or the name of one under runs/; a folder with runs in it stands for all that
    have taken a step. The charts of one run are written to its folder. Comparison charts are
    written under comparisons/, and tables are printed.
    """
    with importing():
        from rungs.commands.charts import charts
    charts(**options)


if __name__ == "__main__":
    run_command(main)
