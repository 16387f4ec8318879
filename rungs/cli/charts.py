"""Redraw the charts of a run, compare runs, or show the page of runs."""

from rungs.common.command import importing

import contextlib
import hashlib
import os
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from rungs.common.errors import UserError
from rungs.config.option_values import ChartStyle

if TYPE_CHECKING:
    from rungs.run.recorded_run import RecordedRun


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
    "--table",
    "table_format",
    type=click.Choice(["markdown", "latex", "csv"]),
    help="Print a table of the RUNS instead; those that differ only in their seeds are one row.",
)
@click.option(
    "--samples",
    "shows_samples",
    is_flag=True,
    help="Print what the RUNS said to their sample_prompts at each checkpoint instead.",
)
def main(
    runs: tuple[str, ...],
    output_dir: Path | None,
    chart_style: str | None,
    power_law: bool,
    page: Path | None,
    watch: bool,
    port: int | None,
    table_format: str | None,
    shows_samples: bool,
) -> None:
    """Redraw the charts of one run, or compare several RUNS.

    A run is a folder, or the name of one under runs/; a folder with runs in it stands for all that
    have taken a step. The charts of one run are written to its folder. Comparison charts are
    written under comparisons/, and tables are printed.
    """
    with importing():
        from rungs.run.folder import find_run, runs_in

    found = [path for run in runs for path in runs_in(run) or [find_run(run)]]
    folders = list({path.resolve(): path for path in found}.values())
    if port is not None and not watch:
        raise UserError("--port: needs --watch")
    of_charts = power_law or output_dir or chart_style
    prints = [option for option in (table_format, shows_samples) if option]
    if len(prints) > 1 or (prints and (page or watch or of_charts)):
        raise UserError("--table and --samples: go with no other option")
    if (page or watch) and of_charts:
        raise UserError("--page and --watch: go with no option of the other charts")
    if table_format:
        click.echo(_table(folders, table_format))
    elif shows_samples:
        _print_samples(folders)
    elif page or watch:
        _show_page(folders, page, watch, port)
    elif len(folders) > 1 or power_law:
        _compare(folders, output_dir, chart_style, power_law)
    else:
        from rungs.report.run_charts import draw_run  # Matplotlib takes half a second to import

        written = draw_run(folders[0], output_dir, chart_style)
        _refuse_without_steps(folders, [written])
        click.echo("\n".join(map(str, written)))


def _show_page(folders: list[Path], page: Path | None, watch: bool, port: int | None) -> None:
    """Write the page, serve it, or both."""
    from rungs.common import paths
    from rungs.report.run_page import PageServer, open_runs, write_page

    runs = open_runs(folders)
    if not watch:
        _refuse_without_steps(folders, [run.steps for run in runs])
    if page is not None:
        paths.refuse_other_content(page, b"<!doctype html>", "a page")
        write_page(page, runs)
        click.echo(page)
    if watch:
        with PageServer(runs, port or 0) as server, contextlib.suppress(KeyboardInterrupt):
            click.echo(f"{server.address} (Ctrl-C ends it)")
            server.serve_forever()


def _table(folders: list[Path], table_format: str) -> str:
    from rungs.experiments import table
    from rungs.experiments.loose_runs import outcomes_of_runs

    formats = {"markdown": table.as_markdown, "latex": table.as_latex, "csv": table.as_csv}
    experiment, outcomes = outcomes_of_runs(folders)
    return formats[table_format](experiment, table.rows(experiment, outcomes)).rstrip()


def _print_samples(folders: list[Path]) -> None:
    from rungs.run import records
    from rungs.run.folder import RunFolder

    for folder in folders:
        found = records.read_samples(RunFolder(folder))
        if not found:
            raise UserError(
                f"{folder}: no samples yet; a run with sample_prompts in its train.json has them at"
                " each checkpoint, and one that learns from rewards has its samples.md"
            )
        if len(folders) > 1:
            click.echo(f"\n{folder}")
        click.echo(records.samples_as_text(found))


def _compare(
    folders: list[Path], output_dir: Path | None, chart_style: str | None, power_law: bool
) -> None:
    from rungs.report.comparison_charts import draw_comparison
    from rungs.run import recorded_run, records
    from rungs.run.folder import RunFolder

    kinds = {recorded_run.kind_of(folder) for folder in folders}
    if len(kinds) > 1:
        raise UserError(
            "some of these runs learn from rewards, others don't; compare runs of one kind, or look"
            " at all with --page"
        )
    runs = kinds.pop().load_all(folders)
    _refuse_without_steps(folders, runs)
    output = output_dir or comparison_folder([folder.resolve().name for folder in folders])
    training = [run for run in runs if isinstance(run, recorded_run.RecordedRun)]
    text = _draw_power_law(training, output, chart_style) if power_law else ""
    for path in draw_comparison(runs, output, chart_style):
        click.echo(path)
    click.echo(f"\n{recorded_run.results_table(runs)}\n\n{recorded_run.differences_table(runs)}")
    named = {run.name: RunFolder(path) for run, path in zip(runs, folders, strict=True)}
    if scores := records.scores_table(named):
        click.echo(f"\n{scores}")
    if recorded_run.use_different_datasets([run.config for run in runs]):
        click.echo(f"\n{recorded_run.DIFFERENT_DATASETS}")
    if text:
        click.echo(f"\n{text}")


def _draw_power_law(runs: "list[RecordedRun]", output_folder: Path, chart_style: str | None) -> str:
    """Draw the power law through the runs, and return it as text. Raises UserError if no law fits,
    or its chart cannot be written."""
    # Counting parameters needs JAX, but no accelerator; JAX takes seconds to import.
    os.environ["JAX_PLATFORMS"] = "cpu"

    from rungs.planning.power_law import ScaledRuns
    from rungs.report import drawing
    from rungs.report.comparison_charts import power_law_chart

    scaled = ScaledRuns.of(runs)
    with drawing.use_style(chart_style or runs[0].config.train.chart_style):
        written = drawing.write_all({"power-law-chart.png": power_law_chart}, scaled, output_folder)
    click.echo(written[0])
    return scaled.as_text()


def _refuse_without_steps(folders: list[Path], steps: Sequence[Sized]) -> None:
    lines = [
        f"{folder}: no step recorded yet, nothing to draw; --watch waits for the first one"
        for folder, own in zip(folders, steps, strict=True)
        if not len(own)
    ]
    if lines:
        raise UserError("\n".join(lines))


def comparison_folder(names: list[str]) -> Path:
    """Return the default folder of a comparison, which differs for different runs."""
    joined = "+".join(names)
    if len(joined) > 80:
        digest = hashlib.sha256(joined.encode()).hexdigest()[:8]
        joined = f"{names[0][:40]}+{len(names) - 1}-more-{digest}"
    return Path("comparisons") / joined
