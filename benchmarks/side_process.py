"""The sides of a comparison as processes that compute on request, so that they can take turns."""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import click

LAST_LINES = 15
"""Of a failed process's stderr, how many are shown."""


class Side(NamedTuple):
    """How to start a side."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = {}
    """Added to this process's own."""


class SideProcess(NamedTuple):
    """A running side, which reads requests from stdin and answers each with a line of JSON."""

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]
    """What it has written to stderr."""

    def ask(self, request: str) -> Any:
        """Send a request and return the answer.

        Raises:
            ClickException: the process has ended.
        """
        assert self.process.stdin
        assert self.process.stdout
        try:
            print(request, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        raise click.ClickException(failure(self.name, self.errors.read()))


@contextlib.contextmanager
def start(side: Side) -> Iterator[SideProcess]:
    """Run a side until the end of the context."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            side.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **side.environment},
        )
        try:
            yield SideProcess(side.name, process, errors)
        finally:
            process.kill()
            process.communicate()


def failure(name: str, errors: str) -> str:
    """Return the message for a process that failed: the last lines of its stderr."""
    return "\n".join([f"{name}: the process failed:", *errors.splitlines()[-LAST_LINES:]])
