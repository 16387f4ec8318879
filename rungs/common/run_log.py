"""Messages of a run, on the terminal and in its `train.log`."""

import contextlib
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from rungs.common import errors, shown_text

SECONDS_BETWEEN_LINES = 10.0
"""Interval of progress lines in `train.log`, and on stderr if that is not a terminal."""
SECONDS_UNTIL_PROGRESS = 1.0
"""Shorter work shows no progress."""

log = logging.getLogger("rungs")


class Terminal:
    """stderr, for messages and progress bars. A closed stderr does not stop a run: after
    `train.py … 2>&1 | tee log`, Ctrl-C ends `tee` too."""

    wants_bars = True

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    @property
    def shows_bars(self) -> bool:
        """Whether this is a terminal with a width; a pseudo-terminal may have none."""
        return self.wants_bars and self.isatty() and os.get_terminal_size(self.fileno()).columns > 0


TERMINAL = Terminal()


class _PlainLines(Terminal):
    """stderr for a progress bar printed as new lines, without carriage returns."""

    def write(self, text: str) -> int:
        line = text.strip()
        return super().write(f"{line}\n") if line else 0


def byte_progress(what: str, size: int) -> "tqdm[NoReturn]":
    """Return the progress over `size` bytes: a bar, or plain lines off a terminal."""
    look: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": SECONDS_UNTIL_PROGRESS}
    if TERMINAL.shows_bars:
        return tqdm(total=size, desc=what, file=TERMINAL, **look)
    look |= {"ncols": 0, "mininterval": SECONDS_BETWEEN_LINES}
    return tqdm(total=size, desc=what, file=_PlainLines(), **look)


class _AboveTheBar(logging.Handler):
    """Writes messages above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=TERMINAL)


def _make_safe(record: logging.LogRecord) -> bool:
    """Remove secrets and control characters from a message. Used as a logging filter."""
    record.msg, record.args = shown_text.shown(record.getMessage()), ()
    return True


class _Json(logging.Formatter):
    """A message as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        values = {"time": time.isoformat(timespec="milliseconds"), "level": record.levelname}
        return json.dumps(values | {"message": record.getMessage()})


class _File(logging.FileHandler):
    """Writes messages to a file. A failed write does not stop the run: the first failure is
    reported on the terminal, and later messages are still tried."""

    _has_failed = False

    def handleError(self, _: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not self._has_failed:
            self._has_failed = True
            TERMINAL.write(f"{self.baseFilename}: could not be written: {error}\n")


class _Relay(logging.Handler):
    """Passes on a library's warnings, but not its errors, which it also raises."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            log.warning("%s: %s", record.module, record.getMessage())


def log_to_terminal(*, quiet: bool = False, as_json: bool = False) -> None:
    """Write messages, and warnings of Orbax, to the terminal from now on, and keep them in memory
    for `log_to_file`. `quiet` shows only warnings; `as_json` writes each message as an object with
    time, level and message. Either turns off progress bars."""
    orbax = logging.getLogger("absl")
    orbax.setLevel(logging.WARNING)
    orbax.handlers, orbax.propagate = [_Relay()], False
    log.setLevel(logging.INFO)
    log.propagate = False
    terminal = _AboveTheBar(logging.WARNING if quiet else logging.INFO)
    terminal.addFilter(_make_safe)
    if as_json:
        terminal.setFormatter(_Json())
    TERMINAL.wants_bars = not (quiet or as_json)
    log.handlers = [terminal, MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)]


def log_to_file(path: Path) -> None:
    """Also write messages to this file from now on, with UTC times, including those kept since
    `log_to_terminal`. If the file cannot be written, only the terminal gets them."""
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    try:
        file = _File(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        log.warning("%s: cannot be written to: %s", path, error.strerror)
        return
    file.setFormatter(formatter)
    file.addFilter(_make_safe)
    for memory in [h for h in log.handlers if isinstance(h, MemoryHandler)]:
        memory.setTarget(file)
        memory.flush()
        log.removeHandler(memory)
    log.addHandler(file)


@contextlib.contextmanager
def log_failures() -> Iterator[None]:
    """Log a `RunFailure` to the file. The command itself reports it on the terminal."""
    try:
        yield
    except errors.RunFailure as failure:
        log_to_file_only(logging.ERROR, str(failure))
        raise


def log_to_file_only(level: int, text: str) -> None:
    """Write lines to the log file, if there is one, but not to the terminal."""
    for line in text.splitlines():
        record = log.makeRecord(log.name, level, "", 0, line, (), None)
        for file in [handler for handler in log.handlers if isinstance(handler, _File)]:
            file.handle(record)
