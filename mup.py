"""Does a run's learning rate carry over to wider models?

    uv run mup.py check runs/mup                      a few steps at several widths
    uv run mup.py sweep runs/mup --learning-rates …   whole small runs, loss by learning rate

What they do is in `coordinate_check.py` and `learning_rate_sweep.py`.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rungs.charts import drawing
from rungs.charts.coordinate_chart import coordinate_chart
from rungs.charts.sweep_chart import sweep_chart
from rungs.common.errors import EXIT_FAILED, UserError, run_command
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.loader import TrainingData
from rungs.parallel import jax_setup
from rungs.run.folder import find_run
from rungs.scaling.coordinate_check import (
    LEARNING_RATE,
    LEAST_STEPS,
    MOST_SLOPE,
    Growth,
    growths,
    measure,
)
from rungs.scaling.learning_rate_sweep import (
    Point,
    SweepRun,
    best_rates,
    is_at_end,
    lines_of,
    sweep,
)
from rungs.scaling.widths import changes

STANDARD, MUP = "standard", "muP"
CHECK_TIMES = (1, 2, 4, 8)
DATASETS_DIR = click.option(
    "--datasets-dir", type=click.Path(path_type=Path), help="Where datasets lie, or will."
)


class Numbers(click.ParamType):
    """Numbers with commas between them."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.name, self._kind = "numbers", kind

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        """All of them, each once, in order."""
        try:
            numbers = sorted({self._kind(part) for part in str(value).split(",")})
        except ValueError:
            self.fail(f"{value!r} is no list of numbers with commas between them", param, ctx)
        if min(numbers) <= 0 or len(numbers) < 2 or max(numbers) == float("inf"):
            self.fail(f"{value!r}: give two different positive numbers or more", param, ctx)
        return numbers


WIDTHS = click.option(
    "--widths",
    type=Numbers(int),
    help="emb_dim of each model, as 64,128,256.  [default: 1, 2, 4 and 8 times the base's]",
)

TRAIN_COMMAND = Path(__file__).with_name("train.py")


@click.group()
def main() -> None:
    """Does a run's learning rate carry over to wider models?"""


@main.command()
@click.argument("run")
@WIDTHS
@click.option("--steps", default=5, show_default=True, type=click.IntRange(LEAST_STEPS))
@click.option(
    "--learning-rate",
    default=LEARNING_RATE,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
)
@click.option("--chart", type=click.Path(path_type=Path, dir_okay=False))
@DATASETS_DIR
def check(
    run: str,
    widths: list[int] | None,
    steps: int,
    learning_rate: float,
    chart: Path | None,
    datasets_dir: Path | None,
) -> None:
    """Train RUN for a few steps at several widths and see whether its activations keep their size:
    exit code 1 where at some place they do not. The chart is RUN/coordinate-check.png."""
    folder, found = _fresh_run(run)
    jax_setup.enable_compilation_cache()
    data = _training_data(found, datasets_dir)
    if data.total_steps <= steps:
        raise UserError(f"--steps {steps}: the run has {data.total_steps}, one of them to look at")
    measured = measure(found, widths or _widths(found), data, steps, learning_rate)
    told = growths(measured)
    _print_growths(told, steps)
    chart = chart or folder / "coordinate-check.png"
    draw = functools.partial(coordinate_chart, folder.name, steps)
    with drawing.styled(found.train.chart_style):
        drawing.write_all({chart.name: draw}, measured, chart.parent)
    is_off = any(growth.is_off for growth in told)
    verdict = "not muP: some grow or shrink by more than" if is_off else "muP: all stay within"
    click.echo(f"{verdict} the power {MOST_SLOPE:g} of the width; {chart}")
    if found.model.mup is None:
        click.echo(f'{folder}/model.json has no key mup: {{"base_emb_dim": …}} makes it muP')
    sys.exit(EXIT_FAILED if is_off else 0)


