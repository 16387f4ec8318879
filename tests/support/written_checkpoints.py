"""Small checkpoints written without training."""

from pathlib import Path

import numpy as np

from rungs.checkpointing import links
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
    links.update_links(folder)


def write_checkpoint(
    folder: Path, step: int, validation_loss: float, validated_on: str | None = None
) -> None:
    """Write a checkpoint.

    Args:
        validated_on: checksum of the file that the validation loss was measured on.
    """
    write_model(folder)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "moments").write_bytes(bytes(100))
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


def write_model(folder: Path) -> None:
    """Write a weights file that no model could load: one tensor."""
    folder.mkdir(parents=True)
    arrays = {"head.kernel": np.ones((4, 8), np.float32)}
    write_weights(folder, arrays, WeightsHeader(MODEL, TRAIN, "gpt2"), ONE_FILE)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
