"""Begin and run a root command. Commands import this module, and begin, before all else."""

from __future__ import annotations  # so that an older Python reaches the error message

import contextlib
import gc
import importlib.metadata
import math
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from rungs.common import errors, machine, shown_text, signals

if TYPE_CHECKING:
    import click

PROCESS_BEGAN = time.monotonic()
"""`time.monotonic` when the process began, just after Python started."""
_FEWEST_FILES, _ENOUGH_FILES = 64, 256
"""Open files that a command needs, and the number it requests if the limit is lower."""


def begin_command() -> None:
    """Set up the process: an uncaught exception is printed without control characters, a missing
    library is reported in one line; standard streams and signals work however it was launched."""
    sys.excepthook = _report
    os.environ.pop("MPLBACKEND", None)  # not needed, and an unknown back end raises
    shown_text.prepare_streams()
    signals.restore_inherited()
    machine.allow_open_files(_ENOUGH_FILES)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, which would take a fifth of the time until the first step.
    Objects that modules create stay alive, so they are also exempt later; see `gc.freeze`."""
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
    is_ours = Path(sys.argv[0]).resolve().is_relative_to(Path(__file__).resolve().parents[2])
    if isinstance(error, ImportError) and is_ours and not _is_installed():
        lacks = f"no module {error.name}" if error.name else "not what Rungs needs"
        line = f"error: {sys.executable} has {lacks}; use uv, which installs it:"
        print(line, "uv run", shlex.join(sys.argv), file=sys.stderr)
    else:
        sys.stderr.write(shown_text.shown("".join(traceback.format_exception(kind, error, trace))))


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


def run_command(
    command: click.Command,
    *,
    empty_from: float = math.inf,
    printing: Collection[str] | None = None,
) -> None:
    """Run a command. Errors go to stderr in one line each; the exit code is 2 for a `UserError`, 1
    for a `RunFailure` or a file that can't be used, 130 for Ctrl-C and 141 if nobody reads the
    output any more. No option may be empty, and of the other arguments only those from `empty_from`
    on, counted from 1. A command that prints doesn't begin if stdout is closed: one with an option
    in `printing`, or all if that is None."""
    import click

    begin_command()
    shown_text.protect_terminal()
    output = _Output(sys.stdout)
    try:
        _refuse_launch(command, empty_from)
        if printing is None or not {one.partition("=")[0] for one in sys.argv}.isdisjoint(printing):
            output.refuse_closed()
        with contextlib.redirect_stdout(output):
            try:
                command.main(standalone_mode=False)
            finally:
                sys.stdout.flush()
    except (errors.UserError, errors.RunFailure) as error:
        _end_with(error)
    except click.exceptions.NoArgsIsHelpError as error:
        _say(error.format_message())
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context else Path(sys.argv[0]).name
        message = re.sub(r"\s*\n\s*", " ", error.format_message()).removesuffix(".")
        message = message[:1].lower() + message[1:]
        _end_with(errors.UserError(f"{message} (see {name} --help)"))
    except click.Abort:
        sys.exit(errors.EXIT_INTERRUPTED)
    except Exception as error:
        if (reported := errors.environment_error(error) or errors.system_error(error)) is None:
            raise
        _end_with(reported)


def _refuse_launch(command: click.Command, empty_from: float) -> None:
    """Raise UserError if a value is empty, or the process can't open files or see its folder."""
    if empty := _first_empty(command, sys.argv[1:], empty_from):
        raise errors.UserError(
            f"{empty}: the value is empty, as that of a shell variable that is not set; give one,"
            " or leave it out"
        )
    if (files := machine.allow_open_files(_ENOUGH_FILES)) < _FEWEST_FILES:
        raise errors.UserError(
            f"only {files} files may be open at once, which libraries fail with; allow more with"
            f" ulimit -n {_ENOUGH_FILES}"
        )
    try:
        Path.cwd()
    except OSError as error:
        why = "it was deleted" if isinstance(error, FileNotFoundError) else error.strerror
        raise errors.UserError(
            f"the working directory can't be used: {why}; change to another"
        ) from None


def _first_empty(command: click.Command, arguments: list[str], empty_from: float) -> str | None:
    """Return the name of the first option, or the number of the first argument, whose value is
    empty. An empty value would count as not given, or as the current folder."""
    flags = {name for one in command.params if getattr(one, "is_flag", False) for name in one.opts}
    before, others = "", 0
    for number, argument in enumerate(arguments, start=1):
        name, separator, value = argument.partition("=")
        if name.startswith("--") and separator and not value:
            return name
        is_value = before.startswith("--") and "=" not in before and before not in {*flags, "--"}
        others += not is_value and not argument.startswith("--")
        if not argument and (is_value or others < empty_from):
            return before if is_value else f"argument {number}"
        before = argument
    return None


def _end_with(error: errors.UserError | errors.RunFailure) -> NoReturn:
    for line in str(error).splitlines():
        _say(f"error: {line}")
    sys.exit(errors.EXIT_BAD_INPUT if isinstance(error, errors.UserError) else errors.EXIT_FAILED)


class _Output:
    """stdout. If writing fails, the command ends, with an error line unless the reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def refuse_closed(self) -> None:
        """End the command if stdout was closed at the start."""
        if isinstance(self._stream, shown_text.ClosedStream):
            _end_with(
                errors.UserError("stdout is closed, so nothing can be printed; leave out >&-")
            )

    def write(self, text: str) -> int:
        self.refuse_closed()
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
            # else Python would try to write the rest again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(errors.EXIT_NOT_READ)
            _end_with(errors.RunFailure(f"the output could not be written: {error.strerror}"))
