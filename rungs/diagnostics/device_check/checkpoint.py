"""How long a checkpoint holds up training, and how long it takes to be complete."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import CheckpointMeta, installed_versions
from rungs.checkpointing.saver import Saver
from rungs.common.disk import folder_bytes
from rungs.diagnostics.device_check.report import Figure
from rungs.diagnostics.device_check.step import RunningStep
from rungs.parallel import numerics
from rungs.parallel.devices import recorded_sharding

PART = "checkpoint"
_SAVES = 2
"""The first one also compiles and imports."""


def figures(step: RunningStep, folder: Path) -> Iterator[Figure]:
    """Yield times and size of the last of several checkpoints, written where a run would write
    them and deleted again.

    Args:
        folder: on the disk to measure.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".device-check-") as checkpoints:
        with Saver(Path(checkpoints), step.config, None, _nothing, ()) as saver:
            for number in range(_SAVES):
                begin = time.perf_counter()
                saver.save(step.model, step.optimizer, _meta(step, number))
                stall = time.perf_counter() - begin
                saver.wait()
                complete = time.perf_counter() - begin
        last = list_checkpoints(Path(checkpoints))[-1]
        size, damage = folder_bytes(last.folder), last.damage()
    yield Figure(PART, "training waits", stall, "s")
    yield Figure(PART, "complete after", complete, "s", note="written behind the running training")
    problem = f"damaged on the disk: {', '.join(damage)}" if damage else ""
    yield Figure(PART, "size", size, "B", note="read back and compared", problem=problem)


def _meta(step: RunningStep, number: int) -> CheckpointMeta:
    return CheckpointMeta(
        global_step=number,
        total_steps=_SAVES,
        tokens_seen=0,
        train_loss=None,
        validation_loss=None,
        selection_loss=None,
        model=step.config.model.as_json(),
        train=step.config.train.as_json(),
        datasets={},
        tokenizer="none",
        sharding=recorded_sharding(step.config.train, step.mesh),
        created="",
        versions=installed_versions(),
        environment=numerics.recorded(),
        checksums={},
    )


def _nothing() -> None:
    """What a run does around a checkpoint."""
