"""The mean of the weights of a run's last checkpoints, for `checkpointing.py --average`."""

from pathlib import Path

import numpy as np

from rungs.checkpointing import weights_file
from rungs.checkpointing.checkpoint_folder import (
    AVERAGE,
    list_checkpoints,
    order_by_name,
    unusable_checkpoints,
)
from rungs.checkpointing.manifest import EMA_FOLDER, Checkpoint, write_checksums
from rungs.checkpointing.optimizer_state import OPTIMIZER_FOLDER
from rungs.checkpointing.weights_file import WEIGHTS_FILE
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.run.folder import RunFolder


def average_checkpoints(run: RunFolder, count: int) -> tuple[Path, list[int]]:
    """Write the mean of the weights of the last `count` checkpoints as a model of its own, and
    return its folder and the steps. Raises UserError if there are fewer, or one is damaged."""
    by_step = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run.checkpoints)}
    last = list(by_step.values())[-count:]
    if len(last) < count:
        raise UserError(
            f"--average {count}: {run.path} has {len(last)} checkpoints; keep more with"
            " keep_checkpoints"
        )
    for path, error in unusable_checkpoints(run.checkpoints).items():
        if order_by_name(path.name) > last[0].order:
            raise error
    for checkpoint in last:
        if damage := checkpoint.damage(_is_of_model):
            raise UserError(f"{checkpoint.folder}: damaged ({', '.join(damage)})")
    folder = run.checkpoints / f"{AVERAGE}{count}"
    with disk.lock_folder(folder), disk.atomic_folder(folder, replace=True) as new:
        _write(new, last)
    return folder, [checkpoint.step for checkpoint in last]


def _write(folder: Path, checkpoints: list[Checkpoint]) -> None:
    sources = [checkpoint.weights for checkpoint in checkpoints]
    shapes = {name: sources[-1].shape(name) for name in sources[-1].names()}
    for source in sources:
        source.check_tensors(shapes)
    means: dict[str, np.ndarray] = {}
    for name in sorted(shapes):
        total = np.zeros(shapes[name], np.float64)
        for source in sources:
            total += source.array(name)
        mean = (total / len(sources)).astype(np.float32)
        means[name] = weights_file.cast(mean, sources[-1].array(name).dtype.name)
    header, meta = sources[-1].header, checkpoints[-1].meta
    limit = meta.run_config().train.max_weights_file_bytes
    weights_file.write_weights(folder, means, header, limit)
    for name in filter(_is_of_model, meta.checksums):
        if not name.startswith(Path(WEIGHTS_FILE).stem):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((checkpoints[-1].folder / name).read_bytes())
    write_checksums(folder)


def _is_of_model(name: str) -> bool:
    return name.partition("/")[0] not in (OPTIMIZER_FOLDER, EMA_FOLDER)
