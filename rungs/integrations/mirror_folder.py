"""The folder of a mirror: a path, `s3://`, `gs://`, `hf://` or any other URL that fsspec knows; and
its `mirror.json`, which identifies the run."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import Field, ValidationError

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.manifest import META_FILE
from rungs.checkpointing.weights_file import BASE, IMPORTED
from rungs.common import disk, hub, strict_json
from rungs.common.errors import UserError, reason
from rungs.run.folder import RunFolder, is_checkpoint_name

CHECKPOINTS, ASIDE, RECORD_FILE = "checkpoints", "aside", "mirror.json"
_NOT_MIRRORED = (ASIDE, "train.lock", "train.soft.lock", "holder.lock", RECORD_FILE)
_PARTIAL = ".partial"


class MirrorFolder:
    """A folder at a URL, which may not exist yet. Raises UserError if its file system is unknown or
    not installed. Paths in it are relative with slashes. Methods raise the file system's own errors
    if it cannot be reached."""

    def __init__(self, url: str) -> None:
        # fsspec takes a moment to import, and most runs have no mirror
        import fsspec

        if ":" in url.partition("/")[0] and "://" not in url:  # not shown: may hold a password
            raise UserError("--mirror: has ':' but is no URL; write s3://…, sftp://… or ./FOLDER")
        _, separator, place = url.partition("://")
        if separator and not place.strip("/"):
            raise UserError(f"--mirror {url}: names no folder, as with a variable that is not set")
        self.url = url.rstrip("/") or url
        protocol = fsspec.utils.get_protocol(url)
        self._is_local = protocol in ("file", "local")
        with self._unknown_place():
            fsspec.get_filesystem_class(protocol)

    @contextlib.contextmanager
    def _unknown_place(self) -> Iterator[None]:
        try:
            yield
        except (ImportError, ValueError) as error:
            raise UserError(
                f"--mirror {self.url}: {reason(error)}; docs/training.md lists the URLs and what to"
                " install for them"
            ) from None

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the path in it. Some, such as FTP, connect on creation."""
        import fsspec

        options = {"auto_mkdir": True} if self._is_local else {}
        with self._unknown_place():
            files, root = fsspec.core.url_to_fs(self.url, **options)
        return files, root.rstrip("/")

    @property
    def _files(self) -> Any:
        return self._opened[0]

    @property
    def local_path(self) -> Path | None:
        """The local path, None for a remote URL."""
        return Path(self._opened[1]) if self._is_local else None

    def require_login(self) -> None:
        """Raise UserError on the hub without a login, as private repositories would look absent."""
        if self.url.startswith("hf://"):
            hub.require_login(f"--mirror {self.url}")

    def names(self) -> list[str]:
        """Return the names of the files and folders directly in it, except hidden ones."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(""), detail=False)
        except FileNotFoundError:
            return []
        names = (PurePosixPath(path).name for path in found)
        return sorted(name for name in names if not name.startswith("."))

    def files(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of every file below a folder, by path in the mirror."""
        self._files.invalidate_cache()
        # by default fsspec leaves out local folders that can't be read, as if they were empty
        strict = {"on_error": "raise"} if self._is_local else {}
        try:
            found = self._files.find(self._at(folder), detail=True, **strict)
        except FileNotFoundError:
            return {}
        start = len(self._at("")) + 1
        return {
            path[start:]: info["size"]
            for path, info in found.items()
            if not path.endswith(_PARTIAL)
        }

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, sorted."""
        return sorted(name for name, file in self._checkpoint_files() if file == META_FILE)

    def unfinished(self) -> set[str]:
        """Return the names of checkpoints with an interrupted upload or deletion."""
        return {name for name, _ in self._checkpoint_files()} - set(self.checkpoints())

    def _checkpoint_files(self) -> Iterator[tuple[str, str]]:
        """Yield a checkpoint's name and the path in it for each file."""
        for path in self.files(CHECKPOINTS):
            name, _, file = path.removeprefix(f"{CHECKPOINTS}/").partition("/")
            if is_checkpoint_name(name):
                yield name, file

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, None if there is none."""
        try:
            return bytes(self._files.cat_file(self._at(path)))
        except FileNotFoundError:
            return None

    def upload(self, folder: Path, what: str) -> None:
        """Upload a local folder's files under their relative paths, atomically each, a checkpoint's
        `meta.json` last. Existing files are replaced. `what` names the folder in messages."""
        paths = [path for path in folder.rglob("*") if path.is_file()]
        if paths and hub.is_repository(self.url):
            hub.upload_to_repository(self.url, folder, what)
            return
        for path in sorted(paths, key=lambda path: path.name == META_FILE):
            target = self._at(path.relative_to(folder).as_posix())
            partial = target + _PARTIAL if self._is_local else target  # object stores need none
            self._files.put_file(str(path), partial)
            if self._is_local:
                disk.put_in_place(Path(partial), Path(target))

    def download(self, path: str, target: Path) -> None:
        """Download a file, creating its folder if needed."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._at(path), str(target))

    def set_aside(self, checkpoint: str) -> None:
        """Move a checkpoint to `aside/`."""
        for path in self.files(f"{CHECKPOINTS}/{checkpoint}"):
            self._files.cp_file(self._at(path), self._at(path.replace(CHECKPOINTS, ASIDE, 1)))
        self.delete(checkpoint)

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint, its `meta.json` first."""
        folder = f"{CHECKPOINTS}/{checkpoint}"
        self.delete_file(f"{folder}/{META_FILE}")
        if hub.is_repository(self.url):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._at(folder), recursive=True)  # in one commit
            return
        for path in self.files(folder):  # `rm` would read the `[1]` in a path as a pattern
            self.delete_file(path)
        if self.local_path is not None:
            disk.try_to_remove(self.local_path / folder)

    def delete_file(self, path: str) -> None:
        """Delete a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def _at(self, path: str) -> str:
        root = self._opened[1]
        return f"{root}/{path}" if path else root


