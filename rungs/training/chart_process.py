"""Charts redrawn beside the training loop, in a process of their own that yields to it."""

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

log = logging.getLogger("rungs")

CHARTS_COMMAND = [sys.executable, "-m", "rungs.charts.run_charts"]
SECONDS_BETWEEN = 30
"""From one drawing's beginning to the next one's; each takes some two seconds of a core."""


class ChartDrawer:
    """Redraws a run's charts on request, one drawing at a time, and not too often: a request that
    comes too soon is kept for the next one or for `finish`."""

    def __init__(self, run_folder: Path) -> None:
        nice = ["nice", "-n", "19"] if shutil.which("nice") else []
        self._command = [*nice, *CHARTS_COMMAND, str(run_folder)]
        self._drawing: subprocess.Popen[str] | None = None
        self._stale = False
        self._not_before = time.monotonic()

    def request(self) -> None:
        """Have the charts redrawn soon; returns at once."""
        is_drawing = self._drawing is not None and self._drawing.poll() is None
        if is_drawing or time.monotonic() < self._not_before:
            self._stale = True
        else:
            self._report()
            self._begin()

    def finish(self) -> None:
        """Wait until the charts show all that was there at the last request."""
        self._report()
        if self._stale:
            self._begin()
            self._report()

    def _begin(self) -> None:
        self._stale = False
        self._not_before = time.monotonic() + SECONDS_BETWEEN
        try:
            self._drawing = subprocess.Popen(
                self._command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C stops the training, not the drawing
            )
        except OSError as error:
            log.warning("the charts could not be drawn: %s", error)

    def _report(self) -> None:
        """Wait for the drawing under way, and say where it failed."""
        if self._drawing is None:
            return
        _, errors = self._drawing.communicate()
        if self._drawing.returncode:
            last_line = (errors.strip().splitlines() or ["no message"])[-1]
            log.warning("the charts could not be drawn: %s", last_line)
        self._drawing = None
