"""Runs a command in this process as its script would, with exit code and output."""

from rungs.common.command import run_command

import contextlib
import importlib
import io
from typing import NamedTuple
from unittest.mock import patch


class Finished(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: str, *arguments: object) -> Finished:
    """Run a command or a check, such as `evaluate.py` or `smoke_tests/test_a_to_a.py`.
    `train.py` needs a process of its own if it trains: it changes what signals do."""
    name = script.removesuffix(".py").replace("/", ".")
    command = importlib.import_module(name if "." in name else f"rungs.cli.{name}").main
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
