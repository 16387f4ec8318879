"""List the checkpoints of a run, check and average them."""

from rungs.common.command import importing

import json
import sys
from typing import TYPE_CHECKING

import click

from rungs.common import errors
from rungs.common.shown_text import align_columns, command_line, quoted

if TYPE_CHECKING:
    from rungs.checkpointing.checkpoint_folder import ListedCheckpoint


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
def main(run: str, verify: bool, average: int | None, as_json: bool) -> None:
    """List the checkpoints of RUN with step, losses, size and date, and report damaged ones.

    Without --verify, only missing files and a damaged meta.json are detected.
    """
    with importing():
        from rungs.checkpointing.checkpoint_folder import average_checkpoints, list_run
        from rungs.run.folder import RunFolder, find_run

    folder = RunFolder(find_run(run))
    if average is not None:
        if verify or as_json:
            raise errors.UserError("--average: leave out --verify and --json")
        written, steps = average_checkpoints(folder, average)
        click.echo(f"{written}: the mean of steps {', '.join(map(str, steps))}")
        click.echo(f"to use it: {command_line('generate')} {quoted(written)} PROMPT")
        return
    checkpoints = list_run(folder, verify=verify)
    if as_json:
        click.echo(json.dumps([checkpoint._asdict() for checkpoint in checkpoints], indent=2))
    elif checkpoints:
        click.echo(_table(checkpoints, verify))
    else:
        raise errors.UserError(
            f"{folder.path}: no checkpoint yet; train it: {command_line('train')} {quoted(run)}"
        )
    sys.exit(errors.EXIT_FAILED if any(c.damage for c in checkpoints) else 0)


def _table(checkpoints: "list[ListedCheckpoint]", verified: bool) -> str:
    rows = [_cells(checkpoint, verified) for checkpoint in checkpoints]
    if all(checkpoint.pass_at_1 is None for checkpoint in checkpoints):
        for row in rows:
            del row["pass@1"]
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    damaged = [f"{c.name}: damaged: {', '.join(c.damage)}" for c in checkpoints if c.damage]
    return "\n".join([align_columns(table, left=0), *damaged])


def _cells(checkpoint: "ListedCheckpoint", verified: bool) -> dict[str, str]:
    if checkpoint.damage:
        state = "damaged"
    elif verified and checkpoint.has_checksums:
        state = "verified"
    else:
        state = "complete" if checkpoint.has_checksums else "no checksums"
    return {
        "step": "–" if checkpoint.step is None else f"{checkpoint.step:,}",
        "train loss": _loss(checkpoint.train_loss),
        "validation loss": _loss(checkpoint.validation_loss),
        "pass@1": "–" if checkpoint.pass_at_1 is None else f"{checkpoint.pass_at_1:.1%}",
        "size": f"{checkpoint.bytes / 1e6:,.1f} MB",
        "saved (UTC)": checkpoint.created[:19].replace("T", " ") or "–",
        "": " ".join(checkpoint.links),
        "state": state,
        "checkpoint": checkpoint.name,
    }


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
