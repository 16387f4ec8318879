"""Copying a run to its mirror in the background while training continues; restoring it on another
machine."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from rungs.checkpointing import checkpoint_folder, manifest
from rungs.checkpointing.checkpoint_folder import superfluous
from rungs.common import disk, paths
from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.helper_process import delay_after
from rungs.common.run_log import log
from rungs.integrations import mirror_folder
from rungs.integrations.mirror_folder import CHECKPOINTS, MirrorFolder, MirrorRecord, check_same_run
from rungs.run.folder import RunFolder

_TRIES_AT_END = 3
STAGED = ".mirror"
"""Folder in the run folder for files being uploaded: hard links to a checkpoint, so that retention
can't delete it, and copies of files that training writes to."""
RESTORING = ".restoring"
"""Folder in the run folder for downloads in progress."""


class Mirroring:
    """Copies a run to its mirror in the background during the `with` block. An unreachable mirror
    causes warnings but never delays a step. If copying takes longer than the checkpoint interval,
    only the newest checkpoint is copied next. Needs the run's lock; `keep` is
    `keep_checkpoints`."""

    def __init__(self, run: RunFolder, url: str, keep: int) -> None:
        self._url, self._copier = url, Copier(run, MirrorFolder(url), keep)
        self._is_due, self._is_ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def request(self) -> None:
        """Have new files copied soon; return at once."""
        self._is_due.set()

    def __enter__(self) -> Self:
        self._is_due.set()  # so that an unwritable mirror is reported at once
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until everything is copied, or cannot be."""
        self._is_ending.set()
        self._is_due.set()
        self._thread.join(1.0)
        if self._thread.is_alive():
            log.info("copying the rest to %s; Ctrl-C leaves without it", self._url)
        while self._thread.is_alive():
            self._thread.join(1.0)

    def _work(self) -> None:
        failures = 0
        while self._is_due.wait():
            self._is_due.clear()
            is_last = self._is_ending.is_set()
            try:
                self._copier.copy(everything=is_last)
            except (UserError, RunFailure) as error:
                log.warning("%s; nothing more is copied there", error)
                return
            except Exception as error:  # of any library behind fsspec
                failures += 1
                if is_last and failures >= _TRIES_AT_END:
                    log.warning("%s: %s; the mirror is not complete", self._url, reason(error))
                    return
                delay = delay_after(failures)
                log.warning("%s: %s; trying again in %.0f s", self._url, reason(error), delay)
                if self._is_ending.is_set():
                    time.sleep(delay)
                else:
                    self._is_ending.wait(delay)
                self._is_due.set()
            else:
                if failures:
                    log.info("%s: reached again; up to date", self._url)
                failures = 0
                if is_last:
                    return


class NoMirroring(contextlib.nullcontext[None]):
    """Stand-in for a run without a mirror, and for all processes except the first."""

    def request(self) -> None:
        """Do nothing."""


class Copier:
    """Copies a run to its mirror, with the arguments of `Mirroring`. `copy` raises the file
    system's own errors if the mirror cannot be reached, and may then be called again."""

    def __init__(self, run: RunFolder, mirror: MirrorFolder, keep: int) -> None:
        self._run, self.mirror, self._keep = run, mirror, keep
        self._record: MirrorRecord | None = None
        self._saved: dict[str, manifest.Checkpoint] = {}

    def copy(self, *, everything: bool) -> None:
        """Copy the checkpoints that the mirror lacks, newest first, each with the other changed
        files; then delete unfinished uploads and checkpoints that the run has deleted. `everything`
        copies changed files even without a new checkpoint. Raises UserError if the mirror is of
        another run, RunFailure if the run is no longer in its folder."""
        if self._record is None:
            self._record = self._begin()
        else:
            mirror_folder.check_not_taken(self.mirror, self._record)
        there = set(self.mirror.checkpoints())
        for left_behind in there & mirror_folder.names_aside(self._run):
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
        """Check that the mirror is of this run, and mark a new one as such."""
        theirs = mirror_folder.check_same_run(self._run, self.mirror)
        ours = MirrorRecord.of_run(self._run) or MirrorRecord(run=secrets.token_hex(16))
        if theirs is None or theirs.run != ours.run:
            ours = MirrorRecord(run=ours.run)
            with self._staging() as staged:
                ours.write(staged)
                self.mirror.upload(staged, "Begin a mirror")
            ours.write(self._run.path)
        return ours

    def _checkpoints(self) -> list[manifest.Checkpoint]:
        found = checkpoint_folder.list_checkpoints(self._run.checkpoints)
        self._saved |= {checkpoint.folder.name: checkpoint for checkpoint in found}
        return found

    def _copy(self, record: MirrorRecord, checkpoint: manifest.Checkpoint | None) -> bool:
        """Upload changed files, and a checkpoint unless deleted; return whether it was there."""
        with self._staging() as staged:
            if checkpoint is not None and not _stage(checkpoint, staged):
                return False
            files = self._other_files()
            for name in dict(files.items() - record.copied.items()):
                target = staged / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    disk.copy(self._run.path / name, target)
            what = checkpoint.folder.name if checkpoint else "files beside the checkpoints"
            self.mirror.upload(staged, f"Copy {what}")
        for gone in filter(mirror_folder.is_mirrored, record.copied.keys() - files):
            if not gone.startswith(CHECKPOINTS):  # its checkpoints may need it
                self.mirror.delete_file(gone)
        self._record = record.model_copy(update={"copied": files})
        self._record.write(self._run.path)
        return True

    def _other_files(self) -> dict[str, mirror_folder.FileVersion]:
        """Return the versions of the run's other files to mirror, by relative path."""
        found = {}
        run = self._run  # whose checkpoints may be a link, which rglob doesn't follow
        for path in (*run.path.rglob("*"), *run.checkpoints.rglob("*")):
            name = path.relative_to(run.path).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink() and mirror_folder.is_mirrored(name):
                    found[name] = MirrorRecord.version(path)
        return found

    def _delete_old(self, there: set[str]) -> None:
        """Delete checkpoints from the mirror by the rule for runs, except those in the run."""
        for name in there - self._saved.keys():
            meta = self.mirror.read(f"{CHECKPOINTS}/{name}/{manifest.META_FILE}")
            with contextlib.suppress(ValidationError):
                self._saved[name] = manifest.Checkpoint(
                    self._run.checkpoints / name,
                    manifest.CheckpointMeta.model_validate_json(meta or b""),
                )
        saved = [self._saved[name] for name in there & self._saved.keys()]
        for old in superfluous(sorted(saved, key=lambda c: c.order), self._keep):
            if not old.folder.exists():
                self.mirror.delete(old.folder.name)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """Yield an empty folder in the run folder; it is deleted at the end."""
        staged = self._run.path / STAGED
        disk.remove(staged)
        staged.mkdir()
        try:
            yield staged
        finally:
            disk.try_to_remove(staged)


