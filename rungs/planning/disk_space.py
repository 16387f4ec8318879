"""Disk space of a run's checkpoints: how much they need, and a warning if there is less."""

import logging
import math
import shutil
from typing import NamedTuple

from rungs.checkpointing.checkpoint_folder import CHECKPOINT_GLOB
from rungs.checkpointing.retention import most_needed
from rungs.common.disk import folder_bytes
from rungs.config.run_config import RunConfig
from rungs.config.train_config import ShardingConfig
from rungs.parallel import target_device
from rungs.planning.communication import abstract_layout
from rungs.planning.memory import format_bytes
from rungs.run.folder import RunFolder
from rungs.step.state import AbstractState

log = logging.getLogger("rungs")


class DiskSpace(NamedTuple):
    """Disk space of a run's checkpoints."""

    checkpoint_bytes: int
    checkpoints: int | None
    """How many must fit at the same time: those that are kept, the best one, and one being
    written. None if all are kept and their number is not known."""
    free_bytes: int
    """Includes the space of the run's own checkpoints."""

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * (self.checkpoints or 1)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


def disk_space(run: RunFolder, config: RunConfig, steps: int | None) -> DiskSpace:
    """Return what the checkpoints of a run need and have.

    Args:
        steps: of the complete run; None if not known.
    """
    train = config.train
    saved = None if steps is None else math.ceil((steps - 1) / train.checkpoint_interval) + 1
    counts = [count for count in (most_needed(train.keep_checkpoints), saved) if count is not None]
    own = sum(map(folder_bytes, run.checkpoints.glob(CHECKPOINT_GLOB)))
    free = shutil.disk_usage(run.path).free
    return DiskSpace(checkpoint_bytes(config), min(counts, default=None), free + own)


def warn_if_short(run: RunFolder, config: RunConfig, steps: int) -> None:
    """Log a warning if the checkpoints of a run will not fit on its disk."""
    space = disk_space(run, config, steps)
    if not space.fits:
        log.warning(
            "%s: its checkpoints need %s (%d at the same time, %s each), but there are only %s for"
            " them; free some space%s",
            run.checkpoints,
            format_bytes(space.needed_bytes),
            space.checkpoints,
            format_bytes(space.checkpoint_bytes),
            format_bytes(space.free_bytes),
            "" if config.train.keep_checkpoints in (1, 2) else ", or lower keep_checkpoints",
        )


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the size of a checkpoint's arrays, weights and optimizer state. The rest is small."""
    train = config.train.model_copy(update={"sharding": None})
    with target_device.trace_for(target_device.Target("cpu")):  # without vocabulary padding
        mesh = abstract_layout(ShardingConfig(data=1)).mesh
        state = AbstractState(RunConfig(config.model, train), 1, mesh)
    arrays = (*state.weights.values(), *state.optimizer.values())
    return sum(array.size * array.dtype.itemsize for array in arrays)
