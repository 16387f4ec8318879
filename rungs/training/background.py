"""What runs beside the steps of a run: charts, samples, trackers, its mirror."""

import logging
from pathlib import Path
from typing import Self

from rungs.common.signals import StopSignal
from rungs.config.optimization_config import OptimizationConfig
from rungs.mirror.mirroring import Mirroring, NoMirroring
from rungs.parallel.processes import is_first_process
from rungs.run.folder import RunFolder
from rungs.sampling.sample_process import SampleProcess
from rungs.tracking.tracking_process import TrackingProcesses
from rungs.training.chart_process import ChartProcess

log = logging.getLogger("rungs")


class Background:
    """Starts what runs beside the steps, and tells it of each checkpoint. Of several processes, the
    first does so for all.

    Args:
        run: the run folder, whose lock is held.
        train: hyperparameters.
        mirror: what copies the run to its mirror.
        stop: a signal ends the wait for samples.
        datasets_dir: where its datasets are; None for where they are by default.

    Attributes:
        is_complete: set it once the run has taken its last step; then the end waits for the samples
            of all checkpoints. Those that are missing are made by the next start.
    """

    def __init__(
        self,
        run: RunFolder,
        train: OptimizationConfig,
        mirror: Mirroring | NoMirroring,
        stop: StopSignal,
        datasets_dir: Path | None = None,
    ) -> None:
        self._stop, self._mirror = stop, mirror
        self._charts = ChartProcess(run.path, datasets_dir)
        has_samples = bool(train.sample_prompts) and is_first_process()
        self._samples = SampleProcess(run, train, datasets_dir) if has_samples else None
        trackers = train.trackers if is_first_process() else ()
        self._trackers = TrackingProcesses(run, trackers)
        self.is_complete = False

    def checkpoint_saved(self) -> None:
        """Begin what follows a checkpoint; return at once."""
        self._charts.request()
        if self._samples is not None:
            self._samples.request()
        self._trackers.request()
        self._mirror.request()

    def draw_charts(self) -> None:
        """Have the charts drawn although there is no new checkpoint."""
        self._charts.request()

    def __enter__(self) -> Self:
        self._mirror.__enter__()
        self._trackers.start()
        if self._samples is not None:
            self._samples.request()
        return self

    def __exit__(self, *failure: object) -> None:
        self._charts.finish()
        if self._samples is not None:
            self._samples.finish(wait=self.is_complete, stop=self._stop)
        self._trackers.finish(self._stop)
        self._mirror.__exit__(*failure)