def _stage(checkpoint: manifest.Checkpoint, staged: Path) -> bool:
    """Link a checkpoint's files into the folder to upload; return whether it still exists."""
    target = staged / CHECKPOINTS / checkpoint.folder.name
    try:
        disk.copy(checkpoint.folder, target, link=True)
    except FileNotFoundError:
        if checkpoint.folder.exists():
            raise
        return False
    return True


def restore_if_empty(
    run: RunFolder, url: str, check: Callable[[manifest.CheckpointMeta], None]
) -> None:
    """Download a run from its mirror if its folder is missing or has no checkpoints; otherwise only
    check that the mirror is of this run. Before anything is written, `check` gets the mirror's
    newest checkpoint and raises UserError if the run folder doesn't fit it. Raises UserError if the
    mirror is of another run or ahead of this folder, RunFailure if it can't be reached but is
    needed."""
    mirror = MirrorFolder(url)
    with _failures(run, mirror):
        if mirror.local_path is not None:
            here, there = run.path.resolve(), mirror.local_path.resolve()
            if there.is_relative_to(here) or here.is_relative_to(there):
                raise UserError(
                    f"--mirror {mirror.url}: is inside the run folder, or the run folder inside"
                    " it; name another folder, best on another disk"
                )
    if not _is_empty(run):
        try:
            check_same_run(run, mirror)
        except UserError:
            raise
        except Exception as error:  # of any library behind fsspec
            log.warning("%s: %s; training goes on without it for now", mirror.url, reason(error))
        return
    with _failures(run, mirror):
        mirror.require_login()
        names = sorted(mirror.checkpoints(), key=checkpoint_folder.order_by_name, reverse=True)
        if not names:
            check_same_run(run, mirror)
            return
        if MirrorRecord.of_mirror(mirror) is None:
            raise UserError(
                f"--mirror {mirror.url}: has checkpoints but no {mirror_folder.RECORD_FILE}; copy"
                f" that file there, too, or {CHECKPOINTS}/ from there into {run.path}, and leave"
                " out --mirror or name an empty folder"
            )
        for name in names:
            with contextlib.suppress(ValidationError):
                content = mirror.read(f"{CHECKPOINTS}/{name}/{manifest.META_FILE}")
                check(manifest.CheckpointMeta.model_validate_json(content or b""))
                break
    run.path.mkdir(parents=True, exist_ok=True)
    with disk.lock_folder(run.checkpoints), _failures(run, mirror):
        if _is_empty(run):  # another process of the run may have been faster
            _restore(run, mirror, names)


