"""Charts redrawn while training continues, in another process of low priority."""

import logging
import subprocess
import time
from pathlib import Path

from rungs.common.low_priority import start_python
from rungs.config.option_values import DATASETS_VARIABLE

log = logging.getLogger("rungs")

DRAW = ["-m", "rungs.charts.run_charts"]
"""Arguments of Python."""
MIN_SECONDS_BETWEEN = 30
"""From one start of the process to the next; each takes about two seconds of a core."""


class ChartProcess:
    """Redraws a run's charts on request, in one process at a time.

    A request that comes too soon after the last one waits for the next request or `finish`.

    Args:
        run_folder: the run.
        datasets_dir: where its datasets are; None for where they are by default.
    """

    def __init__(self, run_folder: Path, datasets_dir: Path | None = None) -> None:
        self._run_folder = run_folder
        self._environment = {DATASETS_VARIABLE: str(datasets_dir)} if datasets_dir else {}
        self._process: subprocess.Popen[str] | None = None
        self._is_outdated = False
        self._not_before = time.monotonic()

    def request(self) -> None:
        """Have the charts redrawn soon; return at once."""
        is_running = self._process is not None and self._process.poll() is None
        if is_running or time.monotonic() < self._not_before:
            self._is_outdated = True
        else:
            self._wait()
            self._start()

    def finish(self) -> None:
        """Wait until the charts show everything up to the last request."""
        self._wait()
        if self._is_outdated:
            self._start()
            self._wait()

    def _start(self) -> None:
        self._is_outdated = False
        self._not_before = time.monotonic() + MIN_SECONDS_BETWEEN
        try:
            self._process = start_python([*DRAW, str(self._run_folder)], self._environment)
        except OSError as error:
            log.warning("the charts could not be drawn: %s", error)

    def _wait(self) -> None:
        """Wait for the process if there is one; log a warning if it failed."""
        if self._process is None:
            return
        _, errors = self._process.communicate()
        if self._process.returncode:
            last_line = (errors.strip().splitlines() or ["no message"])[-1]
            log.warning("the charts could not be drawn: %s", last_line)
        self._process = None
