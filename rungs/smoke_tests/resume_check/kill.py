"""Kill a training process at a random moment of a chosen phase, as a short training mostly consists
of its start. The phase is inferred from the files in the run folder."""

import contextlib
import math
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rungs.checkpointing.checkpoint_folder import list_checkpoints, unfinished_checkpoints
from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.run.folder import RunFolder

Phase = Literal["start", "compile", "step", "validation", "save", "end"]
EARLY: tuple[Phase, ...] = ("start", "compile")
"""Phases before there is anything new to lose."""
LATE: tuple[Phase, ...] = ("step", "validation", "save")
_POLL_SECONDS = 0.0005
_MAX_ATTEMPTS = 10


class StepPlan(NamedTuple):
    """The steps of a run and its checkpoints."""

    steps: int
    interval: int
    """Steps between checkpoints."""


class Activity(NamedTuple):
    """Activity of a training process."""

    phase: Phase
    step: int
    """The next step, or the one being saved."""

    def __str__(self) -> str:
        if self.phase == "start":
            return "start, before compilation"
        if self.phase == "compile":
            return f"compilation, before step {self.step}"
        prefix = "save of " if self.phase == "save" else ""
        return f"{prefix}step {self.step}" + " or its validation" * (self.phase == "validation")


Observed = tuple[Activity, float]
"""The activity of a process, inferred from what it left behind, and the seconds since its start."""


