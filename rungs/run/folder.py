"""A run's folder: finding it, its paths, and the lock that one training process holds. That process
and its helpers write only after `check`: while they were suspended, another run may have been put
in the folder's place."""

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from filelock import SoftFileLock, Timeout

from rungs.common import disk, paths
from rungs.common.errors import RunFailure, UserError, did_you_mean
from rungs.common.locks import file_lock
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE

RUNS = Path("runs")
_CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-step-\d{6,}")


class _PathInside:
    """Descriptor of a path relative to the run folder."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, folder: "RunFolder", kind: type) -> Path:
        return folder.path / self._place


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run folder and the paths in it."""

    path: Path
    identity: str = dataclasses.field(default="", compare=False)
    """Device and inode of the folder and its lock, if this process trains the run or helps."""
    descriptor: int = dataclasses.field(default=-1, compare=False)
    """Descriptor of the open folder, in the process that holds the lock."""

    lock_file = _PathInside("train.lock")
    holder = _PathInside("holder.lock")
    """File that identifies the process with the lock."""
    checkpoints = _PathInside("checkpoints")
    imported = _PathInside("checkpoints/imported")
    """Weights that `pretrained.py import` wrote."""
    metrics = _PathInside("metrics.jsonl")
    log = _PathInside("train.log")
    aside = _PathInside("aside")
    """Checkpoints and metrics that `--fresh` and `--from` set aside."""
    failed_steps = _PathInside("failed-steps")
    """Failed steps, each with everything needed to replay it."""
    old_failed_steps = _PathInside("capsules")
    """Failed steps that earlier versions of Rungs saved; still read."""
    rollouts = _PathInside("rollouts")
    """Texts sampled by reinforcement learning."""
    samples = _PathInside("samples.md")
    """Completions of a few prompts in reinforcement learning."""
    evaluations = _PathInside("evaluations.jsonl")
    """Scores of checkpoints on benchmarks."""
    prompt_samples = _PathInside("samples.jsonl")
    """Completions of `sample_prompts` by each checkpoint."""
    events = _PathInside("events.jsonl")
    """Starts, stops, failures etc., with times."""
    layers = _PathInside("layers.npy")
    """What each layer did at the steps of `watch_interval`."""
    length = _PathInside("length.jsonl")
    """Number of steps of a run with `max_minutes`."""
    look = _PathInside("look.html")
    """What the model does with a text, by `model.py --look`."""
    profile = _PathInside("profile")
    """Traces of steps, by `train.py --profile`."""
    trackers = _PathInside("trackers")
    """State of experiment trackers, and files that they store in the run."""

    @property
    def charts(self) -> list[Path]:
        return sorted(self.path.glob("*-chart.png"))

    @property
    def records(self) -> list[Path]:
        """The existing files that a run writes, besides checkpoints and failed steps."""
        files = [self.metrics, self.log, *self.charts, self.samples, self.rollouts]
        files += [self.evaluations, self.prompt_samples, self.events, self.length, self.trackers]
        files.append(self.layers)
        return [path for path in files if path.exists()]

    @property
    def unfinished_files(self) -> list[Path]:
        """Partly written files left behind by killed processes."""
        folders = self.path, self.rollouts, *self.trackers.glob("*")
        return [path for folder in folders for path in folder.glob(disk.UNFINISHED_FILES)]

    @contextlib.contextmanager
    def lock(self) -> Iterator[Self]:
        """Hold the lock, which also ends with the process; yield the folder as the one that this
        process trains. A UserError in the block leaves no lock file behind. Raises UserError if
        another process holds the lock, the folder is not writable, or training would write through
        links in it."""
        self.refuse_links()
        is_new = not self.lock_file.exists()
        try:
            lock = file_lock(self.lock_file)
            lock.acquire(blocking=False)
        except Timeout as held:
            who = read_note(self.holder) or "another process"
            is_soft = isinstance(lock, SoftFileLock)
            remedy = f"; if it was killed, delete {held.lock_file}" if is_soft else ""
            raise UserError(
                f"{self.path}: in use by {who}; wait for it or stop it{remedy}"
            ) from None
        except OSError as error:
            place = self.path if is_new else self.lock_file
            raise disk.unwritable(place, error, "the lock of the run") from None
        with _opened(self.path) as descriptor:
            own = dataclasses.replace(self, identity=_identity(self.path), descriptor=descriptor)
            try:
                self.write_note(self.holder, f"process {os.getpid()} on {socket.gethostname()}")
                own._claim_checkpoints()
                yield own
            except UserError:
                if is_new and own.is_own():
                    with contextlib.suppress(OSError):
                        self.holder.unlink(missing_ok=True)
                        self.lock_file.unlink()
                raise
            finally:
                if own.is_own():
                    with contextlib.suppress(OSError):
                        self.holder.unlink()
                with contextlib.suppress(OSError):  # the process's end releases it, too
                    lock.release()

    def is_own(self) -> bool:
        """Whether the folder and its lock are still those that this process trains."""
        found = _identity(self.path)
        return bool(found) and self.identity in ("", found)

    def check(self) -> None:
        """Raise RunFailure unless `is_own`. Call it before each write that matters."""
        if self.is_own():
            return
        if _identity(self.path).partition(" ")[0] == self.identity.partition(" ")[0] != "":
            raise RunFailure(
                f"{self.lock_file}: removed or replaced during training, so another process may"
                " train this run; run the same command to resume from the last checkpoint"
            )
        another = ", and another folder took its place" if paths.is_folder(self.path) else ""
        lost = "the progress since its last checkpoint is lost"
        if place := paths.path_of(self.descriptor):
            raise RunFailure(
                f"{self.path}: the run folder was moved to {place} during training{another};"
                f" {lost}; resume it there"
            )
        raise RunFailure(
            f"{self.path}: the run folder was removed or moved during training{another}; {lost};"
            " restore the folder and run the same command, or start over"
        )

    def write_note(self, note: Path, text: str) -> None:
        """Write a short file; raises the error of `disk.unwritable`."""
        try:
            disk.replace_file(note, text + "\n")
        except OSError as error:
            raise disk.unwritable(self.path, error, "the lock of the run") from None

    def refuse_links(self) -> None:
        """Raise UserError if a path that training writes to is a link, which would lead elsewhere,
        or is a folder or pipe instead of a file."""
        files = [self.lock_file, self.holder, self.log, self.events, self.metrics, self.samples]
        files += [self.evaluations, self.prompt_samples, self.length, self.layers]
        folders = self.aside, self.failed_steps, self.rollouts
        for path in (*files, *folders, self.trackers, *self.trackers.glob("*")):
            if path.is_symlink():
                raise UserError(
                    f"{path}: is a link, and a run writes nothing outside its folder; remove it, or"
                    " put what it points to in its place"
                )
        for path in files:
            if paths.is_there(path) and not paths.is_file(path):
                kind = "a folder" if paths.is_folder(path) else "a pipe or a device"
                raise UserError(f"{path}: is {kind}, but must be a file; move it away")
        for path in folders:
            if path.exists() and not paths.is_folder(path):
                raise UserError(f"{path}: is a file, but must be a folder; move it away")

    def _claim_checkpoints(self) -> None:
        """If `checkpoints` links to a folder, such as one on a larger disk, mark that as this
        run's. Raises UserError if it is another run's, whose checkpoints would be deleted."""
        if not self.checkpoints.is_symlink():
            return
        target = self.checkpoints.resolve()
        if not paths.is_folder(target):
            raise UserError(
                f"{self.checkpoints}: is a link to {target}, which is not there; mount its disk,"
                " create the folder, or remove the link"
            )
        note = target / ".run"
        for path in (target.parent, Path(read_note(note) or target)):
            other = RunFolder(path).checkpoints
            is_its = (
                paths.is_file(path / MODEL_FILE)
                and paths.is_folder(other)
                and other.samefile(target)
            )
            if is_its and not path.samefile(self.path):
                raise UserError(
                    f"{self.checkpoints}: is a link to the checkpoints of {path}; each run needs a"
                    " folder of its own, so point the link to an empty one"
                )
        self.write_note(note, str(self.path.resolve()))


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, −1 if the system has none."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        descriptor = -1
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _identity(folder: Path) -> str:
    """Return an identifier of a run folder and its lock; empty if there is no folder."""
    found = []
    for path in (folder, RunFolder(folder).lock_file):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append(f"{status.st_dev}:{status.st_ino}")
    return " ".join(found)


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint's folder could have this name. What users put beside checkpoints under
    other names is theirs."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def read_note(note: Path) -> str:
    """Return the text of a short file, or an empty string if it cannot be read."""
    try:
        return paths.read_bytes(note).decode().strip()
    except (OSError, ValueError):
        return ""


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """The options of `train.py` on how a run starts."""

    fresh: bool = False
    rewind_to: str | None = None
    """`best`, `latest` or the name of a checkpoint."""
    extend: bool = False
    mirror: str | None = None
    """URL of the folder for copying and restoring the run."""
    on_event: tuple[str, ...] = ()
    """Commands and URLs that receive events."""
    dry_run: bool = False
    """Whether to take a few steps without keeping anything, instead of training."""
    profile: int | None = None
    """How many steps of a dry run to profile."""


