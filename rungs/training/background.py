"""What runs beside the steps of a run: charts, samples, trackers, alerts, its mirror."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rungs.common.signals import StopSignal
from rungs.config.optimization_config import OptimizationConfig
from rungs.mirror.mirroring import Mirroring, NoMirroring
from rungs.monitoring.alerts import Alerts
from rungs.parallel.processes import is_first_process, wait_for_first
from rungs.prompt_samples.sampler import SampleProcess
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepRecord
from rungs.tracking.feed import TrackingProcesses
from rungs.training.chart_process import ChartProcess

log = logging.getLogger("rungs")


class Background:
    """Starts what runs beside the steps, and tells it of each checkpoint. Of several processes, the
    first does so for all, and the others wait for it at the end.

    Args:
        run: the run folder, whose lock is held.
        train: hyperparameters.
        mirror: what copies the run to its mirror.
        start: with the hooks to tell of events.
        last_step: the one before this start; -1 for none.
        datasets_dir: where its datasets are; None for where they are by default.

    Attributes:
        stop: knows of signals, which also end the wait for samples and trackers.
        is_complete: set it once the run has taken its last step; then the end waits for the samples
            of all checkpoints. Those that are missing are made by the next start.
    """

    def __init__(
        self,
        run: RunFolder,
        train: OptimizationConfig,
        mirror: Mirroring | NoMirroring,
        start: StartOptions,
        last_step: int,
        datasets_dir: Path | None = None,
    ) -> None:
        self.stop = StopSignal()
        self._mirror = mirror
        self._charts = ChartProcess(run, datasets_dir)
        has_samples = bool(train.sample_prompts) and is_first_process()
        self._samples = SampleProcess(run, train, datasets_dir) if has_samples else None
        trackers = train.trackers if is_first_process() else ()
        self._trackers = TrackingProcesses(run, trackers)
        self._alerts = Alerts(run, start.on_event, last_step) if is_first_process() else None
        self.is_complete = False

    def step_taken(self, metrics: StepRecord) -> None:
        """Note a step that was taken."""
        if self._alerts is not None:
            self._alerts.step_taken(metrics)

    def checkpoint_saved(self) -> None:
        """Begin what follows a checkpoint; return at once."""
        self._charts.request()
        if self._samples is not None:
            self._samples.request()
        self._trackers.request()
        self._mirror.request()

    @contextlib.contextmanager
    def catching_up(self) -> Iterator[None]:
        """For a finished run: bring charts, samples, trackers and mirror up to date, which a kill
        may have left undone. That is no event."""
        self._alerts, self.is_complete = None, True
        with self:
            if is_first_process():
                self._charts.request()
            yield

    def __enter__(self) -> Self:
        self.stop.__enter__()
        self._mirror.__enter__()
        if self._alerts is not None:
            self._alerts.start()
        self._trackers.start()
        if self._samples is not None:
            self._samples.request()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._alerts is not None:
            self._note_end(self._alerts, error)
        self._charts.finish(self.stop)
        if self._samples is not None:
            self._samples.finish(wait=self.is_complete, stop=self.stop)
        self._trackers.finish(self.stop)
        if self._alerts is not None:
            self._alerts.finish()
        self._mirror.__exit__(kind, error, trace)
        if error is None:
            wait_for_first()
        self.stop.__exit__(kind, error, trace)

    def _note_end(self, alerts: Alerts, error: BaseException | None) -> None:
        if error is not None:
            lines = str(error).splitlines() or [type(error).__name__]
            alerts.note("failure", lines[0])
        elif self.is_complete:
            alerts.note("finish", "finished")
        else:
            alerts.note("stop", "stopped by a signal")