def _fresh_run(run: str) -> tuple[Path, RunConfig]:
    """A run of which there can be wider ones."""
    folder = find_run(run)
    found = run_config.load_run(folder)
    if found.train.start_from is not None:
        raise UserError(f"{folder}: start_from has the width that it has; take a run without it")
    return folder, found


def _training_data(found: RunConfig, datasets_dir: Path | None) -> TrainingData:
    place = find_datasets_dir(datasets_dir)
    datasets = {name: open_dataset(name, place) for name in found.train.datasets}
    return TrainingData(found, datasets)


def _print_growths(told: Sequence[Growth], steps: int) -> None:
    click.echo(f"{'':10} {'size':>9} {'change':>9}   power of the width, after {steps} steps")
    for growth in told:
        off = "   off" * growth.is_off
        click.echo(f"{growth.place:10} {growth.of_size:>+9.2f} {growth.of_change:>+9.2f}{off}")


def _widths(found: RunConfig) -> list[int]:
    """From the base model's width, or the run's own."""
    first = found.model.mup.base_emb_dim if found.model.mup else found.model.emb_dim
    return [first * times for times in CHECK_TIMES]


@main.command("sweep")
@click.argument("run")
@click.option("--learning-rates", "rates", required=True, type=Numbers(float))
@WIDTHS
@click.option("--standard", is_flag=True, help="The same without the key mup, too.")
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), help="RUN-sweep.")
@DATASETS_DIR
def sweep_command(
    run: str,
    rates: list[float],
    widths: list[int] | None,
    standard: bool,
    into: Path | None,
    datasets_dir: Path | None,
) -> None:
    """Train RUN at each of the widths and learning rates, in run folders under RUN-sweep, and draw
    its final loss. The same command goes on where it was interrupted."""
    folder, found = _fresh_run(run)
    place = find_datasets_dir(datasets_dir)
    into = into or folder.with_name(f"{folder.name}-sweep")
    sweeps: dict[str, list[Point]] = {}
    for name, change in _parametrisations(found.model, standard).items():
        cases = _cases(found.model, widths or _widths(found), rates, change)
        sweeps[name] = []
        for point in sweep(folder, into / name.lower(), cases, place, TRAIN_COMMAND):
            sweeps[name].append(point)
            _print_point(name, point, f"{len(sweeps[name])} of {len(cases)}")
        _print_lines(name, sweeps[name])
    draw = functools.partial(sweep_chart, f"{folder.name}: final loss by learning rate and width")
    with drawing.styled(found.train.chart_style):
        drawing.write_all({"learning-rates.png": draw}, sweeps, into)
    click.echo(f"{into / 'learning-rates.png'}")


def _print_point(name: str, point: Point, number: str) -> None:
    where = f"{name}, {point.line}, learning rate {point.learning_rate:g}"
    click.echo(f"{number}: {where}: loss {point.loss:.4f}", err=True)


def _print_lines(name: str, points: Sequence[Point]) -> None:
    best = best_rates(points)
    for line, of_line in lines_of(points).items():
        losses = "  ".join(f"{point.learning_rate:g}: {point.loss:.4f}" for point in of_line)
        beyond = "; at the end of those tried" * is_at_end(of_line)
        click.echo(f"{name}, {line}: best {best[line]:.2g}{beyond}\n  {losses}")


def _parametrisations(model: ModelConfig, standard: bool) -> dict[str, dict[str, Any]]:
    """What to change of the run for each of them."""
    if model.mup is None:
        if standard:
            raise UserError("--standard: the run has no key mup; leave it out")
        return {STANDARD: {}}
    return {STANDARD: {"mup": None}, MUP: {}} if standard else {MUP: {}}


def _cases(
    model: ModelConfig, widths: list[int], rates: list[float], change: dict[str, Any]
) -> list[SweepRun]:
    return [
        SweepRun(f"emb_dim {width}", rate, {**changes(model, width), **change})
        for width in widths
        for rate in rates
    ]


if __name__ == "__main__":
    run_command(main)
