"""Does a run's learning rate carry over to wider models?

    uv run mup.py check runs/mup                      train a few steps at several widths
    uv run mup.py sweep runs/mup --learning-rates …   train small runs to the end

The experiments are in `rungs/scaling/mup.py` and `rungs/commands/grid.py`.
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any

import click

from rungs.commands.options import DATASETS_DIR_OPTION, FiniteRange
from rungs.config.option_values import (
    COORDINATE_CHECK_LEARNING_RATE,
    COORDINATE_CHECK_SEEDS,
    COORDINATE_CHECK_STEPS,
    MIN_COORDINATE_CHECK_STEPS,
)


class Numbers(click.ParamType):
    """Comma-separated numbers."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.name, self._kind = "numbers", kind

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        """Return the distinct numbers, sorted."""
        try:
            numbers = sorted({self._kind(part) for part in str(value).split(",")})
        except ValueError:
            self.fail(f"{value!r} is not a list of comma-separated numbers", param, ctx)
        if min(numbers) <= 0 or len(numbers) < 2 or max(numbers) == float("inf"):
            self.fail(f"{value!r}: give at least two different positive numbers", param, ctx)
        return numbers


WIDTHS = click.option(
    "--widths",
    type=Numbers(int),
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
def check(**options: Any) -> None:
    """Train RUN for a few steps at several widths and check that activations keep their size.

    The exit code is 1 if they do not somewhere in the model.
    """
    with importing():
        from rungs.commands.mup import check
    check(**options)


@main.command("sweep")
@click.argument("run")
@click.option(
    "--learning-rates",
    "rates",
    required=True,
    type=Numbers(float),
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
def sweep_command(**options: Any) -> None:
    """Train RUN at each width and learning rate, and chart the final losses.

    If it is interrupted, the same command resumes it.
    """
    with importing():
        from rungs.commands.mup import try_learning_rates
    try_learning_rates(**options)


if __name__ == "__main__":
    run_command(main)
