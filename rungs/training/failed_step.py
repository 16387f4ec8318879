"""Failed steps: a step with a NaN or infinity is saved with all that it takes to replay it.

failed-steps/step-000123/
  step.json           which step, what was not finite, both configs
  batch.safetensors   inputs and targets
  checkpoint/         the newest checkpoint before the step, hard-linked to the files in
                      checkpoints/ if possible; missing if the step came before any checkpoint

Earlier versions called the folder `capsules/` and the file `capsule.json`; both are still read.
"""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import Checkpoint, read_checkpoint, run_config
from rungs.common.atomic_folder import create_folder
from rungs.common.disk import link_or_copy
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import quoted
from rungs.common.strict_json import StrictModel, read_text
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.data.loader import Batch, TrainingData
from rungs.parallel import processes
from rungs.run.folder import RunFolder

MAX_FAILED_STEPS = 10
"""So many are saved per run. The first ones tell most."""
STEP_FILE, OLD_STEP_FILE = "step.json", "capsule.json"
BATCH_FILE, CHECKPOINT_FOLDER = "batch.safetensors", "checkpoint"


class FailedStepMeta(StrictModel):
    """The content of `step.json`."""

    global_step: int
    total_steps: int
    bad: dict[int, str]
    """The first tensor that was not finite, by the number of the dropped microbatch."""
    skipped_steps: list[int]
    """Steps since the checkpoint that were skipped because of a loss spike."""
    model: dict[str, Any]
    train: dict[str, Any]
    sharding: ShardingConfig
    """The mesh and sharding mode it was trained on."""


class FailedStep(NamedTuple):
    """A failed step read from disk."""

    folder: Path
    meta: FailedStepMeta
    config: RunConfig
    batch: Batch
    checkpoint: Checkpoint | None


class FailedStepRecorder:
    """Saves the failed steps of a run; with several processes only the first one does.

    Args:
        run: the run folder.
        config: both configs.
        data: gives the batch of a step.
        sharding: the mesh and sharding mode.
    """

    def __init__(
        self, run: RunFolder, config: RunConfig, data: TrainingData, sharding: ShardingConfig
    ) -> None:
        self._run, self._config, self._data, self._sharding = run, config, data, sharding

    def record(self, step: int, bad: dict[int, str], skipped_steps: Collection[int]) -> str:
        """Save a failed step, unless it exists already or there are enough.

        Args:
            step: the step.
            bad: the first tensor that was not finite, by the number of the dropped microbatch.
            skipped_steps: steps that were skipped because of a loss spike.

        Returns:
            The end of a log message: how to replay the step, or why it was not saved.
        """
        folder = self._run.failed_steps / f"step-{step:06d}"
        if not processes.is_first_process():
            return "process 0 logs where the step is saved"
        if len(_saved_in(self._run.failed_steps)) >= MAX_FAILED_STEPS and not folder.exists():
            return f"not saved for replay: there are {MAX_FAILED_STEPS} failed steps already"
        try:
            if not folder.exists():
                self._write(folder, step, bad, skipped_steps)
        except (UserError, RunFailure) as error:  # training continues without it
            return f"not saved for replay: {error}"
        return f"to replay it: uv run train.py {quoted(self._run.path)} --replay {folder.name}"

    def _write(
        self, folder: Path, step: int, bad: dict[int, str], skipped_steps: Collection[int]
    ) -> None:
        from safetensors.numpy import save_file

        self._run.check()
        earlier = [c for c in list_checkpoints(self._run.checkpoints) if c.step < step]
        saved = earlier[-1] if earlier else None
        meta = FailedStepMeta(
            global_step=step,
            total_steps=self._data.total_steps,
            bad=bad,
            skipped_steps=[at for at in skipped_steps if saved is None or at > saved.step],
            model=self._config.model.as_json(),
            train=self._config.train.as_json(),
            sharding=self._sharding,
        )
        with create_folder(folder) as unfinished:
            arrays = self._data.batch(step)._asdict()
            given = {name: array for name, array in arrays.items() if array is not None}
            save_file(given, unfinished / BATCH_FILE)
            text = meta.model_dump_json(indent=2) + "\n"
            (unfinished / STEP_FILE).write_text(text, encoding="utf-8")
            if saved is not None:
                copy = unfinished / CHECKPOINT_FOLDER
                shutil.copytree(saved.folder, copy, copy_function=link_or_copy)


def open_failed_step(run: RunFolder, name: str) -> FailedStep:
    """Read a failed step of a run.

    Args:
        run: the run folder.
        name: the step's folder name, such as `step-000123`, or a path.

    Raises:
        UserError: there is no such failed step, or it is damaged.
    """
    parents = run.failed_steps, run.old_failed_steps
    folder = next((f for f in (Path(name), *(p / name for p in parents)) if f.is_dir()), None)
    if folder is None:
        found = sorted(path.name for parent in parents for path in _saved_in(parent))
        raise UserError(
            f"--replay {name}: no such failed step in {run.failed_steps};"
            f" there are {', '.join(found) or 'none'}"
        )
    is_old = (folder / OLD_STEP_FILE).is_file()
    path = folder / (OLD_STEP_FILE if is_old else STEP_FILE)
    try:
        meta = FailedStepMeta.model_validate_json(read_text(path))
    except ValidationError:
        raise UserError(f"{path}: damaged, or of another version of Rungs") from None
    checkpoint = None
    if (folder / CHECKPOINT_FOLDER).exists():
        checkpoint = read_checkpoint(folder / CHECKPOINT_FOLDER)
        if damage := checkpoint.damage():
            raise UserError(f"{checkpoint.folder}: damaged ({', '.join(damage)})")
    model, train = run_config(meta.model, meta.train)
    assert isinstance(train, TrainConfig)
    batch = _read_batch(folder / BATCH_FILE)
    return FailedStep(folder, meta, RunConfig(model, train), batch, checkpoint)


def _saved_in(folder: Path) -> list[Path]:
    return list(folder.glob("step-*"))


def _read_batch(path: Path) -> Batch:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return Batch(**load_file(path))
    except (OSError, SafetensorError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as a batch: {error}") from None
