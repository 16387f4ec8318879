"""What happens in a run, said on the terminal and kept in its `train.log`."""

import contextlib
import logging
import sys
import time
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm import tqdm

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


def say() -> None:
    """Messages on the terminal from now on; those before `keep` are remembered for it."""
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [_AboveTheBar(), MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)]


def only_warnings() -> None:
    """No more than warnings from now on: another process says the rest."""
    log.setLevel(logging.WARNING)


def keep(path: Path) -> None:
    """Messages in this file, too, with their time in UTC, and those since `say`."""
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(formatter)
    for memory in [h for h in log.handlers if isinstance(h, MemoryHandler)]:
        memory.setTarget(file)
        memory.flush()
        log.removeHandler(memory)
    log.addHandler(file)
