"""The folder that is a run: found by name, held by one trainer at a time."""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.common.paths import is_folder
from rungs.config.run_config import TRAIN_FILE

RUNS = Path("runs")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def imported(self) -> Path:
        """What `pretrained.py import` put here."""
        return self.checkpoints / "imported"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def aside(self) -> Path:
        """Where `--fresh` and `--from` put what they leave behind."""
        return self.path / "aside"

    @property
    def failed_steps(self) -> Path:
        """Steps that went wrong, each with what it takes to look at it again."""
        return self.path / "capsules"

    @property
    def charts(self) -> list[Path]:
        return sorted(self.path.glob("*-chart.png"))

    @property
    def unfinished_charts(self) -> list[Path]:
        """Those that a drawing which was killed left half-written."""
        return sorted(self.path.glob(".*-chart.*.png"))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run; a hold ends with its process. No trace is left of one that a mistake of
        the user's ended.

        Raises:
            UserError: another process holds it, or the folder cannot be written to.
        """
        lock_file, holder = self.path / "train.lock", self.path / "holder.lock"
        is_new = not lock_file.exists()
        lock = FileLock(lock_file)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            who = _read(holder) or "another process"
            raise UserError(f"{self.path}: being trained by {who}; wait, or stop it") from None
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
        """Say who holds the run."""
        try:
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError | RunFailure:
        """A folder that cannot be written to is the user's to mend; that a disk is full is no
        mistake."""
        if error.errno not in disk.FULL:
            return UserError(f"{self.path}: cannot be written to: {error.strerror}")
        return disk.write_failure(self.path, "the lock of the run", error)


def _read(holder: Path) -> str:
    """Who holds a run; nothing where that is not written yet, or no longer."""
    try:
        return holder.read_text().strip()
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class Start:
    """What the command line asks of a start."""

    fresh: bool = False
    rewind_to: str | None = None
    """`best`, `latest` or the name of a checkpoint."""
    extend: bool = False


def find_run(name: str) -> Path:
    """The run folder that `name` stands for: a path, or a folder under `runs/`.

    Raises:
        UserError: no such folder.
    """
    for candidate in (Path(name), RUNS / name):
        if is_folder(candidate):
            return candidate
    raise UserError(f"{name}: no such run folder, and none under {RUNS}/; {known_runs()}")


def known_runs() -> str:
    """The runs there are, as the end of a message about one that is not."""
    runs = sorted(path.parent.name for path in RUNS.glob(f"*/{TRAIN_FILE}"))
    return f"there are {', '.join(runs)}" if runs else "a run folder holds model.json, train.json"