def is_mirrored(name: str) -> bool:
    """Whether a run folder's file, given by relative path, is mirrored; not for checkpoints."""
    first, *_ = parts = name.split("/")
    if first in _NOT_MIRRORED or any(part.startswith(".") for part in parts):
        return False
    shared = f"{CHECKPOINTS}/{IMPORTED}/", f"{CHECKPOINTS}/{BASE}"
    return first != CHECKPOINTS or name.startswith(shared)


FileVersion = tuple[int, int]
"""Size in bytes and modification time in nanoseconds."""


class MirrorRecord(strict_json.StrictModel):
    """The content of `mirror.json`; the run folder's also lists the files copied so far."""

    run: str
    """A random id that the run and its mirror share."""
    copied: dict[str, FileVersion] = Field(default_factory=dict)
    """Files of the run folder that the mirror has, by relative path; empty in the mirror."""

    @classmethod
    def of_run(cls, run: RunFolder) -> Self | None:
        """Return the record of a run folder, None if it has none. Raises UserError."""
        path = run.path / RECORD_FILE
        return cls._parsed(strict_json.read_text(path), str(path)) if path.is_file() else None

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
        """Write the record into a folder, atomically."""
        disk.replace_file(folder / RECORD_FILE, self.model_dump_json() + "\n")

    @staticmethod
    def version(path: Path) -> FileVersion:
        """Return a version of a file that changes whenever the file does."""
        status = path.stat()
        return status.st_size, status.st_mtime_ns


def check_same_run(run: RunFolder, mirror: MirrorFolder) -> MirrorRecord | None:
    """Return a mirror's record after checking that the mirror is empty, or is of this run and not
    ahead of it. Raises UserError if not, or if it is no mirror."""
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


def check_not_taken(mirror: MirrorFolder, ours: MirrorRecord) -> None:
    """Raise UserError if another run has begun to copy to the mirror of a run."""
    theirs = MirrorRecord.of_mirror(mirror)
    if theirs is not None and theirs.run != ours.run:
        raise UserError(
            f"--mirror {mirror.url}: is the mirror of another run by now; name a new or empty"
            " folder for each run"
        )


def _newer(run: RunFolder, mirror: MirrorFolder) -> str | None:
    """Return the newest checkpoint of a mirror if the run never got that far, else None."""
    here = [path.name for path in checkpoint_folder.checkpoint_folders(run.checkpoints)]
    there = set(mirror.checkpoints()) - names_aside(run)
    newest = max([*here, *there], key=checkpoint_folder.order_by_name, default=None)
    return None if newest in here else newest


def names_aside(run: RunFolder) -> set[str]:
    """Return the names of the checkpoints that `--fresh` and `--from` moved aside."""
    names = (path.name for path in run.aside.glob(f"*/{CHECKPOINTS}/*"))
    return set(filter(is_checkpoint_name, names))
