"""Restores a run folder from its mirror on another machine."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from rungs.checkpointing.checkpoint_folder import checkpoint_folders, order_by_name
from rungs.checkpointing.manifest import META_FILE, CheckpointError, CheckpointMeta, read_checkpoint
from rungs.common import atomic_folder, disk, paths
from rungs.common.errors import RunFailure, UserError, reason
from rungs.mirror import mirror_folder
from rungs.mirror.mirror_folder import CHECKPOINTS, MirrorFolder, MirrorRecord, check_same_run
from rungs.run.folder import RunFolder

RESTORING = ".restoring"
"""Folder in the run folder for downloads in progress."""

log = logging.getLogger("rungs")


def restore_if_empty(run: RunFolder, url: str, check: Callable[[CheckpointMeta], None]) -> None:
    """Download a run from its mirror if its folder is missing or has no checkpoints; otherwise only
    check that the mirror is of this run. Before anything is written, `check` gets the mirror's
    newest checkpoint and raises UserError if the run folder doesn't fit it. Raises UserError if the
    mirror is of another run or ahead of this folder, RunFailure if it can't be reached but is
    needed."""
    mirror = MirrorFolder(url)
    with _failures(mirror):
        _refuse_place(run, mirror)
    if not _is_empty(run):
        try:
            check_same_run(run, mirror)
        except UserError:
            raise
        except Exception as error:  # of any library behind fsspec
            log.warning("%s: %s; training goes on without it for now", mirror.url, reason(error))
        return
    with _failures(mirror):
        mirror.require_login()
        names = sorted(mirror.checkpoints(), key=order_by_name, reverse=True)
        if not names:
            check_same_run(run, mirror)
            return
        for name in names:
            with contextlib.suppress(ValidationError):
                content = mirror.read(f"{CHECKPOINTS}/{name}/{META_FILE}")
                check(CheckpointMeta.model_validate_json(content or b""))
                break
    run.path.mkdir(parents=True, exist_ok=True)
    run.refuse_links()
    with atomic_folder.lock_folder(run.checkpoints), _failures(mirror):
        if _is_empty(run):  # another process of the run may have been faster
            _Restoring(run, mirror).restore(names)


def _is_empty(run: RunFolder) -> bool:
    return not checkpoint_folders(run.checkpoints)


def _refuse_place(run: RunFolder, mirror: MirrorFolder) -> None:
    """Raise UserError if the mirror is a file, or contains the run folder or is inside it."""
    if mirror.local_path is None:
        return
    if paths.is_there(mirror.local_path) and not paths.is_folder(mirror.local_path):
        raise UserError(f"--mirror {mirror.url}: is not a folder; name another one")
    here, there = run.path.resolve(), mirror.local_path.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UserError(
            f"--mirror {mirror.url}: is inside the run folder, or the run folder inside it; name"
            " another folder, best on another disk"
        )


@contextlib.contextmanager
def _failures(mirror: MirrorFolder) -> Iterator[None]:
    """Turn a failure to read the mirror into a RunFailure, or a UserError for a local path."""
    try:
        yield
    except (UserError, RunFailure):
        raise
    except Exception as error:
        if mirror.local_path is not None:
            raise UserError(f"--mirror {mirror.url}: cannot be read: {reason(error)}") from None
        raise RunFailure(
            f"--mirror {mirror.url}: cannot be read: {reason(error)}; it may have checkpoints that"
            " are not here, so run the same command again when it can be read, or leave out"
            " --mirror"
        ) from error


class _Restoring:
    """Downloads a run completely before moving files to their place. Complete checkpoints from a
    killed download are not downloaded again."""

    def __init__(self, run: RunFolder, mirror: MirrorFolder) -> None:
        self._run, self._mirror = run, mirror
        self._staged = run.path / RESTORING
        self._files = {name: size for name, size in mirror.files().items() if paths.is_inside(name)}

    def restore(self, checkpoints: list[str]) -> None:
        """Restore these checkpoints, newest first, and all other files. Raises UserError if none of
        the checkpoints is valid."""
        folders = {name: f"{CHECKPOINTS}/{name}/" for name in checkpoints}
        wanted = {
            name: [file for file in self._files if file.startswith(folder)]
            for name, folder in folders.items()
        }
        size = sum(self._files[file] for files in wanted.values() for file in files)
        log.info("%s: restoring it from %s, %.3g GB", self._run.path, self._mirror.url, size / 1e9)
        disk.check_free_space(self._run.path, "what its mirror has", size)
        if self._staged.is_symlink():
            self._staged.unlink()
        self._staged.mkdir(exist_ok=True)
        valid = [name for name, files in wanted.items() if self._download(name, files)]
        if not valid:
            raise UserError(
                f"--mirror {self._mirror.url}: none of its checkpoints is valid; to start over,"
                " name a new or empty folder"
            )
        self._restore_other_files()
        self._run.checkpoints.mkdir(exist_ok=True)
        for name in valid:
            disk.move_folder(self._staged / CHECKPOINTS / name, self._run.checkpoints / name)
        shutil.rmtree(self._staged)
        for damaged in wanted.keys() - valid:
            self._mirror.set_aside(damaged)
        log.info("%s: restored from %s", self._run.path, self._mirror.url)

    def _download(self, name: str, files: list[str]) -> bool:
        """Download a checkpoint; return whether it is valid."""
        folder = self._staged / CHECKPOINTS / name
        if not _damage(folder):
            return True
        for file in files:
            self._mirror.download(file, self._staged / file)
        if damage := _damage(folder):
            log.warning("%s: %s is damaged (%s); not restored", self._mirror.url, name, damage)
            return False
        for path in [*folder.rglob("*"), folder]:
            disk.sync_to_disk(path)
        return True

    def _restore_other_files(self) -> None:
        """Restore the files outside the run's checkpoints."""
        record = MirrorRecord.of_mirror(self._mirror)
        assert record is not None
        for name in list(filter(self._is_restored, filter(mirror_folder.is_mirrored, self._files))):
            target = self._run.path / name
            self._mirror.download(name, self._staged / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            disk.put_in_place(self._staged / name, target)
            record.copied[name] = MirrorRecord.version(target)
        record.write(self._run.path)

    def _is_restored(self, name: str) -> bool:
        """Whether to restore a file: the user's configs and other files in the run folder are kept,
        and nothing is written through links."""
        target = self._run.path / name
        if not target.parent.resolve().is_relative_to(self._run.path.resolve()):
            return False
        is_record = any(target.is_relative_to(record) for record in self._run.records)
        return is_record or not target.exists()


def _damage(checkpoint: Path) -> str:
    """Return the names of a checkpoint's damaged files, an empty string if there are none. Raises
    UserError if it is of another version or cannot be read."""
    try:
        return ", ".join(read_checkpoint(checkpoint).damage())
    except CheckpointError as error:
        if error.state != "damaged":
            raise
        return META_FILE