def _is_empty(run: RunFolder) -> bool:
    return not checkpoint_folder.checkpoint_folders(run.checkpoints)


@contextlib.contextmanager
def _failures(run: RunFolder, mirror: MirrorFolder) -> Iterator[None]:
    """Turn a failure to read the mirror into a RunFailure, or a UserError for a local path."""
    try:
        yield
    except (UserError, RunFailure):
        raise
    except Exception as error:
        if disk.reason_of_no_space(error):
            raise disk.write_failure(run.path, "what its mirror has", error) from None
        if mirror.local_path is not None:
            raise UserError(f"--mirror {mirror.url}: cannot be read: {reason(error)}") from None
        raise RunFailure(
            f"--mirror {mirror.url}: cannot be read: {reason(error)}; it may have checkpoints that"
            " are not here, so run the same command again when it can be read, or leave out"
            " --mirror"
        ) from error


def _restore(run: RunFolder, mirror: MirrorFolder, checkpoints: list[str]) -> None:
    """Restore these checkpoints, newest first, and all other files. Everything is downloaded before
    files move to their place; complete checkpoints from a killed download are not downloaded
    again. Raises UserError if none of the checkpoints is valid."""
    files = {name: size for name, size in mirror.files().items() if paths.is_inside(name)}
    wanted = {
        name: [file for file in files if file.startswith(f"{CHECKPOINTS}/{name}/")]
        for name in checkpoints
    }
    size = sum(files[file] for own in wanted.values() for file in own)
    log.info("%s: restoring it from %s, %.3g GB", run.path, mirror.url, size / 1e9)
    disk.check_free_space(run.path, "what its mirror has", size)
    staged, valid = run.path / RESTORING, []
    staged.mkdir(exist_ok=True)
    for name, own in wanted.items():
        folder = staged / CHECKPOINTS / name
        for file in own if _damage(folder) else ():
            mirror.download(file, staged / file)
        if damage := _damage(folder):
            log.warning("%s: %s is damaged (%s); not restored", mirror.url, name, damage)
        else:
            disk.sync_folder(folder)
            valid.append(name)
    if not valid:
        raise UserError(
            f"--mirror {mirror.url}: none of its checkpoints is valid; to start over, name a new or"
            " empty folder"
        )
    _restore_other_files(run, mirror, filter(mirror_folder.is_mirrored, files))
    run.checkpoints.mkdir(exist_ok=True)
    for name in valid:
        disk.move(staged / CHECKPOINTS / name, run.checkpoints / name)
    disk.remove(staged)
    for damaged in wanted.keys() - valid:
        mirror.set_aside(damaged)
    log.info("%s: restored from %s", run.path, mirror.url)


def _restore_other_files(run: RunFolder, mirror: MirrorFolder, names: Iterable[str]) -> None:
    """Restore files outside the run's checkpoints; configs and other files that the user has in the
    run folder are kept."""
    record = MirrorRecord.of_mirror(mirror)
    assert record is not None  # see `restore_if_empty`
    for name in names:
        target, staged = run.path / name, run.path / RESTORING / name
        if target.exists() and not any(target.is_relative_to(one) for one in run.records):
            continue
        mirror.download(name, staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        disk.put_in_place(staged, target)
        record.copied[name] = MirrorRecord.version(target)
    record.write(run.path)


def _damage(checkpoint: Path) -> str:
    """Return the names of a checkpoint's damaged files, an empty string if there are none."""
    try:
        return ", ".join(manifest.read_checkpoint(checkpoint).damage())
    except manifest.CheckpointError:
        return manifest.META_FILE
