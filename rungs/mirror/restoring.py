"""A run folder from its mirror, on a machine that has none."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from rungs.checkpointing.checkpoint_folder import CHECKPOINT_GLOB
from rungs.checkpointing.manifest import META_FILE, CheckpointMeta, read_checkpoint
from rungs.common import disk
from rungs.common.atomic_folder import lock_folder
from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.paths import is_folder, is_inside, is_there
from rungs.mirror.mirror_folder import CHECKPOINTS, MirrorFolder, is_beside_checkpoints
from rungs.mirror.mirror_record import MirrorRecord, check_same_run, step_and_name, version
from rungs.run.folder import RunFolder

RESTORING = ".restoring"
"""Folder in the run folder with what is being downloaded. While it is there, the run may lack
checkpoints that its mirror has."""

log = logging.getLogger("rungs")


def restore_if_empty(run: RunFolder, url: str, check: Callable[[CheckpointMeta], None]) -> None:
    """Download a run from its mirror if its folder has no checkpoints, or is not there. Otherwise
    only check that the mirror is of this run.

    Args:
        check: called with the newest checkpoint of the mirror before anything is written; raises
            UserError if the run folder doesn't fit it.

    Raises:
        UserError: the mirror is of another run, or ahead of this folder.
        RunFailure: the mirror cannot be reached, and may have checkpoints that are not here.
    """
    mirror = MirrorFolder(url)
    with _failures(mirror):
        _refuse_place(run, mirror)
    if not _is_empty(run):
        _check_if_reachable(run, mirror)
        return
    with _failures(mirror):
        mirror.require_login()
        names = sorted(mirror.checkpoints(), key=step_and_name, reverse=True)
        if not names:
            check_same_run(run, mirror)
            return
        check(_meta(mirror, names[0]))
    run.path.mkdir(parents=True, exist_ok=True)
    with lock_folder(run.checkpoints), _failures(mirror):
        if _is_empty(run):  # another process of the run may have been faster
            _Restoring(run, mirror).restore(names)


def _is_empty(run: RunFolder) -> bool:
    is_unfinished = (run.path / RESTORING).exists()
    return is_unfinished or not any(run.checkpoints.glob(CHECKPOINT_GLOB))


def _refuse_place(run: RunFolder, mirror: MirrorFolder) -> None:
    """Refuse a path that is a file, or from which the run could not be told apart."""
    if mirror.local_path is None:
        return
    if is_there(mirror.local_path) and not is_folder(mirror.local_path):
        raise UserError(f"--mirror {mirror.url}: is not a folder; name another one")
    here, there = run.path.resolve(), mirror.local_path.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UserError(
            f"--mirror {mirror.url}: is inside the run folder, or the run folder inside it; name"
            " another folder, best on another disk"
        )


def _check_if_reachable(run: RunFolder, mirror: MirrorFolder) -> None:
    try:
        check_same_run(run, mirror)
    except UserError:
        raise
    except Exception as error:  # of any library behind fsspec
        log.warning("%s: %s; training goes on without it for now", mirror.url, reason(error))


@contextlib.contextmanager
def _failures(mirror: MirrorFolder) -> Iterator[None]:
    """Turn any failure to read the mirror into a RunFailure, or a UserError if it is a path."""
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


def _meta(mirror: MirrorFolder, checkpoint: str) -> CheckpointMeta:
    place = f"{CHECKPOINTS}/{checkpoint}/{META_FILE}"
    try:
        return CheckpointMeta.model_validate_json(mirror.read(place) or b"")
    except ValidationError:
        raise UserError(
            f"{mirror.url}/{place}: damaged, or of another version of Rungs; not usable"
        ) from None


class _Restoring:
    """Downloads a run. What was already restored before a kill is not downloaded again."""

    def __init__(self, run: RunFolder, mirror: MirrorFolder) -> None:
        self._run, self._mirror = run, mirror
        self._staged = run.path / RESTORING
        self._files = {name: size for name, size in mirror.files().items() if is_inside(name)}

    def restore(self, checkpoints: list[str]) -> None:
        """Restore the files beside the checkpoints, then these checkpoints in their order."""
        absent = [name for name in checkpoints if not (self._run.checkpoints / name).exists()]
        wanted = {name: self._files_of(name) for name in absent}
        size = sum(self._files[file] for files in wanted.values() for file in files)
        log.info(
            "%s: restored from %s, %d checkpoint%s, %.3g GB",
            *(self._run.path, self._mirror.url, len(absent), "s" * (len(absent) > 1), size / 1e9),
        )
        disk.check_free_space(self._run.path, "what its mirror has", size)
        shutil.rmtree(self._staged, ignore_errors=True)
        self._staged.mkdir()
        record = MirrorRecord.of_mirror(self._mirror)
        assert record is not None
        for name in self._other_files():
            if self._restore_file(name):
                record.copied[name] = version(self._run.path / name)
        record.write(self._run.path)
        for name, files in wanted.items():
            self._restore_checkpoint(name, files)
        shutil.rmtree(self._staged)

    def _files_of(self, checkpoint: str) -> list[str]:
        return [name for name in self._files if name.startswith(f"{CHECKPOINTS}/{checkpoint}/")]

    def _other_files(self) -> list[str]:
        """Return the names of the files that are of no checkpoint, complete or not."""
        return [name for name in self._files if is_beside_checkpoints(name)]

    def _restore_file(self, name: str) -> bool:
        """Restore a file beside the checkpoints; return whether it was. Configs and other files of
        the user that are in the run folder stay as they are."""
        target = self._run.path / name
        is_record = any(target.is_relative_to(record) for record in self._run.records)
        if target.exists() and not is_record:
            return False
        self._mirror.download(name, self._staged / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        (self._staged / name).replace(target)
        return True

    def _restore_checkpoint(self, name: str, files: list[str]) -> None:
        """Restore a checkpoint, unless it is damaged there."""
        for file in files:
            self._mirror.download(file, self._staged / file)
        unfinished = self._staged / CHECKPOINTS / name
        if damage := read_checkpoint(unfinished).damage():
            log.warning(
                "%s: %s is damaged (%s); not restored", self._mirror.url, name, ", ".join(damage)
            )
            return
        for path in [*unfinished.rglob("*"), unfinished]:
            disk.sync_to_disk(path)
        self._run.checkpoints.mkdir(exist_ok=True)
        unfinished.rename(self._run.checkpoints / name)