def find_run(name: str) -> Path:
    """Return the run folder with this name: a path, or a folder in `runs/`. Raises UserError if
    there is none."""
    if found := existing_run_path(name):
        return found
    raise UserError(f"{name}: no such run folder, here or in {RUNS}/; {known_runs(name)}")


def runs_in(name: str) -> list[Path]:
    """Return the runs with steps in a folder, by name; none if it is itself a run, or not a folder.
    Raises UserError if it has runs, but none with a step."""
    folder = Path(name)
    if not paths.is_folder(folder) or paths.is_file(folder / MODEL_FILE):
        return []
    runs = sorted(path.parent for path in folder.glob(f"*/{MODEL_FILE}"))
    started = [run for run in runs if paths.is_file(RunFolder(run).metrics)]
    if runs and not started:
        raise UserError(f"{folder}: none of the {len(runs)} runs in it has taken a step yet")
    return started


def existing_run_path(name: str) -> Path | None:
    """Return the folder with this name, here or in `runs/`, or None. Raises UserError if no run can
    be at that path."""
    paths.refuse_control_characters(Path(name).absolute())
    return next((path for path in (Path(name), RUNS / name) if paths.is_folder(path)), None)


def new_run_path(name: str) -> Path:
    """Return the path of a new run folder with this name: a path, or a name in `runs/`. Raises
    UserError if no run can be there."""
    path = Path(name).absolute()
    paths.refuse_control_characters(path)
    if any(map(paths.is_reserved, path.relative_to(path.anchor).parts)):
        raise UserError(f"{name}: not a name that Windows allows; choose another")
    return Path(name) if len(Path(name).parts) > 1 else RUNS / name


def known_runs(name: str) -> str:
    """Return the most similar run name, or all, to end a message about a missing run."""
    runs = sorted(path.parent.name for path in RUNS.glob(f"*/{TRAIN_FILE}"))
    is_run = "a run folder has a model.json and a train.json"
    otherwise = f"existing runs: {', '.join(runs)}" if runs else is_run
    return did_you_mean(Path(name).name, runs, otherwise)
