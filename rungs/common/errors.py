"""Errors that commands report in one line instead of a traceback, and their exit codes."""

from __future__ import annotations  # an older Python must reach the message of `command.py`

import contextlib
import difflib
import errno
import os
from typing import TYPE_CHECKING

from rungs.common.shown_text import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EXIT_BAD_INPUT = 2
"""Exit code of every command for bad input: a config, an argument, a dataset, a checkpoint."""
EXIT_FAILED = 1
"""Exit code of a command that could not finish."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C when there was nothing to save."""
_MOST_LINES, _MOST_CHARACTERS = 100, 600
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL = (*NO_SPACE, errno.EFBIG)
"""Errors of a full disk, an exhausted quota or a limit on file size."""
_ADVICE = "; use sys.set_int_max_str_digits() to increase the limit"
"""Python's, for numbers that are too long."""
OUT_OF_MEMORY_SIGNS = "RESOURCE_EXHAUSTED", "Out of memory"
"""Substrings of XLA's messages, on accelerators and CPUs."""
_NO_BACKEND = "Unable to initialize backend", "Unknown backend"
"""How JAX's messages begin if JAX_PLATFORMS names a platform that isn't here."""


class UserError(ValueError):
    """User input is wrong. Each line of the message says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))

    @classmethod
    def at(cls, place: object, problems: str | Iterable[str]) -> UserError:
        """Return an error with one line per problem, each beginning with `place`: a file, key or
        folder. `problems` is a sequence of lines, or a text."""
        lines = problems.splitlines() if isinstance(problems, str) else problems
        return cls("\n".join(f"{place}: {line}" for line in lines))


class RunFailure(RuntimeError):
    """A run cannot continue although its input is right: a full disk, non-finite weights. Each line
    of the message says what happened and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


@contextlib.contextmanager
def errors_at(place: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of the given kinds, if none are given of UserError, as a UserError, each line of
    which begins with `place`."""
    caught = kinds or (UserError,)
    try:
        yield
    except caught as error:
        lines = str(error).removesuffix(_ADVICE).splitlines() or [type(error).__name__]
        raise UserError("\n".join(f"{place}{line}" for line in lines)) from None


def check_characters(text: str, place: str) -> None:
    """Raise UserError if UTF-8 cannot encode a text from a JSON file, which may escape anything."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: has an invalid character (a lone surrogate)") from None


def _readable(message: str) -> str:
    """Return a message as printable lines of limited length without secrets."""
    message = without_secrets(message)
    lines = message.split("\n")
    lines = [readable_line(line) for line in lines if line.strip()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"… and {len(lines) - _MOST_LINES + 1:,} more"]
    return "\n".join(lines)


def readable_line(line: str) -> str:
    """Return a line without unprintable characters, shortened in the middle if long."""
    if len(line) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        line = f"{line[:half]} … {line[-half:]}"
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(escaped)


def reason(error: BaseException) -> str:
    """Return a library's error message as one line without secrets, or advice for programmers."""
    message = without_secrets(str(error)).removesuffix(_ADVICE)
    return " ".join(message.split()) or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Return "did you mean X?" for the known name most similar to `name`, with `prefix` before
    both; or `otherwise` if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise


def system_error(error: Exception) -> UserError | RunFailure | None:
    """Return the error to report for an exception about a file that can't be read or written right
    now, a lack of memory, or a platform that isn't here; None if it is about something else."""
    if isinstance(error, MemoryError):
        return RunFailure("the memory does not suffice for what this command reads or makes")
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS):
        what = readable_line(reason(error))
        return RunFailure(f"out of memory; make the batch, the texts or the model smaller: {what}")
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_BACKEND):
        return UserError(f"JAX_PLATFORMS: {reason(error)}")
    if not isinstance(error, OSError) or error.strerror is None:
        return None
    if error.filename is None:  # of writing to an open file
        if error.errno not in DISK_FULL:
            return None
        return RunFailure(
            f"a file could not be written: {error.strerror}; free some space, then run this again"
        )
    is_of_users = error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
    kind = UserError if is_of_users else RunFailure
    return kind(
        f"{os.fsdecode(error.filename)}: {error.strerror}; check that it is there and may be used,"
        " then run the same command again"
    )
