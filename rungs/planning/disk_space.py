"""Disk space of a run's checkpoints: how much they need, and a warning if there is less."""

import logging
import math
from typing import NamedTuple

from rungs.checkpointing.checkpoint_folder import CHECKPOINT_GLOB
from rungs.checkpointing.retention import most_needed
from rungs.common import disk
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel import target_device
from rungs.planning.communication import abstract_layout
from rungs.planning.memory import Dtypes, as_stored, format_bytes
from rungs.run.folder import RunFolder
from rungs.step.state import AbstractState

log = logging.getLogger("rungs")


class DiskSpace(NamedTuple):
    """Disk space of a run's checkpoints."""

    checkpoint_bytes: int
    checkpoints: int | None
    """Number that must fit at the same time: those that are kept, the best one, and one being
    written. None if all are kept and their number is not known."""
    free_bytes: float
    """Free space and the space of the run's own checkpoints; infinity if it is not known."""

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * (self.checkpoints or 1)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


def disk_space(
    run: RunFolder, config: RunConfig, steps: int | None, stored: Dtypes | None
) -> DiskSpace:
    """Return what the checkpoints of a run need and have. `steps` is the number of steps of the
    complete run, None if not known; `stored` is as for `memory_of`."""
    train = config.train
    saved = None if steps is None else math.ceil((steps - 1) / train.checkpoint_interval) + 1
    counts = [count for count in (most_needed(train.keep_checkpoints), saved) if count is not None]
    own = sum(map(disk.folder_bytes, run.checkpoints.glob(CHECKPOINT_GLOB)))
    free = disk.free_bytes(run.path)
    return DiskSpace(checkpoint_bytes(config, stored), min(counts, default=None), free + own)


def warn_if_short(run: RunFolder, config: RunConfig, steps: int, stored: Dtypes | None) -> None:
    """Log a warning if the checkpoints of a run will not fit on its disk."""
    space = disk_space(run, config, steps, stored)
    if not space.fits:
        needed, each = format_bytes(space.needed_bytes), format_bytes(space.checkpoint_bytes)
        log.warning(
            f"{run.checkpoints}: its checkpoints need {needed} ({space.checkpoints} at the same"
            f" time, {each} each), but only {format_bytes(space.free_bytes)} can be used for them;"
            f" {remedy(config.train)}"
        )


def remedy(train: OptimizationConfig) -> str:
    """Return what to do if the checkpoints of a run do not fit on its disk."""
    if train.keep_checkpoints == -1:
        return "free some space, or keep fewer: keep_checkpoints is -1, all"
    is_least = most_needed(train.keep_checkpoints) == most_needed(1)
    return "free some space" + (", or lower keep_checkpoints" if not is_least else "")


def checkpoint_bytes(config: RunConfig, stored: Dtypes | None) -> int:
    """Return the bytes of a checkpoint's arrays, weights and optimizer state. The rest is small."""
    train = config.train.model_copy(update={"sharding": None})
    with target_device.trace_for(target_device.Target("cpu")):  # without vocabulary padding
        mesh = abstract_layout(ShardingConfig(data=1)).mesh
        state = AbstractState(RunConfig(config.model, train), 1, mesh)
    arrays = (*as_stored(state, stored or {}).values(), *state.optimizer.values())
    return sum(array.size * array.dtype.itemsize for array in arrays)
