"""Check muP on a run."""

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
)

if TYPE_CHECKING:
    from rungs.config.run_config import RunConfig

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
    """Check muP on RUN."""


@main.command()
@click.argument("run")
@WIDTHS
@click.option(
    "--steps",
    default=COORDINATE_CHECK_STEPS,
    show_default=True,
    type=click.IntRange(1),
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
