"""Show the model of a run: as it is built, `uv run model.py runs/a-to-a`, or what it does with a
text, `uv run model.py runs/layers --look "def main():"`.

In Python, `from model import GPT` gives the model itself.
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from typing import Any

import click

import rungs
from rungs.config.option_values import MOST_DEVICES


def __getattr__(name: str) -> Any:
    """Import `GPT` when it is asked for: JAX takes seconds to import."""
    return getattr(rungs, name)


@click.command()
@click.argument("run")
@click.option(
    "--data",
    type=click.IntRange(2, MOST_DEVICES),
    default=2,
    show_default=True,
    help="Devices along the data axis, in fsdp, fsdp_tp and cp.",
)
@click.option(
    "--tensor",
    type=click.IntRange(2, MOST_DEVICES),
    default=2,
    show_default=True,
    help="Devices along the tensor axis, in tp and fsdp_tp.",
)
@click.option(
    "--context",
    type=click.IntRange(2, MOST_DEVICES),
    default=2,
    show_default=True,
    help="Devices along the context axis, in cp.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--look",
    metavar="TEXT",
    help="Write a page of what the trained model does with a text: attention maps, predictions"
    " after each layer, losses, contributions to the logits.",
)
def main(**options: Any) -> None:
    """Show the model of RUN as it is before training.

    Prints the module tree, then each array's name, axes, shape, dtype, initial standard deviation
    and share of the parameters, and along which axis each sharding mode splits it. With --look,
    writes look.html into the run folder instead, from its best checkpoint.
    """
    with importing():
        from rungs.commands.model import show
    show(**options)


if __name__ == "__main__":
    run_command(main)
