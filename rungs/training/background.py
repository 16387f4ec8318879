"""Work beside the steps of a run: charts, samples, trackers, alerts, its mirror."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rungs.checkpointing.start import Start
from rungs.common.helper_process import HelperProcess
from rungs.common.run_log import log
from rungs.common.signals import StopSignal
from rungs.config.option_values import DATASETS_VARIABLE
from rungs.evaluation.prompt_samples import SampleProcess
from rungs.integrations.alerts import Alerts
from rungs.integrations.mirroring import Mirroring, NoMirroring, has_mirror
from rungs.integrations.tracking_feed import TrackingProcesses
from rungs.parallel.processes import is_first_process, wait_for_first
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepRecord

CHARTS_MODULE = "rungs.report.drawer"
MIN_SECONDS_BETWEEN_CHARTS = 30
"""Minimum time between drawings, each of which takes about half a second of a core."""


class ChartProcess:
    """Redraws a run's charts on request, in one process. A request too soon after the last drawing
    waits for the next request or `finish`."""

    def __init__(self, run: RunFolder, datasets_dir: Path | None = None) -> None:
        environment = {DATASETS_VARIABLE: str(datasets_dir)} if datasets_dir else {}
        self._process = HelperProcess(
            "charts", CHARTS_MODULE, str(run.path), environment=environment
        )
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
        self._process.finish(stop, "drawing the charts")
        self._process.kill()

    def _draw(self) -> None:
        self._is_outdated = False
        self._not_before = time.monotonic() + MIN_SECONDS_BETWEEN_CHARTS
        try:
            try:
                self._process.send("draw")
            except OSError:  # it has exited
                self._process.kill()
                self._process.send("draw")
        except OSError as error:
            log.warning("the charts could not be drawn: %s", error)
            self._process.kill()


class Background:
    """Starts the work beside the steps of a start, whose run's lock must be held, and notifies it
    of each checkpoint. With several processes, the first does so; others wait for it at the end."""

    def __init__(self, start: Start, datasets_dir: Path | None = None) -> None:
        run, train = start.run, start.config.train
        self.stop = StopSignal()
        """Records signals, which also end the wait for samples and trackers."""
        self._mirror = _mirror_of(start)
        hooks, last_step = start.options.on_event, start.first_step - 1
        self._alerts = Alerts(run, hooks, last_step) if is_first_process() else None
        self._trackers = TrackingProcesses(run, train.trackers)
        self._samples = SampleProcess(run, train, datasets_dir)
        self._charts = ChartProcess(run, datasets_dir)
        self.is_complete = False
        """To be set once the run has taken its last step: the end then waits for the samples of all
        checkpoints. Otherwise the next start makes the missing ones."""
        self.early_end: str | None = None
        """Why `stop_after` ended the run."""

    def step_taken(self, metrics: StepRecord) -> None:
        """Record that a step was taken."""
        if self._alerts is not None:
            self._alerts.step_taken(metrics)

    def checkpoint_saved(self) -> None:
        """Start the work after a checkpoint; return at once."""
        for worker in (self._charts, self._samples, self._trackers, self._mirror):
            worker.request()

    @contextlib.contextmanager
    def catching_up(self) -> Iterator[None]:
        """For a finished run: after a kill, update charts, samples, trackers and mirror."""
        self._alerts, self.is_complete = None, True
        with self.working():
            if is_first_process():
                self._charts.request()
            yield

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work beside the steps in the block; at its end, wait for what is left."""
        with self.stop:
            with self._work() if is_first_process() else contextlib.nullcontext():
                yield
            wait_for_first()

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        with self._mirror, contextlib.ExitStack() as ends:  # which come in reverse order
            if self._alerts is not None:
                self._alerts.start()
                ends.callback(self._alerts.finish)
            self._trackers.start()
            ends.callback(self._trackers.finish, self.stop)
            self._samples.request()
            ends.callback(lambda: self._samples.finish(wait=self.is_complete, stop=self.stop))
            ends.callback(self._charts.finish, self.stop)
            ends.push(self._note_end)
            yield

    def _note_end(self, _: object, error: BaseException | None, __: object) -> None:
        if self._alerts is None:
            return
        if error is not None:
            lines = str(error).splitlines() or [type(error).__name__]
            self._alerts.note_end("failure", lines[0])
        elif self.is_complete:
            early = f" early: {self.early_end}" if self.early_end else ""
            self._alerts.note_end("finish", f"finished{early}")
        else:
            self._alerts.note_end("stop", "stopped by a signal")


def _mirror_of(start: Start) -> Mirroring | NoMirroring:
    """Return the copier to the run's mirror; the first process copies for all."""
    run, url = start.run, start.options.mirror
    if url is not None and is_first_process():
        return Mirroring(run, url, start.config.train.keep_checkpoints)
    if url is None and has_mirror(run):
        log.warning("%s: has a mirror, which gets out of date without --mirror", run.path)
    return NoMirroring()
