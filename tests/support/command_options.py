"""Whether a command takes given words."""

import importlib
from collections.abc import Sequence

import click

from rungs.cli.download_dataset import Options


def command_of(script: str) -> click.Command:
    """Return the command of a script of the repository."""
    name = script.removesuffix(".py").replace("/", ".")
    is_command = "." not in name and name != "config"
    module = importlib.import_module(f"rungs.cli.{name}" if is_command else name)
    command: click.Command = module.main
    return command


def check_arguments(script: str, words: Sequence[str]) -> None:
    """Check that a command takes these words.

    Raises:
        click.UsageError: it doesn't.
    """
    command, arguments = command_of(script), list(words)
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    options = command.make_context(script, arguments).params
    if script == "download_dataset.py":
        apart = {name: options.pop(name) for name in ("what", "datasets_dir", "check", "items")}
        Options(**options).check(apart["what"])
