"""List the checkpoints of a run, check and average them: `uv run checkpointing.py runs/a-to-a`.

Exit code 1 if a checkpoint is damaged. In Python, `import rungs; rungs.load_model(path)`
gives the model of a run, a checkpoint or a weights file.
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from typing import Any

import click

import rungs


def __getattr__(name: str) -> Any:
    """Import `load_model` when it is asked for: it needs JAX, and the command doesn't."""
    return getattr(rungs, name)


@click.command()
@click.argument("run")
@click.option("--verify", is_flag=True, help="Check every file against its checksum.")
@click.option(
    "--average",
    metavar="N",
    type=click.IntRange(2),
    help="Write the mean of the weights of the last N checkpoints, as a model for the other"
    " commands, into checkpoints/average-N.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(**options: Any) -> None:
    """List the checkpoints of RUN with step, losses, size and date, and report damaged ones.

    Without --verify, only missing files and a damaged meta.json are detected.
    """
    with importing():
        from rungs.commands.checkpointing import list_checkpoints
    list_checkpoints(**options)


if __name__ == "__main__":
    run_command(main)
