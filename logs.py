"""What happens in a run, said on the terminal and kept in its `train.log`."""

import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

log = logging.getLogger("rungs")


class _AboveTheBar(logging.Handler):
    """Writes to stderr without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def say() -> None:
    """Messages on the terminal from now on."""
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [_AboveTheBar()]


def keep(path: Path) -> None:
    """Messages in this file, too, with their time in UTC."""
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(formatter)
    log.addHandler(handler)
