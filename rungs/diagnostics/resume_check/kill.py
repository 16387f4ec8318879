"""A training process, killed at a random moment that is chosen by what it is doing.

Most of a short training is its start, so moments drawn by the clock alone would hardly fall
elsewhere. What a process does is seen from outside, by what it has written into its run folder.
"""

import contextlib
import math
import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rungs.checkpointing.checkpoint_folder import CHECKPOINT_GLOB, UNFINISHED, list_checkpoints
from rungs.common.disk import link_or_copy
from rungs.common.errors import RunFailure, UserError
from rungs.run.folder import RunFolder

Phase = Literal["start", "compile", "step", "validation", "save", "end"]
EARLY: tuple[Phase, ...] = ("start", "compile")
"""Before there is anything new to lose."""
LATE: tuple[Phase, ...] = ("step", "validation", "save")
_SECONDS_BETWEEN_LOOKS = 0.0005
_MOST_ATTEMPTS = 10


class StepPlan(NamedTuple):
    """When a run does what."""

    steps: int
    interval: int
    """Steps between checkpoints."""

    def is_due(self, step: int) -> bool:
        """Whether the step has a validation and a checkpoint."""
        return step % self.interval == 0 or step == self.steps - 1


class Sight(NamedTuple):
    """What a training process is seen to be doing."""

    phase: Phase
    step: int
    """The step that comes next, or the one being saved."""

    def __str__(self) -> str:
        if self.phase == "start":
            return "start, before anything was compiled"
        if self.phase == "compile":
            return f"compilation, before step {self.step}"
        before = "save of " if self.phase == "save" else ""
        return f"{before}step {self.step}" + " or its validation" * (self.phase == "validation")


class Kill(NamedTuple):
    """One that hit."""

    sight: Sight
    """Of what the dead process left."""
    seconds: float
    """Since its start."""


