"""Opens the task of a config."""

from pathlib import Path
from typing import Any

from rungs.config.reinforce_config import SETTINGS, TaskConfig
from rungs.tasks import addition, brackets, countdown, item_file, parity, reasoning_gym, sorting
from rungs.tasks.task import Draws, Item, Task, TrainingItems, by_hash, held_out_items

BUILT_IN: dict[str, tuple[Any, str]] = {
    "parity": (parity, "parity"),
    "countdown": (countdown, "countdown"),
    "sort": (sorting, "sorted"),
    "brackets": (brackets, "brackets"),
    "add": (addition, "last_number"),
}
"""Modules of the built-in tasks, with `draw`, `worked`, `short` and `ALPHABET`, and their
verifiers."""


def open_task(config: TaskConfig, run_folder: Path) -> Task:
    """Return the task of a config. Items depend only on the config and the files or library that it
    names. Raises UserError with a line for each problem of a file or the library."""
    if config.is_file:
        return item_file.open_task(config, run_folder)
    if config.reasoning_gym_name:
        return reasoning_gym.open_task(config)
    module, verifier = BUILT_IN[config.source]
    settings = SETTINGS[config.source](**config.settings)

    def draw(number: int) -> Item:
        return module.draw(settings, Draws(config.seed, number))

    return Task(
        name=config.source,
        train=TrainingItems(config.source, draw, by_hash, config.train_items),
        validation=held_out_items(config.source, draw, by_hash, config.validation_items),
        verifier=verifier,
        worked=module.worked,
        short=module.short,
        alphabet=module.ALPHABET,
    )
