"""Sending a run to its trackers beside training: a process for each."""

import contextlib
import logging
import shutil
from collections.abc import Sequence

from rungs.common.helper_process import HelperProcess
from rungs.common.signals import StopSignal
from rungs.run.folder import RunFolder

_SECONDS_AT_END = 60.0
"""How long the end of a run waits for a tracker."""

_SECONDS_AFTER_SIGNAL = 10.0

log = logging.getLogger("rungs")


class TrackingProcesses:
    """Sends a run to its trackers. One that is down costs warnings, never a step; what it lacks is
    sent by the next start.

    Args:
        run: the run folder, whose lock is held.
        names: of the trackers.
    """

    def __init__(self, run: RunFolder, names: Sequence[str]) -> None:
        self._run, self._names = run, names
        self._processes: dict[str, HelperProcess] = {}

    def start(self) -> None:
        """Start sending; return at once."""
        for name in self._names:
            arguments = str(self._run.path.resolve()), name, self._run.identity
            self._processes[name] = HelperProcess.start(
                f"tracker {name}", "rungs.tracking.feed", *arguments
            )

    def request(self) -> None:
        """Have what is new sent soon; return at once."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # it has ended, with a warning
                process.send("new")

    def finish(self, stop: StopSignal) -> None:
        """Wait until everything is sent, but not for ever."""
        patience = _SECONDS_AT_END if stop.number is None else _SECONDS_AFTER_SIGNAL
        for name, process in self._processes.items():
            if not process.finish(stop, f"sending the rest to {name}", patience):
                log.warning("tracker %s: not everything was sent; the next start sends it", name)
            process.kill()


def forget(run: RunFolder) -> None:
    """Make the next start a new run in each tracker: this one goes back behind what was sent."""
    for sent in run.trackers.glob("*/sent.json"):
        sent.unlink()
        shutil.rmtree(sent.parent, ignore_errors=True)
