"""Work beside the steps of a run: charts, samples, trackers, alerts, its mirror; and the benchmarks
of `evaluate_every`, for which the steps wait."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.load import Start
from rungs.checkpointing.manifest import Checkpoint
from rungs.common.errors import UserError, errors_at, reason
from rungs.common.helper_process import HelperProcess
from rungs.common.run_log import log
from rungs.common.shown_text import command_line, quoted
from rungs.common.signals import Interrupted, StopSignal
from rungs.config.option_values import DATASETS_VARIABLE
from rungs.config.run_config import TRAIN_FILE
from rungs.config.train_config import TrainConfig
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.evaluation import harness, scoring
from rungs.evaluation.checkpoint_scores import Measured
from rungs.evaluation.prompt_samples import SampleProcess
from rungs.integrations.alerts import Alerts
from rungs.integrations.mirror_folder import MirrorRecord
from rungs.integrations.mirroring import Mirroring, NoMirroring
from rungs.integrations.tracking_feed import TrackingProcesses
from rungs.parallel.processes import is_first_process, is_multi_process, wait_for_first
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepRecord

CHARTS_MODULE = "rungs.report.run_charts"
MIN_SECONDS_BETWEEN_CHARTS = 30
"""Minimum time between drawings, each of which takes about half a second of a core."""
_BATCH_SIZE = 16
"""Texts per batch, as the default of evaluate.py."""


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
            self._process.send("draw")
        except OSError as error:  # it has exited; the next request starts another
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
    if url is None and MirrorRecord.of_run(run):
        log.warning("%s: has a mirror, which gets out of date without --mirror", run.path)
    return NoMirroring()


class Benchmarks:
    """The benchmarks of a run, and when they are due. Raises UserError if a benchmark doesn't
    exist, or its items cannot be read."""

    def __init__(self, run: RunFolder, train: TrainConfig, tokenizer: Tokenizer) -> None:
        self._run, self._train, self._tokenizer = run, train, tokenizer
        self._files = [run.path / name for name in train.benchmarks if name.endswith(".jsonl")]
        for file in self._files:
            scoring.read_items(file)
        names = tuple(name for name in train.benchmarks if not name.endswith(".jsonl"))
        folder = run.path / train.task_files if train.task_files else None
        self._tasks = harness.Tasks(names, folder, few_shot=None, limit=train.benchmark_limit)
        if names:
            with errors_at(f"{run.path / TRAIN_FILE}: benchmarks: "):
                harness.check_installed()
                harness.check_tasks(self._tasks)

    @classmethod
    def of(cls, run: RunFolder, train: TrainConfig, tokenizer: Path | str) -> "Benchmarks | None":
        """Return a run's benchmarks, or None; raises UserError. `tokenizer`: as for
        `load_tokenizer`."""
        if train.evaluate_every is None:
            return None
        if is_multi_process():
            raise UserError(
                f"{run.path / TRAIN_FILE}: evaluate_every: needs a single process; leave it out and"
                f" evaluate the checkpoints: {command_line('evaluate')} {quoted(run.path)}"
            )
        return cls(run, train, load_tokenizer(tokenizer))

    def are_due(self, step: int, is_last: bool) -> bool:
        """Whether the checkpoint of a step is measured, as the last one is, but not the first."""
        return is_last or (step > 0 and step % (self._train.evaluate_every or 1) == 0)

    def is_missing(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint that is due was not measured on all benchmarks."""
        found = records.read(self._run, records.Evaluation)
        measured = {one.task for one in found if one.checkpoint == checkpoint.folder.name}
        wanted = {*self._tasks.names, *(file.stem for file in self._files)}
        return self.are_due(checkpoint.step, is_last=False) and not wanted <= measured

    def measure(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Measure the complete checkpoint of a step and record the scores. Errors are logged as
        warnings; raises Interrupted if `should_stop` returns True."""
        saved = [one for one in list_checkpoints(self._run.checkpoints) if one.step == step]
        if not saved:  # its arrays were not finite, which ends the run
            return
        weights = saved[-1].weights.path
        try:
            measured = Measured(weights, self._tokenizer, _BATCH_SIZE, should_stop)
            self._measure(step, measured)
        except Interrupted:
            raise
        except Exception as error:  # of the harness and its libraries
            log.warning("step %d: not measured on its benchmarks: %s", step, reason(error))

    def _measure(self, step: int, measured: Measured) -> None:
        found: list[records.Evaluation] = []
        for file in self._files:
            found += measured.on_choices(file, self._train.benchmark_limit)
        if self._tasks.names:
            found += measured.on_tasks(self._tasks)
        scores = ", ".join(f"{one.task} {one.metric} {one.value:.4f}" for one in found)
        log.info("step %d: %s", step, scores)
