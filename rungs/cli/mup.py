"""Check muP on a run, or find the best learning rate at several widths.

The experiments are in `rungs/planning/mup.py` and `rungs/cli/grid.py`."""

from rungs.common.command import importing

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rungs.cli.options import DATASETS_DIR_OPTION, FiniteRange
from rungs.common.errors import EXIT_FAILED, UserError
from rungs.config.option_values import (
    COORDINATE_CHECK_LEARNING_RATE,
    COORDINATE_CHECK_SEEDS,
    COORDINATE_CHECK_STEPS,
    MIN_COORDINATE_CHECK_STEPS,
)

if TYPE_CHECKING:
    from rungs.config.run_config import RunConfig

STANDARD, MUP = "standard", "muP"
WIDTH_FACTORS = (1, 2, 4, 8)


def _numbers(kind: type[int] | type[float]) -> Callable[..., list[Any] | None]:
    """Return a callback of Click that reads distinct comma-separated numbers, and sorts them."""

    def read(_: click.Context, param: click.Parameter, value: str | None) -> list[Any] | None:
        if value is None:
            return None
        try:
            numbers = sorted({kind(part) for part in value.split(",")})
        except ValueError:
            numbers = []
        if len(numbers) < 2 or numbers[0] <= 0 or numbers[-1] == float("inf"):
            message = f"{value!r}: give at least two different positive numbers, with commas"
            raise click.BadParameter(message, param=param)
        return numbers

    return read


WIDTHS = click.option(
    "--widths",
    metavar="NUMBERS",
    callback=_numbers(int),
    help="emb_dim of each model, for example 64,128,256."
    "  [default: 1, 2, 4 and 8 times the base width]",
)


@click.group()
def main() -> None:
    """Check muP on RUN, or find the best learning rate at several widths."""


@main.command()
@click.argument("run")
@WIDTHS
@click.option(
    "--steps",
    default=COORDINATE_CHECK_STEPS,
    show_default=True,
    type=click.IntRange(MIN_COORDINATE_CHECK_STEPS),
    help="Training steps at each width.",
)
@click.option(
    "--learning-rate",
    default=COORDINATE_CHECK_LEARNING_RATE,
    show_default=True,
    type=FiniteRange(0, min_open=True),
    help="Constant learning rate for every width.",
)
@click.option(
    "--seeds",
    default=COORDINATE_CHECK_SEEDS,
    show_default=True,
    type=click.IntRange(1),
    help="Models at each width, from different initial weights.",
)
@click.option(
    "--chart",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the chart.  [default: RUN/coordinate-check.png]",
)
@DATASETS_DIR_OPTION
def check(
    run: str,
    widths: list[int] | None,
    steps: int,
    learning_rate: float,
    seeds: int,
    chart: Path | None,
    datasets_dir: Path | None,
) -> None:
    """Train RUN for a few steps at several widths and check that activations keep their size.

    The exit code is 1 if they do not somewhere in the model.
    """
    with importing():
        from rungs.common import paths
        from rungs.data.catalog import find_datasets_dir, open_datasets
        from rungs.data.tokens.loader import TrainingData
        from rungs.parallel import jax_setup
        from rungs.planning import mup
        from rungs.report import drawing
        from rungs.report.comparison_charts import coordinate_chart

    folder, config = _scalable_run(run)
    chart = chart or folder / "coordinate-check.png"
    paths.refuse_other_content(chart, b"\x89PNG", "a chart")
    jax_setup.enable_compilation_cache()
    datasets = open_datasets(config.train.datasets, find_datasets_dir(datasets_dir))
    data = TrainingData(config, datasets)
    if data.total_steps <= steps:
        raise UserError(
            f"--steps {steps}: the run has {data.total_steps} steps, and the last one is kept for"
            " measuring; give fewer"
        )
    widths = widths or _default_widths(config)
    measurements = mup.measure(config, widths, data, steps, learning_rate, seeds)
    growth = mup.fit_growth(measurements)
    click.echo(f"{'':10} {'size':>9} {'change':>9}   exponents of the width, after {steps} steps")
    for place in growth:
        off = "   off" * place.is_off
        click.echo(f"{place.place:10} {place.of_size:>+9.2f} {place.of_change:>+9.2f}{off}")
    draw = functools.partial(coordinate_chart, folder.name, steps)
    with drawing.use_style(config.train.chart_style):
        drawing.write_all({chart.name: draw}, measurements, chart.parent)
    is_off = any(place.is_off for place in growth)
    verdict = "not muP: some exponents are beyond" if is_off else "muP: all exponents are within"
    click.echo(f"{verdict} ±{mup.MAX_EXPONENT:g}; {chart}")
    if config.model.mup is None:
        click.echo(f'{folder}/model.json has no key mup: {{"base_emb_dim": …}} makes the model muP')
    sys.exit(EXIT_FAILED if is_off else 0)


