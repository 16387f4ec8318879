"""A run's folder: found by name, and its paths."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from rungs.common import disk
from rungs.common.errors import UserError, did_you_mean
from rungs.common.paths import is_file, is_folder, refuse_control_characters
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE
from rungs.run.lock import LockableFolder, read_note

RUNS = Path("runs")


class _PathInside:
    """A path in a folder, as an attribute of the folder.

    Args:
        place: relative to the folder.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, folder: LockableFolder, kind: type) -> Path:
        return folder.path / self._place


@dataclasses.dataclass(frozen=True)
class RunFolder(LockableFolder):
    """A run folder and the paths in it."""

    checkpoints = _PathInside("checkpoints")
    imported = _PathInside("checkpoints/imported")
    """Weights that `pretrained.py import` wrote."""
    metrics = _PathInside("metrics.jsonl")
    log = _PathInside("train.log")
    aside = _PathInside("aside")
    """Checkpoints and metrics that `--fresh` and `--from` set aside."""
    failed_steps = _PathInside("failed-steps")
    """Failed steps, each with what it takes to replay it."""
    old_failed_steps = _PathInside("capsules")
    """Failed steps that earlier versions of Rungs saved; still read."""
    rollouts = _PathInside("rollouts")
    """Texts sampled by reinforcement learning."""
    samples = _PathInside("samples.md")
    """What reinforcement learning made of a few prompts."""
    evaluations = _PathInside("evaluations.jsonl")
    """Scores of checkpoints on benchmarks."""
    prompt_samples = _PathInside("samples.jsonl")
    """How each checkpoint continues the `sample_prompts`."""
    events = _PathInside("events.jsonl")
    """Starts, stops, failures and the like, with times."""
    trackers = _PathInside("trackers")
    """What experiment trackers have of the run, and what they store in it."""

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
    def unfinished_files(self) -> list[Path]:
        """Partly written files that killed processes left behind."""
        folders = self.path, self.rollouts, *self.trackers.glob("*")
        return [path for folder in folders for path in folder.glob(disk.UNFINISHED_FILES)]

    @contextlib.contextmanager
    def lock(self) -> Iterator[Self]:
        """Hold the run's lock, as in `LockableFolder.lock`. Also raises UserError if the folder has
        links that training would write through."""
        self.refuse_links()
        with super().lock() as own:
            own._claim_checkpoints()
            yield own

    def refuse_links(self) -> None:
        """Raise UserError if something that training writes into is a link, so that it would write
        elsewhere, or a folder in the place of a file."""
        files = self.lock_file, self.holder, self.log, self.events, self.metrics, self.samples
        folders = self.aside, self.failed_steps, self.rollouts, self.trackers
        others = self.evaluations, self.prompt_samples, *self.trackers.glob("*")
        for path in (*files, *folders, *others):
            if path.is_symlink():
                raise UserError(
                    f"{path}: is a link, and a run writes nothing outside its folder; remove it, or"
                    " put what it points to in its place"
                )
        for path in files:
            if is_folder(path):
                raise UserError(f"{path}: is a folder, but must be a file; move it away")
        for path in folders:
            if path.exists() and not is_folder(path):
                raise UserError(f"{path}: is a file, but must be a folder; move it away")

    def _claim_checkpoints(self) -> None:
        """Note in the folder that `checkpoints` is a link to, such as one on a larger disk, that it
        is this run's. Raises UserError if it is another run's, whose checkpoints would be deleted.
        """
        if not self.checkpoints.is_symlink():
            return
        target = self.checkpoints.resolve()
        if not is_folder(target):
            raise UserError(
                f"{self.checkpoints}: is a link to {target}, which is not there; mount its disk,"
                " create the folder, or remove the link"
            )
        note = target / ".run"
        for path in (target.parent, Path(read_note(note) or target)):
            other = RunFolder(path).checkpoints
            is_its = is_file(path / MODEL_FILE) and is_folder(other) and other.samefile(target)
            if is_its and not path.samefile(self.path):
                raise UserError(
                    f"{self.checkpoints}: is a link to the checkpoints of {path}; each run needs a"
                    " folder of its own, so point the link to an empty one"
                )
        self.write_note(note, str(self.path.resolve()))


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
    is_run = "a run folder has a model.json and a train.json"
    otherwise = f"existing runs: {', '.join(runs)}" if runs else is_run
    return did_you_mean(Path(name).name, runs, otherwise)
