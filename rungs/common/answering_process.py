"""A Python program that answers what it is sent, in a process that can be started again."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


class AnsweringProcess:
    """A process with pipes to its standard input and output and an environment of its own, which
    Ctrl-C doesn't reach.

    Args:
        program: the Python file that it runs. Neither the file's folder nor the working directory
            is searched for modules.
        environment: all of its environment variables.
        folder: its working directory; None for this process's.
        options: more of Python's options.
    """

    def __init__(
        self,
        program: Path,
        environment: Mapping[str, str],
        folder: str | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self._command = [sys.executable, "-P", *options, "-W", "ignore", str(program)]
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """End the process if there is one, and start it; raises OSError."""
        self.end()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            env=self._environment,
            start_new_session=True,  # it gets no Ctrl-C; all of it can be killed at once
        )

    @property
    def is_started(self) -> bool:
        """Whether it was started and not ended from here; it may have ended by itself."""
        return self._process is not None

    @property
    def pipes(self) -> tuple[BinaryIO, BinaryIO]:
        """Pipes to its input and from its output."""
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        return self._process.stdin, self._process.stdout  # type: ignore[return-value]

    def exit_code(self, seconds: float | None) -> int | None:
        """Wait for its end, at most so many seconds if given. Return the exit code, or minus the
        number of the signal that ended it; None if it still runs."""
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> None:
        """Kill the process and all that it started, if it was started."""
        if self._process is None:
            return
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the other one
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # what was not sent is lost
                pipe.close()
        self._process = None
