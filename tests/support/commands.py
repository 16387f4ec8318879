"""Commands in this process: run as their script would, with exit code and output, or checked."""

from rungs.common.command import run_command

import contextlib
import importlib
import io
from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import click

from rungs.cli.download_dataset import Options


class Finished(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: str, *arguments: object) -> Finished:
    """Run a command or a check, such as `evaluate.py` or `smoke_tests/test_a_to_a.py`.
    `train.py` needs a process of its own if it trains: it changes what signals do."""
    command = command_of(script)
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with (
        patch("sys.argv", [script, *map(str, arguments)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            run_command(command)
        except SystemExit as end:
            code = int(end.code or 0)
    return Finished(code, stdout.getvalue(), stderr.getvalue())


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
