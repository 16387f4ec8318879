"""The process that sends a run to a tracker beside training: `python -m
rungs.integrations.tracking_feed RUN TRACKER IDENTITY`. Each input line announces new data, and an
empty one the end of the run. If training was killed, it sends what is there and leaves the run
open."""

import contextlib
import os
import queue
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from pydantic import Field

from rungs.common import disk, errors, paths, signals, strict_json
from rungs.common.helper_process import ENDED, KILLED, HelperProcess, delay_after, receive
from rungs.common.run_log import log
from rungs.config import run_config
from rungs.integrations.trackers import OpenTracker, TrackedRun, Tracker, find_tracker
from rungs.run import records, step_table
from rungs.run.folder import RunFolder

_SECONDS_BETWEEN = 2.0
"""Polling interval for new steps."""
_SECONDS_AT_END = 60.0
"""How long the end of a run waits for a tracker."""
_SECONDS_AFTER_SIGNAL = 10.0
_NOT_SENT = frozenset({step_table.STEP, "resumed"})


class TrackingProcesses:
    """Sends a run, whose lock must be held, to the trackers with these names. A tracker that is
    down causes warnings but delays no step; the next start sends what it lacks."""

    def __init__(self, run: RunFolder, names: Sequence[str]) -> None:
        place = str(run.path.resolve())
        self._processes = {
            name: HelperProcess(f"tracker {name}", "rungs.integrations.tracking_feed", place, name)
            for name in names
        }

    def start(self) -> None:
        """Start sending; return at once."""
        for process in self._processes.values():
            process.start()

    def request(self) -> None:
        """Have new data sent soon; return at once."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # it has exited, with a warning
                process.send("new")

    def finish(self, stop: signals.StopSignal) -> None:
        """Wait until everything is sent, up to a limit."""
        patience = _SECONDS_AT_END if stop.number is None else _SECONDS_AFTER_SIGNAL
        for name, process in self._processes.items():
            if not process.finish(stop, f"sending the rest to {name}", patience):
                log.warning("tracker %s: not everything was sent; the next start sends it", name)
            process.kill()


def forget(run: RunFolder) -> None:
    """Make the next start a new run in each tracker, as it goes back to before what was sent."""
    for sent in run.trackers.glob("*/sent.json"):
        sent.unlink()
        disk.try_to_remove(sent.parent)


class Sent(strict_json.StrictModel):
    """What a tracker has received of a run, recorded in the tracker's folder."""

    id: str
    last_step: int = -1
    last_metrics: tuple[str, ...] = Field(default=(), strict=False)
    """Names of the last step's metrics; more follow if a signal interrupted its validation."""
    last_sample_step: int = -1
    is_finished: bool = False
    """Whether the tracker was told the end of the run, after all of these."""


