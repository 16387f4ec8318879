"""What a mirror lacks of its run, and copying it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import META_FILE, Checkpoint, CheckpointMeta
from rungs.checkpointing.retention import superfluous
from rungs.common import disk
from rungs.common.disk import link_or_copy
from rungs.mirror.mirror_folder import CHECKPOINTS, MirrorFolder, is_beside_checkpoints
from rungs.mirror.mirror_record import (
    FileVersion,
    MirrorRecord,
    check_same_run,
    names_aside,
    version,
)
from rungs.run.folder import RunFolder

STAGED = ".mirror"
"""Folder in the run folder with what is being uploaded: links to the files of a checkpoint, so that
retention doesn't delete them, and copies of files that training writes to."""


class Copier:
    """Copies a run to its mirror. Any method raises what the file system of the mirror raises if it
    cannot be reached, and may then be called again.

    Args:
        run: the run folder.
        mirror: where to.
        keep: the key `keep_checkpoints` of the run.
    """

    def __init__(self, run: RunFolder, mirror: MirrorFolder, keep: int) -> None:
        self._run, self.mirror, self._keep = run, mirror, keep
        self._record: MirrorRecord | None = None
        self._saved: dict[str, Checkpoint] = {}

    def copy(self, *, everything: bool) -> None:
        """Copy the checkpoints that the mirror lacks, the newest first, each with all other files
        that changed; then delete those that the run has deleted, and what broke off.

        Args:
            everything: copy changed files even without a new checkpoint.

        Raises:
            UserError: the mirror is of another run.
            RunFailure: the run is no longer in its folder.
        """
        self._run.check()
        if self._record is None:
            self._record = self._begin()
        there = set(self.mirror.checkpoints())
        for left_behind in there & names_aside(self._run):
            self.mirror.set_aside(left_behind)
            there.remove(left_behind)
        while missing := [c for c in self._checkpoints() if c.folder.name not in there]:
            if self._copy(self._record, missing[-1]):
                there.add(missing[-1].folder.name)
        if everything:
            self._copy(self._record, None)
        self._delete_old(there)
        for name in self.mirror.unfinished():
            self.mirror.delete(name)

    def _begin(self) -> MirrorRecord:
        """Make sure that the mirror is of this run, and says so."""
        theirs = check_same_run(self._run, self.mirror)
        ours = MirrorRecord.of_run(self._run) or MirrorRecord.new()
        if theirs is None or theirs.run != ours.run:
            ours = MirrorRecord(run=ours.run)
            with self._staging() as staged:
                ours.write(staged)
                self.mirror.upload(staged, "Begin a mirror")
            ours.write(self._run.path)
        return ours

    def _checkpoints(self) -> list[Checkpoint]:
        found = list_checkpoints(self._run.checkpoints)
        self._saved |= {checkpoint.folder.name: checkpoint for checkpoint in found}
        return found

    def _copy(self, record: MirrorRecord, checkpoint: Checkpoint | None) -> bool:
        """Upload a checkpoint and the other files that changed; return whether it was still there
        to be copied."""
        with self._staging() as staged:
            if checkpoint is not None and not _stage(checkpoint, staged):
                return False
            files = self._other_files()
            changed = {
                name: found for name, found in files.items() if record.copied.get(name) != found
            }
            for name in changed:
                target = staged / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(self._run.path / name, target)
            what = checkpoint.folder.name if checkpoint else "files beside the checkpoints"
            self._run.check()
            self.mirror.upload(staged, f"Copy {what}")
        for gone in record.copied.keys() - files:
            self.mirror.delete_file(gone)
        self._run.check()
        self._record = record.model_copy(update={"copied": files})
        self._record.write(self._run.path)
        return True

    def _other_files(self) -> dict[str, FileVersion]:
        """Return the versions of all files to mirror that are of no checkpoint of the run, by
        relative path."""
        found = {}
        for path in self._run.path.rglob("*"):
            name = path.relative_to(self._run.path).as_posix()
            with contextlib.suppress(FileNotFoundError):
                is_own = path.is_file() and not path.is_symlink()
                if is_own and is_beside_checkpoints(name):
                    found[name] = version(path)
        return found

    def _delete_old(self, there: set[str]) -> None:
        """Delete the checkpoints from the mirror that retention deletes from a run, but none that
        the run still has."""
        for name in there - self._saved.keys():
            meta = self.mirror.read(f"{CHECKPOINTS}/{name}/{META_FILE}")
            with contextlib.suppress(ValidationError):
                self._saved[name] = Checkpoint(
                    self._run.checkpoints / name, CheckpointMeta.model_validate_json(meta or b"")
                )
        saved = [self._saved[name] for name in there & self._saved.keys()]
        for old in superfluous(sorted(saved, key=lambda c: c.order), self._keep):
            if not old.folder.exists():
                self.mirror.delete(old.folder.name)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """Yield an empty folder in the run folder; it is deleted at the end."""
        self._run.check()
        staged = self._run.path / STAGED
        disk.remove(staged)
        staged.mkdir()
        try:
            yield staged
        finally:
            if self._run.is_own():
                shutil.rmtree(staged, ignore_errors=True)


def _stage(checkpoint: Checkpoint, staged: Path) -> bool:
    """Link a checkpoint's files into the folder to upload; return whether it is still there."""
    target = staged / CHECKPOINTS / checkpoint.folder.name
    try:
        shutil.copytree(checkpoint.folder, target, copy_function=link_or_copy)
    except (FileNotFoundError, shutil.Error):
        if checkpoint.folder.exists():
            raise
        return False
    return True
