"""Environments of other libraries. Each library has an adapter, a module with `items`, which yields
items, and `opened`, which returns what makes an `Environment`, like the class of a user's file; it
runs in the same processes with the same limits."""

import contextlib
import importlib
import itertools
from pathlib import Path

from rungs.common.errors import UserError, reason
from rungs.common.shown_text import install_line
from rungs.config.reinforce_config import TRUST_FLAG, TaskConfig
from rungs.tasks.task import Item, Task


def open_task(config: TaskConfig, *, trusts: bool) -> Task:
    """Return a task of which the library's first items are held out. Raises UserError if it isn't
    trusted or installed, has too few items, or needs what the adapter can't do."""
    library, _, name = config.source.partition(":")
    if not trusts:
        problem = f"is a program that answers the model; if you trust it, give {TRUST_FLAG}"
        raise UserError(f"{config.source}: {problem}")
    try:
        adapter = importlib.import_module(f"rungs.tasks.{library}_adapter")
    except ImportError as error:
        advice = f"install it: {install_line(library)}"
        raise UserError(f"{library} is not installed ({reason(error)}); {advice}") from None
    try:
        with contextlib.closing(adapter.items(name, config.settings)) as items:
            validation = list(itertools.islice(items, config.validation_items))
            train = list(itertools.islice(items, config.train_items))
    except Exception as error:  # the library's, of any kind
        raise UserError(f"{config.source}: {reason(error)}") from None
    if not train:
        problem = f"has {len(validation)} items, so validation_items leaves none to train on"
        raise UserError(f"{config.source}: {problem}; use fewer")

    def answer(item: Item) -> str:
        return item.answer

    return Task(name, train, validation, config.source, worked=answer, short=answer)


def code_of(config: TaskConfig) -> str:
    """Return a program with the `Environment` of a task. It sees the user's home folder, where
    libraries keep data."""
    library, _, name = config.source.partition(":")
    return (
        f"import os\nos.environ['HOME'] = {str(Path.home())!r}\n"
        f"from rungs.tasks.{library}_adapter import opened\n"
        f"Environment = opened({name!r}, {config.settings!r})\n"
    )
