"""Begin and run a root command. Commands import this module, and begin, before all else."""

from __future__ import annotations  # so that an older Python reaches the error message

import contextlib
import gc
import importlib.metadata
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from rungs.common import errors

if TYPE_CHECKING:
    import click

PROCESS_BEGAN = time.monotonic()
"""`time.monotonic` when the process began, just after Python started."""


def begin_command() -> None:
    """Set up the process: a missing library is reported in one line, and so is Windows."""
    sys.excepthook = _report
    if sys.platform == "win32":
        end_with(
            errors.UserError("Rungs needs Linux or another POSIX system; on Windows, use WSL2")
        )


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
    try:
        importlib.metadata.distribution("rungs-lm")
    except importlib.metadata.PackageNotFoundError:
        if isinstance(error, ImportError):  # not uv's interpreter
            lacks = f"no module {error.name}" if error.name else "not what Rungs needs"
            line = f"error: {sys.executable} has {lacks}; use uv, which installs it:"
            print(line, "uv run", shlex.join(sys.argv), file=sys.stderr)
            return
    sys.__excepthook__(kind, error, trace)


def run_command(command: click.Command) -> None:
    """Run a command. Errors go to stderr in one line each; the exit code is 2 for a `UserError`, 1
    for a `RunFailure` or a file that can't be used, 130 for Ctrl-C, and 1 without a line if
    nobody reads the output any more."""
    import click

    begin_command()
    try:
        _refuse_empty()
        command.main(standalone_mode=False)
        sys.stdout.flush()
    except (errors.UserError, errors.RunFailure) as error:
        end_with(error)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context else os.path.basename(sys.argv[0])  # noqa: PTH119
        message = re.sub(r"\s*\n\s*", " ", error.format_message()).removesuffix(".")
        message = message[:1].lower() + message[1:]
        end_with(errors.UserError(f"{message} (see {name} --help)"))
    except click.Abort:
        sys.exit(errors.EXIT_INTERRUPTED)
    except BrokenPipeError:
        # else Python would try to write the rest again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(errors.EXIT_FAILED)
    except Exception as error:
        if (reported := errors.system_error(error)) is None:
            raise
        end_with(reported)


def _refuse_empty() -> None:
    """Raise UserError if an option or the first argument is empty, as it would count as not given,
    or as the current folder."""
    for before, argument in itertools.pairwise(["", *sys.argv[1:]]):
        name, equals, value = argument.partition("=")
        is_value = before != "--" and (before.startswith("--") or not before)
        if (is_value and not argument) or (name.startswith("--") and equals and not value):
            option = name if equals else before or "argument 1"
            raise errors.UserError(
                f"{option}: the value is empty, as that of a shell variable that is not set; give"
                " one, or leave it out"
            )


def end_with(error: errors.UserError | errors.RunFailure) -> NoReturn:
    """End the process with the error's lines and its exit code."""
    with contextlib.suppress(OSError):  # the exit code counts even if nobody reads
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(errors.EXIT_BAD_INPUT if isinstance(error, errors.UserError) else errors.EXIT_FAILED)
