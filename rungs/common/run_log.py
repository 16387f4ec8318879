"""What happens in a run, said on the terminal and kept in its `train.log`."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm import tqdm

from rungs.common.errors import RunFailure

log = logging.getLogger("rungs")


class Terminal:
    """stderr, for messages and bars. One that is gone is no reason to stop: after
    `train.py … 2>&1 | tee log`, Ctrl-C ends `tee` too."""

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


TERMINAL = Terminal()


class _AboveTheBar(logging.Handler):
    """Writes without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=TERMINAL)


class _File(logging.FileHandler):
    """Messages in a file. One that it has no room for is no reason to stop: it is said once, on the
    terminal, and what follows is tried again."""

    _has_failed = False

    def handleError(self, _: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not self._has_failed:
            self._has_failed = True
            TERMINAL.write(f"{self.baseFilename}: could not be written: {error}\n")


def log_to_terminal() -> None:
    """Messages on the terminal from now on; those before `log_to_file` are remembered for it. What
    libraries note of errors is left out, for we get each as an exception and say it ourselves."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [_AboveTheBar(), MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)]


def only_warnings() -> None:
    """No more than warnings from now on: another process says the rest."""
    log.setLevel(logging.WARNING)


def log_to_file(path: Path) -> None:
    """From now on write messages to this file too, each with its UTC time. Messages logged since
    `log_to_terminal` are added first. If the file cannot be written, only the terminal gets
    them."""
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    try:
        file = _File(path, encoding="utf-8")
    except OSError as error:
        log.warning("%s: cannot be written to: %s", path, error.strerror)
        return
    file.setFormatter(formatter)
    for memory in [h for h in log.handlers if isinstance(h, MemoryHandler)]:
        memory.setTarget(file)
        memory.flush()
        log.removeHandler(memory)
    log.addHandler(file)


@contextlib.contextmanager
def log_failures() -> Iterator[None]:
    """Note what the run cannot go on for in the file; the terminal is told otherwise."""
    try:
        yield
    except RunFailure as failure:
        _note(str(failure))
        raise


def _note(text: str) -> None:
    for line in text.splitlines():
        record = log.makeRecord(log.name, logging.ERROR, "", 0, line, (), None)
        for file in [handler for handler in log.handlers if isinstance(handler, _File)]:
            file.handle(record)
