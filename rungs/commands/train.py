"""Train a run or resume it, replay a failed step, or train a grid of runs."""

from rungs.common.command import PROCESS_BEGAN, importing

import sys
from pathlib import Path
from typing import Any

from rungs.commands.start_command import StartCommand, hold_run
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, StartOptions


def train(
    datasets_dir: Path | None,
    grid: tuple[str, ...],
    into: Path | None,
    store_teacher: bool,
    **start: Any,
) -> None:
    """Do what the options of `train.py` ask for, and end the process with the run's exit code.
    `start` holds the options of `start_options`."""
    command = StartCommand(**start)
    command.begin()
    datasets = find_datasets_dir(datasets_dir)
    if store_teacher and (grid or into or command.replay):
        raise UserError("--store-teacher: is for one RUN, and doesn't go with --grid or --replay")
    if grid or into:
        sys.exit(_train_grid(command, grid, into, datasets))
    with command.open_run() as path:
        run = RunFolder(path)
        if command.replay:
            sys.exit(_replay(run, command.replay, datasets))
        config = load_run(path)
        if store_teacher:
            sys.exit(_store_teacher(command, run, config, datasets))
        with hold_run(run, config, command.cluster, dry=command.start.dry_run) as own:
            # JAX takes seconds to import; config errors are reported first.
            with importing():
                from rungs.training.dataset_learner import on_datasets
                from rungs.training.start import launch
            code = launch(own, config, command.start, on_datasets(datasets), PROCESS_BEGAN)
        sys.exit(code)


def _replay(run: RunFolder, name: str, datasets: Path) -> int:
    from rungs.training.dataset_learner import on_datasets
    from rungs.training.replay import replay

    return replay(run, name, on_datasets(datasets))


def _store_teacher(command: StartCommand, run: RunFolder, config: RunConfig, datasets: Path) -> int:
    if command.start != StartOptions() or command.cluster:
        raise UserError(
            "--store-teacher: of the options of a start, only --like, --preset and --set go"
        )
    with importing():
        from rungs.checkpointing.start import Start
        from rungs.objectives.distillation import store_predictions
        from rungs.training.start import create_mesh
    start = Start(run, config, StartOptions(), None, None)
    store_predictions(run, config, datasets, lambda: create_mesh(start))
    return 0


def _train_grid(
    command: StartCommand, grid: tuple[str, ...], into: Path | None, datasets: Path
) -> int:
    if command.run or command.like is None or not grid or into is None:
        raise UserError("--grid: needs --like RUN and --into FOLDER, and no RUN")
    others = command.cluster, command.replay, command.from_step, command.preset
    if command.start != StartOptions() or any(one is not None for one in others):
        raise UserError("--grid: of the options of a start, only --like and --set go with it")

    from rungs.commands.grid import cells, run_grid

    runs = cells(command.like, grid, command.settings, into)
    options = ["--datasets-dir", str(datasets), *command.log_options]
    return run_grid(runs, into, [sys.argv[0], *options])