class TrainingProcess:
    """A process that trains a run, observed from outside, with its output in the file `output`."""

    def __init__(
        self, run: RunFolder, plan: StepPlan, command: Sequence[str], output: Path
    ) -> None:
        self._run, self._plan, self.output = run, plan, output
        checkpoints = list_checkpoints(self._run.checkpoints)
        self._first_step = checkpoints[-1].step + 1 if checkpoints else 0
        self._logged_bytes = _size(self._run.log)
        self._start = time.monotonic()
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def activity(self) -> Activity:
        """Return what the process is doing or, once dead, was doing."""
        if _size(self._run.log) == self._logged_bytes:
            return Activity("start", self._first_step)
        for unfinished in unfinished_checkpoints(self._run.checkpoints):
            if unfinished.name.endswith(disk.DISCARDED):
                continue
            return Activity("save", int(unfinished.name.rpartition("-")[2]))
        metrics = self._run.metrics
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step <= self._first_step:
            return Activity("compile", self._first_step)
        if step == self._plan.steps:
            return Activity("end", step)
        is_last = step == self._plan.steps - 1
        has_checkpoint = is_last or step % self._plan.interval == 0
        return Activity("validation" if has_checkpoint else "step", step)

    def activities(self) -> Iterator[Observed]:
        """Yield the process's activity until it ends."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):  # a file was replaced during reading
                yield self.activity(), time.monotonic() - self._start
            time.sleep(_POLL_SECONDS)

    def stop_if_in(self, phases: tuple[Phase, ...]) -> bool:
        """Stop the process if it is in one of these phases; return whether it is."""
        self.process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(OSError):
            if self.activity().phase in phases:
                return True
        self.process.send_signal(signal.SIGCONT)
        return False

    def kill(self) -> Observed | None:
        """Kill the process. Returns None if too late: the last checkpoint is complete."""
        self.process.kill()
        self.process.wait()
        activity = self.activity()
        return None if activity.phase == "end" else (activity, time.monotonic() - self._start)

    def finish(self) -> None:
        """Wait for the process to end. Raises the UserError or RunFailure that ended it."""
        if code := self.process.wait():
            lines = self.output.read_text("utf-8", "replace").splitlines()
            errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            if code == 2 and errors:
                raise UserError("\n".join(errors))
            last = "\n".join(errors or lines[-5:])
            raise RunFailure(f"a training process ended with exit code {code}:\n{last}")


class ProcessKiller:
    """Starts processes that train a run, and kills them. `train_command` takes the file for the log
    of batches, then the arguments of `train.py`: the run folder and options. `seconds` are the
    shortest durations of phases so far, which it adds to; `batch_logs` the logs of the
    processes."""

    def __init__(
        self,
        run: RunFolder,
        options: Sequence[str],
        plan: StepPlan,
        train_command: Sequence[str],
        seconds: dict[Phase, float],
    ) -> None:
        self._run, self._options, self._plan, self._command = run, options, plan, train_command
        self._seconds = seconds
        self.batch_logs: list[Path] = []
        self._random = random.Random()

    def train(self) -> None:
        """Train to the end. Raises the UserError or RunFailure that ended the process."""
        process = self.start()
        for _ in self._watch(process):
            pass
        process.finish()

    def kill(self, times: int) -> Iterator[Observed]:
        """Start and kill this many processes. Those killed in a step or later progress each time,
        beyond a checkpoint that the next can resume from."""
        first = self._plan.interval + 1
        steps = self._plan.steps - first
        for number, phase in enumerate(self._choose_phases(times)):
            start, end = (first + steps * part // times for part in (number, number + 1))
            yield self._kill_in(phase, range(start, max(end, start + 1)))

    def _choose_phases(self, times: int) -> list[Phase]:
        """Return random phases, alternately late and early, each once before any repeats."""
        phases: list[Phase] = []
        while len(phases) < times:
            kind = EARLY if len(phases) % 2 else LATE
            recent = [phase for phase in phases if phase in kind][1 - len(kind) :]
            phases.append(self._random.choice([phase for phase in kind if phase not in recent]))
        return phases

    def _kill_in(self, phase: Phase, steps: range) -> Observed:
        """Kill a process in a phase. If a process ends before that, undo its work and retry."""
        backup = self._run.path.with_name(f".{self._run.path.name}")
        wanted: tuple[Phase, ...] = (phase,)
        for _ in range(_MAX_ATTEMPTS):
            _copy(self._run.path, backup)
            kill = self._try_kill(wanted, self._random.choice(steps))
            if kill is not None:
                disk.remove(backup)
                return kill
            disk.discard(self._run.path)
            backup.rename(self._run.path)
            if phase in LATE:
                wanted = LATE  # the phase may be too short to be observed
        raise RunFailure(f"{_MAX_ATTEMPTS} processes ended before they could be killed")

    def _try_kill(self, wanted: tuple[Phase, ...], step: int) -> Observed | None:
        """Kill a process in one of these phases, from the step on; None if it ended first."""
        process = self.start()
        deadline = math.inf
        for activity, seconds in self._watch(process):
            is_wanted = activity.phase in wanted and (
                activity.phase in EARLY or activity.step >= step
            )
            if is_wanted and deadline == math.inf:
                duration = self._seconds.get(activity.phase, 0)
                deadline = seconds + self._random.random() * duration
            if is_wanted and seconds >= deadline and process.stop_if_in(wanted):
                return process.kill()
        process.finish()
        return None

    def _watch(self, process: TrainingProcess) -> Iterator[Observed]:
        """Yield what a process does until it ends, as `activities` does, and note how long. Later
        starts are shorter, as the code is compiled already."""
        last, since = Activity("start", 0), 0.0
        for activity, seconds in process.activities():
            if activity != last:
                duration = min(self._seconds.get(last.phase, math.inf), seconds - since)
                self._seconds[last.phase] = duration
                last, since = activity, seconds
            yield activity, seconds

    def start(self) -> TrainingProcess:
        """Start a process that trains the run."""
        run = self._run.path
        log = run.with_name(f"{run.name}-{len(self.batch_logs)}.jsonl")
        self.batch_logs.append(log)
        command = [*self._command, str(log), str(run), *self._options]
        return TrainingProcess(self._run, self._plan, command, log.with_suffix(".txt"))


def _copy(folder: Path, copy: Path) -> None:
    """Copy a run folder, hard-linking files in checkpoints, which never change."""

    def copy_file(source: str, target: str) -> None:
        is_in_checkpoints = "checkpoints" in Path(source).parts[len(folder.parts) :]
        with contextlib.suppress(FileNotFoundError):  # a helper's temporary file
            disk.copy(Path(source), Path(target), link=is_in_checkpoints)

    shutil.copytree(folder, copy, symlinks=True, copy_function=copy_file)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
