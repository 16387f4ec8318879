"""Small checkpoints written without training."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from rungs.checkpointing import checkpoint_folder, optimizer_state
from rungs.checkpointing.manifest import CheckpointMeta, write_manifest
from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from tests.support.configs import ONE_FILE, model_config, train_config

OLD, NEW = "20260101Z000000-step-000001", "20260102Z000000-step-000002"
MODEL, TRAIN = model_config(), train_config()


def write_checkpoints(folder: Path) -> None:
    """Write the checkpoints of steps 1 (the best) and 2 into a run's `checkpoints/`."""
    write_checkpoint(folder / OLD, step=1, validation_loss=2.0)
    write_checkpoint(folder / NEW, step=2, validation_loss=2.5)
    checkpoint_folder.update_links(folder)


def write_checkpoint(
    folder: Path, step: int, validation_loss: float, validated_on: str | None = None
) -> None:
    """Write a checkpoint.

    Args:
        validated_on: checksum of the file that the validation loss was measured on.
    """
    write_model(folder)
    write_optimizer(folder)
    meta = checkpoint_meta(RunConfig(MODEL, TRAIN), step, validation_loss)
    datasets = {"tiny": {"validation": validated_on}} if validated_on else {}
    write_manifest(folder, meta.model_copy(update={"datasets": datasets}))


def checkpoint_meta(
    config: RunConfig, step: int, validation_loss: float | None = None
) -> CheckpointMeta:
    return CheckpointMeta(
        global_step=step,
        total_steps=100,
        tokens_seen=step,
        train_loss=(validation_loss or 0) + 1,
        validation_loss=validation_loss,
        selection_loss=validation_loss,
        model=config.model.as_json(),
        train=config.train.as_json(),
        datasets={},
        tokenizer="gpt2",
        sharding=ShardingConfig(data=1, tensor=1),
        created=f"2026-01-0{step}T00:00:00+00:00",
        versions={},
        checksums={},
    )


def write_optimizer(folder: Path) -> None:
    """Write a small optimizer state into a checkpoint."""
    for name, content in _optimizer_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@functools.cache
def _optimizer_files() -> dict[str, bytes]:
    """Return the files of a small optimizer state, by path in the checkpoint."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        optimizer_state.save_async(folder, {"mu": np.ones((4, 8), np.float32)}).result()
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_model(folder: Path) -> None:
    """Write a weights file that no model could load: one tensor."""
    folder.mkdir(parents=True)
    arrays = {"head.kernel": np.ones((4, 8), np.float32)}
    write_weights(folder, arrays, WeightsHeader(MODEL, TRAIN, "gpt2"), ONE_FILE)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
