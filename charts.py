"""Draw the charts of a run, or compare several runs.

uv run charts.py runs/a             draw the charts of one run again
uv run charts.py runs/a runs/b …    compare runs: charts under comparisons/, tables printed
uv run charts.py --power-law …      also fit a power law of loss against compute to the runs
"""

from rungs.common.command import run_command

import hashlib
import os
from pathlib import Path

import click

from rungs.charts import drawing
from rungs.charts.comparison_charts import draw_comparison
from rungs.charts.run_charts import draw_run
from rungs.common.errors import UserError
from rungs.run import evaluations, recorded_run
from rungs.run.folder import RunFolder, find_run
from rungs.run.metrics import METRICS_FILE
from rungs.run.recorded_run import RecordedRun


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--output-dir", type=click.Path(path_type=Path), help="Where to write the charts.")
@click.option("--style", "chart_style", type=click.Choice(drawing.STYLES), help="Chart style.")
@click.option(
    "--power-law",
    is_flag=True,
    help="Fit a power law of loss against compute to three or more RUNS.",
)
def main(
    runs: tuple[str, ...], output_dir: Path | None, chart_style: str | None, power_law: bool
) -> None:
    """Redraw the charts of one run, or compare several RUNS.

    A run is a folder, or the name of one under runs/. The charts of one run are written
    to its folder. Comparison charts are written under comparisons/, and tables are printed.
    """
    folders = list({(path := find_run(run)).resolve(): path for run in runs}.values())
    if len(folders) > 1 or power_law:
        _compare(folders, output_dir, chart_style, power_law)
        return
    written = draw_run(folders[0], output_dir, chart_style)
    if not written:
        raise UserError(_no_steps(folders[0]))
    for path in written:
        click.echo(path)


def _compare(
    folders: list[Path], output_dir: Path | None, chart_style: str | None, power_law: bool
) -> None:
    runs = recorded_run.load_runs(folders)
    empty = [folder for folder, run in zip(folders, runs, strict=True) if not len(run)]
    if empty:
        raise UserError("\n".join(map(_no_steps, empty)))
    output = output_dir or comparison_folder([folder.resolve().name for folder in folders])
    text = _draw_power_law(runs, output, chart_style) if power_law else ""
    for path in draw_comparison(runs, output, chart_style):
        click.echo(path)
    click.echo(f"\n{recorded_run.results_table(runs)}\n\n{recorded_run.differences_table(runs)}")
    named = {run.name: RunFolder(path) for run, path in zip(runs, folders, strict=True)}
    if scores := evaluations.scores_table(named):
        click.echo(f"\n{scores}")
    if len({str(run.config.train.dataset) for run in runs}) > 1:
        click.echo(
            "\nThese runs use different datasets, so their losses are not comparable; compare bits"
            " per byte: uv run evaluate.py RUN"
        )
    if text:
        click.echo(f"\n{text}")


def _draw_power_law(runs: list[RecordedRun], output_folder: Path, chart_style: str | None) -> str:
    """Draw the power law through the runs, and return it as text.

    Raises:
        UserError: no law fits, or its chart cannot be written.
    """
    # Counting parameters needs JAX, but no accelerator; JAX takes seconds to import.
    os.environ["JAX_PLATFORMS"] = "cpu"

    from rungs.charts.power_law_chart import power_law_chart
    from rungs.scaling.scaled_runs import ScaledRuns

    scaled = ScaledRuns.of(runs)
    with drawing.use_style(chart_style or runs[0].config.train.chart_style):
        written = drawing.write_all({"power-law-chart.png": power_law_chart}, scaled, output_folder)
    click.echo(written[0])
    return scaled.as_text()


def _no_steps(run_folder: Path) -> str:
    return f"{run_folder / METRICS_FILE}: no step recorded yet; nothing to draw"


def comparison_folder(names: list[str]) -> Path:
    """Return the default folder of a comparison, which differs for different runs."""
    joined = "+".join(names)
    if len(joined) > 80:
        digest = hashlib.sha256(joined.encode()).hexdigest()[:8]
        joined = f"{names[0][:40]}+{len(names) - 1}-more-{digest}"
    return Path("comparisons") / joined


if __name__ == "__main__":
    run_command(main)
