"""A run's folder: found by name, its paths, and the lock that one training process holds."""

import contextlib
import dataclasses
import difflib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.common.paths import is_file, is_folder, refuse_control_characters
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE

RUNS = Path("runs")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run folder and the paths in it."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def imported(self) -> Path:
        """The weights that `pretrained.py import` wrote."""
        return self.checkpoints / "imported"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def aside(self) -> Path:
        """Where `--fresh` and `--from` move the checkpoints and metrics that they set aside."""
        return self.path / "aside"

    @property
    def failed_steps(self) -> Path:
        """Failed steps, each with what it takes to replay it."""
        return self.path / "failed-steps"

    @property
    def old_failed_steps(self) -> Path:
        """Where earlier versions of Rungs saved failed steps; still read."""
        return self.path / "capsules"

    @property
    def rollouts(self) -> Path:
        """Texts sampled by reinforcement learning."""
        return self.path / "rollouts"

    @property
    def samples(self) -> Path:
        """What reinforcement learning made of a few prompts."""
        return self.path / "samples.md"

    @property
    def evaluations(self) -> Path:
        """Scores of checkpoints on benchmarks."""
        return self.path / "evaluations.jsonl"

    @property
    def prompt_samples(self) -> Path:
        """How each checkpoint continues the `sample_prompts`."""
        return self.path / "samples.jsonl"

    @property
    def events(self) -> Path:
        """Starts, stops, failures and the like, with times."""
        return self.path / "events.jsonl"

    @property
    def trackers(self) -> Path:
        """What experiment trackers have of the run, and what they store in it."""
        return self.path / "trackers"

    @property
    def charts(self) -> list[Path]:
        return sorted(self.path.glob("*-chart.png"))

    @property
    def records(self) -> list[Path]:
        """What a run writes besides its checkpoints and failed steps, as far as it is there."""
        files = [self.metrics, self.log, *self.charts, self.samples, self.rollouts]
        files += [self.evaluations, self.prompt_samples, self.events, self.trackers]
        return [path for path in files if path.exists()]

    @property
    def unfinished_charts(self) -> list[Path]:
        """Partly written charts that killed drawing processes left behind."""
        return sorted(self.path.glob(".*-chart.*.png"))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock, which also ends with the process. A UserError in the block leaves no
        lock file behind.

        Raises:
            UserError: another process holds the lock, or the folder cannot be written to.
        """
        lock_file, holder = self.path / "train.lock", self.path / "holder.lock"
        is_new = not lock_file.exists()
        lock = FileLock(lock_file)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            who = _read(holder) or "another process"
            raise UserError(f"{self.path}: in use by {who}; wait for it or stop it") from None
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._write_holder(holder)
            yield
        except UserError:
            if is_new:
                with contextlib.suppress(OSError):
                    lock_file.unlink()
            raise
        finally:
            with contextlib.suppress(OSError):
                holder.unlink()
            lock.release()

    def _write_holder(self, holder: Path) -> None:
        """Write down which process holds the lock."""
        try:
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError | RunFailure:
        """Return the error for a folder that cannot be written to: a UserError, but a RunFailure if
        the disk is full."""
        if error.errno not in disk.FULL:
            return UserError(f"{self.path}: cannot be written to: {error.strerror}")
        return disk.write_failure(self.path, "the lock of the run", error)


def _read(holder: Path) -> str:
    """Return which process holds a lock, or an empty string if that is not written down."""
    try:
        return holder.read_text().strip()
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """The options of `train.py` that decide how a run starts."""

    fresh: bool = False
    rewind_to: str | None = None
    """`best`, `latest` or the name of a checkpoint."""
    extend: bool = False
    mirror: str | None = None
    """URL of the folder that the run is copied to, and restored from."""
    on_event: tuple[str, ...] = ()
    """Commands and URLs that are told of events."""
    dry_run: bool = False
    """Whether to take a few steps of which nothing is kept, instead of training."""


def find_run(name: str) -> Path:
    """Return the run folder with a name: a path, or a folder in `runs/`.

    Raises:
        UserError: there is no such folder.
    """
    if found := existing_run_path(name):
        return found
    raise UserError(f"{name}: no such run folder, here or in {RUNS}/; {known_runs(name)}")


def runs_in(name: str) -> list[Path]:
    """Return the runs in a folder that have taken a step, by name; none if it is itself a run, or
    no folder.

    Raises:
        UserError: it has runs, but none has taken a step.
    """
    folder = Path(name)
    if not is_folder(folder) or is_file(folder / MODEL_FILE):
        return []
    runs = sorted(path.parent for path in folder.glob(f"*/{MODEL_FILE}"))
    started = [run for run in runs if is_file(RunFolder(run).metrics)]
    if runs and not started:
        raise UserError(f"{folder}: none of the {len(runs)} runs in it has taken a step yet")
    return started


def existing_run_path(name: str) -> Path | None:
    """Return the folder with a name, here or in `runs/`, None if there is none. Raises UserError if
    no run can be at that path."""
    refuse_control_characters(Path(name).absolute())
    return next((path for path in (Path(name), RUNS / name) if is_folder(path)), None)


def new_run_path(name: str) -> Path:
    """Return where a run folder of this name would be created: a path, or a name in `runs/`. Raises
    UserError if no run can be there."""
    refuse_control_characters(Path(name).absolute())
    return Path(name) if len(Path(name).parts) > 1 else RUNS / name


def known_runs(name: str) -> str:
    """Return the run that was probably meant, or the names of all, as the end of a message about a
    run that does not exist."""
    runs = sorted(path.parent.name for path in RUNS.glob(f"*/{TRAIN_FILE}"))
    if close := difflib.get_close_matches(Path(name).name, runs, n=1):
        return f"did you mean {close[0]}?"
    if runs:
        return f"existing runs: {', '.join(runs)}"
    return "a run folder has a model.json and a train.json"
