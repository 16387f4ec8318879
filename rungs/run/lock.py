"""The lock of a run folder, which one training process holds, and the folder's identity.

What that process and its helpers write, they write after `check`: while they were suspended, the
folder may have been moved and another run put in its place.
"""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from filelock import SoftFileLock, Timeout

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.common.file_lock import file_lock
from rungs.common.paths import is_folder, require_regular

_LOCK_FILE = "train.lock"


@dataclasses.dataclass(frozen=True)
class LockableFolder:
    """A folder that one process at a time may hold."""

    path: Path
    identity: str = dataclasses.field(default="", compare=False)
    """Device and inode of the folder and its lock, if this process trains the run or helps it."""
    descriptor: int = dataclasses.field(default=-1, compare=False)
    """Descriptor of the open folder, in the process that holds the lock."""

    @property
    def lock_file(self) -> Path:
        return self.path / _LOCK_FILE

    @property
    def holder(self) -> Path:
        """File that says which process holds the lock."""
        return self.path / "holder.lock"

    @contextlib.contextmanager
    def lock(self) -> Iterator[Self]:
        """Hold the lock, which also ends with the process; yields the folder as the one that this
        process trains. A UserError in the block leaves no lock file behind. Raises UserError if
        another process holds the lock, or the folder cannot be written to."""
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
            raise self.unwritable(error) from None
        with _opened(self.path) as descriptor:
            own = dataclasses.replace(self, identity=_identity(self.path), descriptor=descriptor)
            try:
                self.write_note(self.holder, f"process {os.getpid()} on {socket.gethostname()}")
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
                lock.release()

    def is_own(self) -> bool:
        """Whether the folder and its lock are still those that this process trains."""
        found = _identity(self.path)
        return bool(found) and self.identity in ("", found)

    def check(self) -> None:
        """Raise RunFailure unless the folder and its lock are those that this process trains. Call
        it before each write that matters."""
        if self.is_own():
            return
        if _identity(self.path).partition(" ")[0] == self.identity.partition(" ")[0] != "":
            raise RunFailure(
                f"{self.lock_file}: removed or replaced during training, so another process may"
                " train this run; run the same command to resume from the last checkpoint"
            )
        another = ", and another folder took its place" if is_folder(self.path) else ""
        lost = "the progress since its last checkpoint is lost"
        if place := _place_of(self.descriptor):
            raise RunFailure(
                f"{self.path}: the run folder was moved to {place} during training{another};"
                f" {lost}; resume it there"
            )
        raise RunFailure(
            f"{self.path}: the run folder was removed or moved during training{another}; {lost};"
            " restore the folder and run the same command, or start over"
        )

    def write_note(self, note: Path, text: str) -> None:
        """Write a short file; raises what `unwritable` returns."""
        try:
            disk.replace_file(note, text + "\n")
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: OSError) -> UserError | RunFailure:
        """Return the error for a folder that cannot be written to: a UserError, but a RunFailure if
        the disk is full."""
        if error.errno not in disk.FULL:
            return UserError(f"{self.path}: cannot be written to: {error.strerror}")
        return disk.write_failure(self.path, "the lock of the run", error)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, -1 where the system gives none."""
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
    """Return what tells a run folder and its lock from others; empty if the folder is not there."""
    found = []
    for path in (folder, folder / _LOCK_FILE):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append(f"{status.st_dev}:{status.st_ino}")
    return " ".join(found)


def _place_of(descriptor: int) -> Path | None:
    """Return where an open folder is by now, None if it was removed or the system can't tell."""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        return place if place.is_dir() else None
    return None


def read_note(note: Path) -> str:
    """Return the text of a short file, an empty string if it cannot be read."""
    try:
        require_regular(note)
        return note.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