class Feed:
    """Sends new data in a run folder to a tracker, in which `open_tracker` opens the run."""

    def __init__(self, run: RunFolder, name: str, open_tracker: OpenTracker) -> None:
        self._run, self._open_tracker = run, open_tracker
        self._folder = run.trackers / name
        self._state = self._folder / "sent.json"
        self._metrics = paths.GrowingFile(run.metrics)
        self._tracker: Tracker | None = None
        try:
            self._sent = Sent.model_validate_json(strict_json.read_text(self._state))
        except ValueError:
            self._sent = Sent(id=uuid.uuid4().hex[:12])

    def send_new(self) -> None:
        """Send steps and samples that the tracker lacks."""
        if self._sent.is_finished and not self._has_more():
            return
        tracker = self._opened()
        for lines in self._metrics.new_lines():
            self._send_steps(tracker, lines)
        found = records.read_samples(self._run)
        for step in sorted({one.step for one in found if one.step > self._sent.last_sample_step}):
            tracker.log_samples(step, [one for one in found if one.step == step])
            self._note(last_sample_step=step, is_finished=False)

    def finish(self) -> None:
        """Send the rest, charts and final figures, and close the run."""
        self.send_new()
        if self._sent.is_finished:
            return
        tracker = self._opened()
        for chart in self._run.charts:
            tracker.log_chart(chart)
        tracker.finish(self._summary())
        self._tracker = None
        self._note(is_finished=True)

    def reopen(self) -> None:
        """Open the tracker anew for the next steps after a failure."""
        self._tracker = None
        self._metrics = paths.GrowingFile(self._run.metrics)

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._note()
            tracked = TrackedRun(
                id=self._sent.id,
                name=self._run.path.resolve().name,
                folder=self._folder,
                config=_flat_config(self._run.path),
                last_step=self._sent.last_step,
            )
            self._tracker = self._open_tracker(tracked)
            last = self._tracker.last_step()
            if last != self._sent.last_step:
                self._sent = self._sent.model_copy(update={"last_step": last, "last_metrics": ()})
        return self._tracker

    def _send_steps(self, tracker: Tracker, lines: list[bytes]) -> None:
        last, names = self._sent.last_step, self._sent.last_metrics
        is_new = False
        for step, metrics in _steps_in(lines):
            if step > last:
                last, names = step, ()
            elif step < last or not names:
                continue
            if new := {name: one for name, one in metrics.items() if name not in names}:
                names = (*names, *new)
                tracker.log_step(step, new)
                is_new = True
        if is_new:
            tracker.flush()
            self._note(last_step=last, last_metrics=names, is_finished=False)

    def _steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each step's number and metrics so far."""
        for lines in paths.GrowingFile(self._run.metrics).new_lines():
            yield from _steps_in(lines)

    def _has_more(self) -> bool:
        """Whether the run folder has steps or samples that the tracker lacks."""
        last = max((one.step for one in records.read_samples(self._run)), default=-1)
        last_step = max((step for step, _ in self._steps()), default=-1)
        return last > self._sent.last_sample_step or last_step > self._sent.last_step

    def _summary(self) -> dict[str, float]:
        """Return the last value of each metric, and the scores of the last checkpoints."""
        figures = {name: value for _, metrics in self._steps() for name, value in metrics.items()}
        scores = records.latest_scores(records.read(self._run, records.Evaluation))
        return figures | {f"{task} {metric}": one.value for (task, metric), one in scores.items()}

    def _note(self, **changes: Any) -> None:
        self._sent = self._sent.model_copy(update=changes)
        disk.replace_file(self._state, self._sent.model_dump_json() + "\n")


def _steps_in(lines: list[bytes]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step's number and metrics."""
    for values in step_table.steps_in(lines):
        yield values[step_table.STEP], dict(_numbers(values))


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and name not in _NOT_SENT:
            yield f"{prefix}{name}", float(value)


def _flat_config(folder: Path) -> dict[str, Any]:
    model, train = config = run_config.load_any_run(folder)
    parts = {"model": model.as_json(), Path(config.train_file).stem: train.as_json()}
    return {f"{part}.{key}": value for part, keys in parts.items() for key, value in keys.items()}


def main(run: RunFolder, name: str, lines: TextIO) -> None:
    """Send new data whenever a line arrives, and every few seconds."""
    received, feed = receive(lines), Feed(run, name, find_tracker(name))
    failures, last_line = 0, None
    while True:
        try:
            feed.finish() if last_line == ENDED else feed.send_new()
            failures = 0
        except Exception as error:  # of a tracker's library
            failures += 1
            print(errors.reason(error), file=sys.stderr, flush=True)
            feed.reopen()
        if last_line in (ENDED, KILLED):
            return
        delay = delay_after(failures) if failures else _SECONDS_BETWEEN
        last_line = _last_line(received, delay)


def _last_line(received: SimpleQueue[str], seconds: float) -> str | None:
    """Wait for a line; return the last one that has arrived by then, or None."""
    line = None
    with contextlib.suppress(queue.Empty):
        line = received.get(timeout=seconds)
        while True:
            line = received.get_nowait()
    return line


if __name__ == "__main__":
    commands = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that no library waits for a login
    tracked, tracker = RunFolder(Path(sys.argv[1])), sys.argv[2]
    try:
        (tracked.trackers / tracker).mkdir(parents=True, exist_ok=True)
        with disk.lock_file(
            tracked.trackers / tracker / "feed.lock", wait=True
        ):  # a killed start's may still run
            main(tracked, tracker, commands)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
