"""Charts redrawn while training continues, in another process of low priority."""

import logging
import time
from pathlib import Path

from rungs.common.helper_process import HelperProcess
from rungs.common.signals import StopSignal
from rungs.config.option_values import DATASETS_VARIABLE
from rungs.run.folder import RunFolder

log = logging.getLogger("rungs")

MODULE = "rungs.charts.drawer"
MIN_SECONDS_BETWEEN = 30
"""From one drawing to the next; each takes about half a second of a core."""


class ChartProcess:
    """Redraws a run's charts on request, in one process.

    A request that comes too soon after the last one waits for the next request or `finish`.

    Args:
        run: the run folder.
        datasets_dir: where its datasets are; None for where they are by default.
    """

    def __init__(self, run: RunFolder, datasets_dir: Path | None = None) -> None:
        self._run = run
        self._environment = {DATASETS_VARIABLE: str(datasets_dir)} if datasets_dir else {}
        self._process: HelperProcess | None = None
        self._is_outdated = False
        self._not_before = time.monotonic()

    def request(self) -> None:
        """Have the charts redrawn soon; return at once. A failure is logged as a warning."""
        if time.monotonic() < self._not_before:
            self._is_outdated = True
        else:
            self._draw()

    def finish(self, stop: StopSignal) -> None:
        """Wait until the charts show everything up to the last request, or a signal arrives."""
        if self._is_outdated:
            self._draw()
        if self._process is not None:
            self._process.finish(stop, "drawing the charts")
            self._end()

    def _draw(self) -> None:
        self._is_outdated = False
        self._not_before = time.monotonic() + MIN_SECONDS_BETWEEN
        try:
            if not self._is_asked():
                self._end()
                arguments = str(self._run.path), self._run.identity
                self._process = HelperProcess(
                    "charts", MODULE, *arguments, environment=self._environment
                )
                self._process.send("draw")
        except OSError as error:
            log.warning("the charts could not be drawn: %s", error)
            self._end()

    def _is_asked(self) -> bool:
        """Ask the process for the charts; return whether there is one."""
        if self._process is None:
            return False
        try:
            self._process.send("draw")
        except OSError:  # it has ended
            return False
        return True

    def _end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
        self._process = None
