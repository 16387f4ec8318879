"""Train a run or resume it, or replay a failed step."""

from rungs.common.command import PROCESS_BEGAN, importing

import re
import sys
from pathlib import Path
from typing import Any

import click

from rungs.cli.options import DATASETS_DIR_OPTION, PRESET_OPTION, start_options
from rungs.common.errors import UserError

_CHECKPOINT = re.compile(r"best|latest|\d+|(.*-)?step-\d+")
"""Checkpoints as --from takes them, if only one argument follows RUN."""


@click.command()
@start_options(
    extended="tokens or epochs",
    replayed="Run a failed step (`step-000123`) again and name its first tensor that is not"
    " finite.",
)
@click.argument("datasets", required=False)
@click.argument("checkpoint", required=False)
@DATASETS_DIR_OPTION
@click.option(
    "--from-step",
    type=click.IntRange(0),
    metavar="N",
    help="With --like: continue that run's checkpoint of step N, with its weights and optimizer"
    " state; --set may change schedule, data or length.",
)
@PRESET_OPTION
@click.option(
    "--profile",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Take so many steps under JAX's profiler and print how long each part of a step takes."
    " Writes the trace into RUN/profile, and keeps nothing else.",
)
@click.option(
    "--store-teacher",
    is_flag=True,
    help="Only store what the teacher of RUN predicts for its data, for teacher_top_k.",
)
def main(
    datasets: str | None,
    checkpoint: str | None,
    datasets_dir: Path | None,
    store_teacher: bool,
    **start: Any,
) -> None:
    """Train RUN, a folder with model.json and train.json, or resume it.

    DATASETS is another way to give --datasets-dir, and CHECKPOINT to give --from."""
    if checkpoint is None and datasets and _CHECKPOINT.fullmatch(datasets):
        datasets, checkpoint = None, datasets
    if (datasets and datasets_dir) or (checkpoint and start["rewind_to"]):
        raise UserError("DATASETS and CHECKPOINT: not with --datasets-dir and --from, their equals")
    if checkpoint and start["supervise"]:
        raise UserError("--supervise: give the checkpoint with --from, which a restart leaves out")
    datasets_dir = _datasets_folder(datasets) if datasets else datasets_dir
    start["rewind_to"] = checkpoint or start["rewind_to"]
    with importing():
        from rungs.cli.start_command import StartCommand, hold_run
        from rungs.config.run_config import load_run
        from rungs.data.catalog import find_datasets_dir
        from rungs.run.folder import RunFolder

    command = StartCommand(**start)
    command.begin()
    folder = find_datasets_dir(datasets_dir)
    if store_teacher and (command.replay or not command.only_makes_run):
        raise UserError("--store-teacher: goes only with RUN, --like, --preset and --set")
    with command.open_run() as path:
        run, config = RunFolder(path), load_run(path)
        # JAX takes seconds to import; config errors are reported first.
        with importing():
            from rungs.training.dataset_learner import on_datasets

        if command.replay:
            from rungs.training.replay import replay

            sys.exit(replay(run, command.replay, on_datasets(folder)))
        if store_teacher:
            from rungs.checkpointing.load import Start
            from rungs.objectives.distillation import store_predictions
            from rungs.training.start import create_mesh

            start_of = Start(run, config, command.start, None, None)
            store_predictions(run, config, folder, lambda: create_mesh(start_of))
            return
        with hold_run(run, config, command.cluster, dry=command.start.dry_run) as own:
            with importing():
                from rungs.training.start import launch

            code = launch(own, config, command.start, on_datasets(folder), PROCESS_BEGAN)
        sys.exit(code)


def _datasets_folder(name: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(f"DATASETS: {name}: no such folder, and no name of a checkpoint")
    if (folder / "model.json").is_file():
        raise UserError(f"DATASETS: {name} is a run; give one RUN; an experiment trains several")
    return folder
