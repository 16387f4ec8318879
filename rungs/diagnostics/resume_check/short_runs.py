"""Short copies of runs, for about a dozen steps."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from rungs.checkpointing.checkpoint_folder import IMPORTED
from rungs.checkpointing.find_weights import find_weights
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import AnyRunConfig, ReinforceRunConfig, RunConfig
from rungs.config.task_config import TaskConfig
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import open_dataset
from rungs.data.dataset import TRAIN, Dataset
from rungs.data.loader import TrainingData
from rungs.run.folder import RunFolder

MAX_STEPS = 14
"""Enough for a few checkpoints. Even, so that two epochs divide it."""
_CHECKPOINTS = 4
_VALIDATION_BATCHES = 4
_REINFORCEMENT_STEPS, _PROMPTS, _VALIDATION_ITEMS = 8, 8, 16


class ShortRun(NamedTuple):
    """A short copy of a run, not written yet."""

    config: AnyRunConfig
    steps: int
    options: list[str]
    """Of the command that trains it."""
    files: list[Path]
    """Other files that its folder needs."""


def shorten(run: RunFolder, config: AnyRunConfig, datasets_dir: Path, tokens: int) -> ShortRun:
    """Return a short copy of a run of either kind.

    Args:
        tokens: maximum length of a sequence in training. Pairs are never cut.

    Raises:
        UserError: the run and its data do not fit together.
    """
    model, train = config
    if isinstance(train, ReinforceConfig):
        return shorten_reinforcement(run, RunConfig(model, train))
    assert isinstance(train, TrainConfig)
    training = RunConfig(model, train)
    short = shorten_training(run, training, open_datasets(training, datasets_dir), tokens)
    return short._replace(options=["--datasets-dir", str(datasets_dir)])


def shorten_training(
    run: RunFolder, config: RunConfig, datasets: dict[str, Dataset], tokens: int
) -> ShortRun:
    """Return a copy of a training run for about a dozen steps, with the complete schedule in them.

    Args:
        tokens: maximum length of a sequence. Pairs are never cut.

    Raises:
        UserError: the run and its data do not fit together.
    """
    model, train = config
    has_pairs = any(datasets[name].description.splits[TRAIN].pairs for name in train.datasets)
    length = config.sequence_length
    length = length if has_pairs else min(length, tokens)
    epochs = min(train.epochs, 2)
    changes: dict[str, Any] = {
        "sequence_length": length,
        "gradient_accumulation_steps": min(train.gradient_accumulation_steps, 2),
        "epochs": epochs,
        "min_train_tokens": -1,
        "keep_checkpoints": 2,
        "validation_tokens": _VALIDATION_BATCHES * train.microbatch_size * length,
        "lineage": None,
    }
    if train.start_from == IMPORTED:
        changes["start_from"] = str(run.imported.resolve())
    TrainingData(config, datasets)  # raises what the user's own config would
    train = train.model_copy(update=changes)
    steps_per_epoch = TrainingData(RunConfig(model, train), datasets).steps_per_epoch
    steps = min(MAX_STEPS // epochs, steps_per_epoch)
    changes = {
        "min_train_tokens": steps * train.sequences_per_step * length,
        "checkpoint_interval": max(steps * epochs // _CHECKPOINTS, 1),
    }
    return ShortRun(RunConfig(model, train.model_copy(update=changes)), steps * epochs, [], [])


def shorten_reinforcement(run: RunFolder, config: ReinforceRunConfig) -> ShortRun:
    """Return a copy of a run of reinforcement learning for a few steps of a few prompts.

    Raises:
        UserError: the weights that it starts from are missing.
    """
    train = config.train
    start = run.imported if train.start_from == IMPORTED else find_weights(train.start_from)
    prompts = min(train.prompts_per_step, _PROMPTS)
    changes: dict[str, Any] = {
        "start_from": str(start.resolve()),
        "steps": _REINFORCEMENT_STEPS,
        "prompts_per_step": prompts,
        "microbatch_size": math.gcd(train.microbatch_size, prompts * train.samples_per_prompt),
        "checkpoint_interval": _REINFORCEMENT_STEPS // _CHECKPOINTS,
        "tasks": [_shorten_task(task) for task in train.tasks],
        "keep_checkpoints": 2,
        "lineage": None,
    }
    short = config._replace(train=train.model_copy(update=changes))
    files = [run.path / name for task in train.tasks for name in task.files]
    return ShortRun(short, _REINFORCEMENT_STEPS, ["--trust-verifier"], files)


def _shorten_task(task: TaskConfig) -> TaskConfig:
    items = min(task.validation_items, _VALIDATION_ITEMS)
    return task.model_copy(update={"validation_items": items})


def open_datasets(config: RunConfig, datasets_dir: Path) -> dict[str, Dataset]:
    """Open each dataset of a run; build those that do not exist yet."""
    return {name: open_dataset(name, datasets_dir, update=False) for name in config.train.datasets}
