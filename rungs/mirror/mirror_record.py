"""`mirror.json`: which run a mirror is of; in the run folder, also what was copied already."""

from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from rungs.checkpointing.checkpoint_folder import CHECKPOINT_GLOB, checkpoint_folders, order_by_name
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.common.strict_json import StrictModel, read_text
from rungs.mirror.mirror_folder import CHECKPOINTS, RECORD_FILE, MirrorFolder
from rungs.run.folder import RunFolder

FileVersion = tuple[int, int]
"""Size in bytes and time of change in nanoseconds."""


class MirrorRecord(StrictModel):
    """The content of `mirror.json`."""

    run: str
    """A random name that the run and its mirror share."""
    copied: dict[str, FileVersion] = Field(default_factory=dict)
    """Files of the run folder that the mirror has, by relative path; empty in the mirror."""

    @classmethod
    def of_run(cls, run: RunFolder) -> Self | None:
        """Return the record of a run folder, None if it has none. Raises UserError."""
        path = run.path / RECORD_FILE
        return cls._parsed(read_text(path), str(path)) if is_file(path) else None

    @classmethod
    def of_mirror(cls, mirror: MirrorFolder) -> Self | None:
        """Return the record of a mirror, None if it has none. Raises UserError."""
        content = mirror.read(RECORD_FILE)
        if content is None:
            return None
        return cls._parsed(content.decode(errors="replace"), f"{mirror.url}/{RECORD_FILE}")

    @classmethod
    def _parsed(cls, text: str, place: str) -> Self:
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            raise UserError(
                f"{place}: damaged; give --mirror another, empty folder, or delete this file from"
                " both the run and its mirror if they belong together"
            ) from None

    def write(self, folder: Path) -> None:
        """Write it into a folder, completely or not at all."""
        disk.replace_file(folder / RECORD_FILE, self.model_dump_json() + "\n")

    @staticmethod
    def version(path: Path) -> FileVersion:
        """Return what changes whenever a file does."""
        status = path.stat()
        return status.st_size, status.st_mtime_ns


def check_same_run(run: RunFolder, mirror: MirrorFolder) -> MirrorRecord | None:
    """Check that a mirror is of this run, and not ahead of it, or empty. Returns its record.

    Raises:
        UserError: it is of another run, has newer checkpoints, or is not a mirror.
    """
    theirs, ours = MirrorRecord.of_mirror(mirror), MirrorRecord.of_run(run)
    if theirs is None:
        if other := mirror.names():
            raise UserError(
                f"--mirror {mirror.url}: has files but is not a mirror ({other[0]}); name a new or"
                " empty folder"
            )
    elif ours is None or ours.run != theirs.run:
        if not mirror.checkpoints():
            return theirs
        raise UserError(
            f"--mirror {mirror.url}: is the mirror of another run; name a new or empty folder, or"
            f" move {run.checkpoints} away to continue here from the mirror"
        )
    elif newer := _newer(run, mirror):
        raise UserError(
            f"--mirror {mirror.url}: has {newer}, which is newer than every checkpoint in"
            f" {run.checkpoints}; move that folder away to continue from the mirror, or name a new"
            " or empty folder"
        )
    return theirs


def _newer(run: RunFolder, mirror: MirrorFolder) -> str | None:
    """Return the newest checkpoint of a mirror if the run is not that far and never was."""
    here = [path.name for path in checkpoint_folders(run.checkpoints)]
    there = set(mirror.checkpoints()) - names_aside(run)
    newest = max([*here, *there], key=order_by_name, default=None)
    return None if newest in here else newest


def names_aside(run: RunFolder) -> set[str]:
    """Return the names of the checkpoints that `--fresh` and `--from` moved aside."""
    return {path.name for path in run.aside.glob(f"*/{CHECKPOINTS}/{CHECKPOINT_GLOB}")}
