"""A step that went wrong, with all it takes to do it again.

capsules/step-000123/
  capsule.json        which step, what was not finite, both configs
  batch.safetensors   inputs and targets
  checkpoint/         the newest checkpoint before it, in files that it shares with checkpoints/
                      where the file system can; none in a step before the first checkpoint
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
from rungs.common.strict_json import StrictModel, read_text
from rungs.config.run_config import RunConfig
from rungs.config.train_config import ShardingConfig
from rungs.data.loader import Batch, TrainingData
from rungs.parallel import processes
from rungs.run.folder import RunFolder

MOST_CAPSULES = 10
"""So many at most are kept of a run; the first ones tell most."""
CAPSULE_FILE, BATCH_FILE, CHECKPOINT_FOLDER = "capsule.json", "batch.safetensors", "checkpoint"


class CapsuleMeta(StrictModel):
    """What `capsule.json` says."""

    global_step: int
    total_steps: int
    bad: dict[int, str]
    """For each microbatch that was left out, the first tensor that was not finite."""
    skipped_steps: list[int]
    """Steps since the checkpoint that were left out as spikes."""
    model: dict[str, Any]
    train: dict[str, Any]
    sharding: ShardingConfig
    """How devices shared the work."""


class Capsule(NamedTuple):
    """What a capsule holds."""

    folder: Path
    meta: CapsuleMeta
    config: RunConfig
    batch: Batch
    checkpoint: Checkpoint | None


class Capsules:
    """Those of a run; of several processes, the first one keeps them.

    Args:
        sharding: how devices share the work.
    """

    def __init__(
        self, run: RunFolder, config: RunConfig, data: TrainingData, sharding: ShardingConfig
    ) -> None:
        self._run, self._config, self._data, self._sharding = run, config, data, sharding

    def keep(self, step: int, bad: dict[int, str], skipped_steps: Collection[int]) -> str:
        """Write one, unless it is there already or there are enough.

        Args:
            bad: for each microbatch that was left out, the first tensor that was not finite.
            skipped_steps: that were left out as spikes.

        Returns:
            What to say of it.
        """
        folder = self._run.failed_steps / f"step-{step:06d}"
        if not processes.is_first_process():
            return "process 0 says where it is kept"
        if len(self._kept()) >= MOST_CAPSULES and not folder.exists():
            return f"not kept: there are {MOST_CAPSULES} already"
        try:
            if not folder.exists():
                self._write(folder, step, bad, skipped_steps)
        except (UserError, RunFailure) as error:  # the run can do without
            return f"not kept: {error}"
        return f"to look at it: uv run train.py {self._run.path} --replay {folder.name}"

    def _kept(self) -> list[Path]:
        return list(self._run.failed_steps.glob("step-*"))

    def _write(
        self, folder: Path, step: int, bad: dict[int, str], skipped_steps: Collection[int]
    ) -> None:
        from safetensors.numpy import save_file

        earlier = [c for c in list_checkpoints(self._run.checkpoints) if c.step < step]
        saved = earlier[-1] if earlier else None
        meta = CapsuleMeta(
            global_step=step,
            total_steps=self._data.total_steps,
            bad=bad,
            skipped_steps=[at for at in skipped_steps if saved is None or at > saved.step],
            model=self._config.model.as_json(),
            train=self._config.train.as_json(),
            sharding=self._sharding,
        )
        with create_folder(folder) as unfinished:
            save_file(self._data.batch(step)._asdict(), unfinished / BATCH_FILE)
            text = meta.model_dump_json(indent=2) + "\n"
            (unfinished / CAPSULE_FILE).write_text(text, encoding="utf-8")
            if saved is not None:
                copy = unfinished / CHECKPOINT_FOLDER
                shutil.copytree(saved.folder, copy, copy_function=link_or_copy)


def open_capsule(run: RunFolder, name: str) -> Capsule:
    """The capsule that `name` stands for: a path, or a folder in the run's `capsules/`.

    Raises:
        UserError: no such capsule, or it is damaged.
    """
    folder = next((f for f in (Path(name), run.failed_steps / name) if f.is_dir()), None)
    if folder is None:
        there = ", ".join(sorted(f.name for f in run.failed_steps.glob("step-*"))) or "none"
        raise UserError(
            f"--replay {name}: no such capsule in {run.failed_steps}; there are {there}"
        )
    path = folder / CAPSULE_FILE
    try:
        meta = CapsuleMeta.model_validate_json(read_text(path))
    except ValidationError:
        raise UserError(f"{path}: damaged, or of another version of Rungs") from None
    checkpoint = None
    if (folder / CHECKPOINT_FOLDER).exists():
        checkpoint = read_checkpoint(folder / CHECKPOINT_FOLDER)
        if damage := checkpoint.damage():
            raise UserError(f"{checkpoint.folder}: damaged ({', '.join(damage)})")
    config, batch = run_config(meta.model, meta.train), _read_batch(folder / BATCH_FILE)
    return Capsule(folder, meta, config, batch, checkpoint)


def _read_batch(path: Path) -> Batch:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return Batch(**load_file(path))
    except (OSError, SafetensorError, TypeError) as error:
        raise UserError(f"{path}: not a batch that can be read: {error}") from None
