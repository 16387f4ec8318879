"""A run's folder: finding it, its paths, and the lock that one training process holds."""

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from rungs.common import disk, paths
from rungs.common.errors import UserError, did_you_mean
from rungs.config.run_config import MODEL_FILE

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

    lock_file = _PathInside("train.lock")
    """File that is locked; it names the process that trains the run."""
    checkpoints = _PathInside("checkpoints")
    imported = _PathInside("checkpoints/imported")
    """Weights that `pretrained.py import` wrote."""
    metrics = _PathInside("metrics.jsonl")
    log = _PathInside("train.log")
    aside = _PathInside("aside")
    """Checkpoints and metrics that `--fresh` and `--from` set aside."""
    failed_steps = _PathInside("failed-steps")
    """Failed steps, each with everything needed to replay it."""
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
    def lock(self) -> Iterator[None]:
        """Hold the lock, which also ends with the process. A UserError in the block leaves no lock
        file behind. Raises UserError if another process holds the lock, the folder is not writable,
        its file system has no locks, or `checkpoints` is a link that can't be used."""
        is_new = not self.lock_file.exists()
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(disk.lock_file(self.lock_file))
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            except BlockingIOError:
                who = self.lock_file.read_text("utf-8").strip() or "another process"
                raise UserError(f"{self.path}: in use by {who}; wait for it or stop it") from None
            except OSError as error:
                raise disk.unwritable(self.path, error, "the lock of the run") from None
            try:
                self._claim_checkpoints()
                yield
            except UserError:
                if is_new:
                    self.lock_file.unlink(missing_ok=True)
                raise

    def _claim_checkpoints(self) -> None:
        """If `checkpoints` links to a folder, such as one on a larger disk, mark that as this
        run's. Raises UserError if it is another run's, whose checkpoints would be deleted."""
        if not self.checkpoints.is_symlink():
            return
        target = self.checkpoints.resolve()
        if not target.is_dir():
            raise UserError(
                f"{self.checkpoints}: is a link to {target}, which is not there; mount its disk,"
                " create the folder, or remove the link"
            )
        note = target / ".run"
        owners = [Path(note.read_text("utf-8").strip())] if note.is_file() else []
        for path in (target.parent, *owners):
            other = RunFolder(path)
            is_run = (path / MODEL_FILE).is_file() and other.checkpoints.is_dir()
            is_its = is_run and other.checkpoints.samefile(target)
            if is_its and not path.samefile(self.path):
                raise UserError(
                    f"{self.checkpoints}: is a link to the checkpoints of {path}; each run needs a"
                    " folder of its own, so point the link to an empty one"
                )
        disk.replace_file(note, f"{self.path.resolve()}\n")


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint's folder could have this name. What users put beside checkpoints under
    other names is theirs."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


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


def find_origin(name: str, new: Path | None = None) -> Path:
    """Return the run folder to copy: as `find_run`, or one that comes with Rungs. It is `new`, the
    folder of the copy, only if there is no other. Raises UserError if there is none."""
    root = paths.shipped()
    for path in (Path(name), RUNS / name, root / name, root / RUNS / name):
        if path.is_dir() and (new is None or path.resolve() != new.resolve()):
            return path
    return find_run(name)


def runs_in(name: str) -> list[Path]:
    """Return the runs with steps in a folder, by name; none if it is itself a run, or not a folder.
    Raises UserError if it has runs, but none with a step."""
    folder = Path(name)
    if not folder.is_dir() or (folder / MODEL_FILE).is_file():
        return []
    runs = sorted(path.parent for path in folder.glob(f"*/{MODEL_FILE}"))
    started = [run for run in runs if RunFolder(run).metrics.is_file()]
    if runs and not started:
        raise UserError(f"{folder}: none of the {len(runs)} runs in it has taken a step yet")
    return started


def existing_run_path(name: str) -> Path | None:
    """Return the folder with this name, here or in `runs/`, or None."""
    return next((path for path in (Path(name), RUNS / name) if path.is_dir()), None)


def new_run_path(name: str) -> Path:
    """Return the path of a new run folder with this name: a path, or a name in `runs/`."""
    return Path(name) if len(Path(name).parts) > 1 else RUNS / name


def known_runs(name: str) -> str:
    """Return the most similar run name, or all, to end a message about a missing run."""
    runs, short = sorted(path.parent.name for path in RUNS.glob(f"*/{MODEL_FILE}")), Path(name).name
    if short in shipped_runs():
        return f"it comes with Rungs; make one: rungs new {name} --like {short}"
    is_run = "a run folder has a model.json and a train.json"
    otherwise = f"existing runs: {', '.join(runs)}" if runs else is_run
    return did_you_mean(short, [*runs, *shipped_runs()], otherwise)


def shipped_runs() -> list[str]:
    """Return the names of the runs that come with Rungs."""
    return sorted(path.parent.name for path in (paths.shipped() / RUNS).glob(f"*/{MODEL_FILE}"))