@main.command("sweep")
@click.argument("run")
@click.option(
    "--learning-rates",
    "rates",
    required=True,
    metavar="NUMBERS",
    callback=_numbers(float),
    help="Peak learning rates to try, for example 0.001,0.002,0.004.",
)
@WIDTHS
@click.option("--standard", is_flag=True, help="Also train without muP.")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to write the run folders and the chart.  [default: RUN-sweep]",
)
@DATASETS_DIR_OPTION
def sweep_command(
    run: str,
    rates: list[float],
    widths: list[int] | None,
    standard: bool,
    into: Path | None,
    datasets_dir: Path | None,
) -> None:
    """Train RUN at each width and learning rate, and chart the final losses.

    If it is interrupted, the same command resumes it.
    """
    with importing():
        from rungs.cli.grid import sweep
        from rungs.data.catalog import find_datasets_dir
        from rungs.planning import mup
        from rungs.report import drawing
        from rungs.report.comparison_charts import sweep_chart

    folder, config = _scalable_run(run)
    datasets = find_datasets_dir(datasets_dir)
    into = into or folder.with_name(f"{folder.name}-sweep")
    sweeps: dict[str, list[mup.Point]] = {}
    parametrisations: dict[str, dict[str, Any]] = {MUP: {}} if config.model.mup else {STANDARD: {}}
    if standard and config.model.mup is None:
        raise UserError("--standard: the run has no key mup; leave the option out")
    if standard:
        parametrisations = {STANDARD: {"mup": None}, MUP: {}}
    for name, change in parametrisations.items():
        runs = [
            mup.SweepRun(f"emb_dim {width}", rate, mup.keys_for_width(config.model, width) | change)
            for width in widths or _default_widths(config)
            for rate in rates
        ]
        sweeps[name] = []
        for point in sweep(folder, into / name.lower(), runs, datasets):
            sweeps[name].append(point)
            done = f"{len(sweeps[name])} of {len(runs)}: {name}, {point.series}"
            rate = f"learning rate {point.learning_rate:g}"
            click.echo(f"{done}, {rate}: loss {point.loss:.4f}", err=True)
        best = mup.best_rates(sweeps[name])
        for series, points in mup.points_by_series(sweeps[name]).items():
            losses = "  ".join(f"{one.learning_rate:g}: {one.loss:.4f}" for one in points)
            at_end = "; at the edge of those tried" * mup.is_best_at_end(points)
            click.echo(f"{name}, {series}: best {best[series]:.2g}{at_end}\n  {losses}")
    draw = functools.partial(sweep_chart, f"{folder.name}: final loss by learning rate and width")
    with drawing.use_style(config.train.chart_style):
        drawing.write_all({"learning-rates.png": draw}, sweeps, into)
    click.echo(f"{into / 'learning-rates.png'}")


def _scalable_run(run: str) -> "tuple[Path, RunConfig]":
    """Return a run whose model can be made wider."""
    from rungs.config.run_config import load_run
    from rungs.run.folder import find_run

    folder = find_run(run)
    config = load_run(folder)
    if config.train.start_from is not None:
        raise UserError(f"{folder}: start_from fixes the model's width; use a run without it")
    return folder, config


def _default_widths(config: "RunConfig") -> list[int]:
    model = config.model
    base = model.mup.base_emb_dim if model.mup else model.emb_dim
    return [base * factor for factor in WIDTH_FACTORS]