class Process:
    """One start of a run's training, seen from outside.

    Args:
        account: the file that the recorder writes to.
        plan: of the run.
        recorder: the command that trains; it takes `account`, then what `train.py` takes.
    """

    def __init__(
        self,
        run: RunFolder,
        datasets_dir: Path,
        account: Path,
        plan: StepPlan,
        recorder: Sequence[str],
    ) -> None:
        self._run, self._plan = run, plan
        saved = list_checkpoints(run.checkpoints)
        self._first_step = saved[-1].step + 1 if saved else 0
        self._logged_bytes = _size(run.log)
        self._said = account.with_suffix(".txt")
        command = [*recorder, str(account), str(run.path), "--datasets-dir", str(datasets_dir)]
        self._began = time.monotonic()
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)

    def sight(self) -> Sight:
        """What it does now or, once dead, was doing."""
        if _size(self._run.log) == self._logged_bytes:
            return Sight("start", self._first_step)
        for unfinished in self._run.checkpoints.glob(UNFINISHED + CHECKPOINT_GLOB):
            return Sight("save", int(unfinished.name.rpartition("-")[2]))
        metrics = self._run.metrics
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step <= self._first_step:
            return Sight("compile", self._first_step)
        if step == self._plan.steps:
            return Sight("end", step)
        return Sight("validation" if self._plan.is_due(step) else "step", step)

    def sights(self) -> Iterator[tuple[Sight, float]]:
        """Each thing it does, with the seconds since its start, until it has ended."""
        while self._process.poll() is None:
            with contextlib.suppress(OSError):  # a file was replaced while it was looked at
                yield self.sight(), time.monotonic() - self._began
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def is_frozen_in(self, phases: tuple[Phase, ...]) -> bool:
        """Hold it still, and say whether it is in one of these phases; where not, it goes on."""
        if not hasattr(signal, "SIGSTOP"):
            return True
        self._process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(OSError):
            if self.sight().phase in phases:
                return True
        self._process.send_signal(signal.SIGCONT)
        return False

    def kill(self) -> Kill | None:
        """Kill it; None where that came too late: the last checkpoint stands."""
        self._process.kill()
        self._process.wait()
        sight = self.sight()
        return None if sight.phase == "end" else Kill(sight, time.monotonic() - self._began)

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            UserError, RunFailure: what it ended with.
        """
        if code := self._process.wait():
            lines = self._said.read_text(errors="replace").splitlines()
            told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            if code == 2 and told:
                raise UserError("\n".join(told))
            last = "\n".join(told or lines[-5:])
            raise RunFailure(f"a training process ended with exit code {code}:\n{last}")


class Killer:
    """Trains a run again and again, and kills it.

    Args:
        run: with its two files.
        seconds: how long each phase lasts, as measured.
        recorder: as for `Process`.
    """

    def __init__(
        self,
        run: RunFolder,
        datasets_dir: Path,
        plan: StepPlan,
        seconds: dict[Phase, float],
        recorder: Sequence[str],
    ) -> None:
        self._run, self._datasets_dir = run, datasets_dir
        self._plan, self._seconds, self._recorder = plan, dict(seconds), recorder
        self._random = random.Random()
        self.accounts: list[Path] = []
        """What the recorders of all its processes wrote, in order."""

    def kill(self, times: int) -> Iterator[Kill]:
        """Kill so many processes, those in their steps further and further on in the run: each
        after a checkpoint that the next can go on from."""
        first = self._plan.interval + 1
        room = self._plan.steps - first
        for number, phase in enumerate(self._phases(times)):
            start, end = (first + room * place // times for place in (number, number + 1))
            yield self._hit(phase, range(start, max(end, start + 1)))

    def _phases(self, times: int) -> list[Phase]:
        """Random ones, late and early in turn, none again before all of its kind have been."""
        phases: list[Phase] = []
        while len(phases) < times:
            kind = EARLY if len(phases) % 2 else LATE
            recent = [phase for phase in phases if phase in kind][1 - len(kind) :]
            phases.append(self._random.choice([phase for phase in kind if phase not in recent]))
        return phases

    def _hit(self, phase: Phase, steps: range) -> Kill:
        """Kill a process; one that came to its end does not count, and all it did is undone."""
        before = self._run.path.with_name(f".{self._run.path.name}")
        wanted: tuple[Phase, ...] = (phase,)
        for _ in range(_MOST_ATTEMPTS):
            _copy(self._run.path, before)
            kill = self._attempt(wanted, self._random.choice(steps))
            if kill is not None:
                shutil.rmtree(before)
                return kill
            shutil.rmtree(self._run.path)
            before.rename(self._run.path)
            if phase in LATE:
                wanted = LATE  # this one may be too short to be met
        raise RunFailure(f"{_MOST_ATTEMPTS} processes had ended before they could be killed")

    def _attempt(self, wanted: tuple[Phase, ...], step: int) -> Kill | None:
        """Kill in one of these phases, not before the step; None where all were missed."""
        process = self.start()
        deadline, last, since = math.inf, Sight("start", 0), 0.0
        for sight, seconds in process.sights():
            if sight != last:  # a start after the first finds code that is compiled already
                lasted = min(self._seconds.get(last.phase, math.inf), seconds - since)
                self._seconds[last.phase] = lasted
                last, since = sight, seconds
            is_wanted = sight.phase in wanted and (sight.phase in EARLY or sight.step >= step)
            if is_wanted and deadline == math.inf:
                deadline = seconds + self._random.random() * self._seconds.get(sight.phase, 0)
            if is_wanted and seconds >= deadline and process.is_frozen_in(wanted):
                return process.kill()
        process.finish()
        return None

    def start(self) -> Process:
        """Start the run's command."""
        account = self._run.path.with_name(f"{self._run.path.name}-{len(self.accounts)}.jsonl")
        self.accounts.append(account)
        return Process(self._run, self._datasets_dir, account, self._plan, self._recorder)


def measured(process: Process) -> dict[Phase, float]:
    """Watch a process to its end; the mean seconds that each phase lasts.

    Raises:
        UserError, RunFailure: what it ended with.
    """
    lengths: dict[Sight, float] = defaultdict(float)
    last, since = Sight("start", 0), 0.0
    for sight, seconds in process.sights():
        lengths[last] += seconds - since
        last, since = sight, seconds
    process.finish()
    seconds_of: dict[Phase, list[float]] = defaultdict(list)
    for sight, seconds in lengths.items():
        seconds_of[sight.phase].append(seconds)
    return {phase: sum(seconds) / len(seconds) for phase, seconds in seconds_of.items()}


def _copy(folder: Path, copy: Path) -> None:
    """A run folder as it stands; what is in checkpoints never changes, so that is linked."""

    def copy_file(source: str, target: str) -> None:
        is_in_checkpoints = "checkpoints" in Path(source).parts[len(folder.parts) :]
        (link_or_copy if is_in_checkpoints else shutil.copy2)(source, target)

    shutil.copytree(folder, copy, symlinks=True, copy_function=copy_file)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
