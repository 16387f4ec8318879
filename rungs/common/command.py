"""Begin and run a command of the root. Commands import this file, and begin, before all else."""

from __future__ import annotations  # so that an older Python gets to the error message

import contextlib
import gc
import importlib.metadata
import io
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from rungs.common import standard_streams
from rungs.common.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_READ,
    RunFailure,
    UserError,
    environment_error,
    readable_line,
)
from rungs.common.shown_text import shown

if TYPE_CHECKING:
    import click


def begin_command() -> None:
    """From now on report an exception that ends the process without control characters, and one of
    a library that is not installed in one line; open the standard streams that were closed."""
    sys.excepthook = _report
    os.environ.pop("MPLBACKEND", None)  # charts need none, and one that Matplotlib lacks ends it
    standard_streams.open_missing()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection: what a module creates stays, and searching it for garbage,
    over and over while more is created, takes a fifth of the time until a first step. Nor is it
    searched later; see `gc.freeze`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception that ends the process."""
    if isinstance(error, ImportError) and _is_script_of_ours() and not _is_installed():
        lacks = f"no module {error.name}" if error.name else "not what Rungs needs"
        line = f"error: {sys.executable} has {lacks}; use uv, which installs it:"
        print(line, "uv run", shlex.join(sys.argv), file=sys.stderr)
    else:
        sys.stderr.write(shown("".join(traceback.format_exception(kind, error, trace))))


def _is_script_of_ours() -> bool:
    return Path(sys.argv[0]).resolve().is_relative_to(Path(__file__).resolve().parents[2])


def _is_installed() -> bool:
    """Return whether this interpreter has Rungs with its dependencies, as uv's has."""
    try:
        importlib.metadata.distribution("rungs-lm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the exit code counts even if nobody reads
        print(line, file=sys.stderr, flush=True)


def run_command(command: click.Command) -> None:
    """Run a command. Errors go to stderr in one line each; the exit code is 2 for a `UserError`, 1
    for a `RunFailure`, 130 for Ctrl-C and 141 if nobody reads the output any more."""
    import click

    begin_command()
    standard_streams.protect_terminal()
    try:
        with contextlib.redirect_stdout(_Output(sys.stdout)):
            try:
                command.main(standalone_mode=False)
            finally:
                sys.stdout.flush()
    except (UserError, RunFailure) as error:
        _end_with(error)
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        for line in usage.getvalue().rstrip("\n").split("\n"):
            _say(readable_line(line))
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if (reported := environment_error(error)) is None:
            raise
        _end_with(reported)


def _end_with(error: UserError | RunFailure) -> NoReturn:
    for line in str(error).splitlines():
        _say(f"error: {line}")
    sys.exit(EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED)


class _Output:
    """stdout, whose failure ends the command: silently if nobody reads it any more, else in one
    line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if isinstance(self._stream, standard_streams.Closed):
            _end_with(UserError("stdout is closed, so nothing can be printed; leave out >&-"))
        with self._ending():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._ending():
            self._stream.flush()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # what is left to write, Python would try to write again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(EXIT_NOT_READ)
            _end_with(RunFailure(f"the output could not be written: {error.strerror}"))
