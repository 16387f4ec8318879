"""The folder that is a run: found by name, made from another, held by one trainer at a time."""

import contextlib
import dataclasses
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import config
import disk
import strict_json
from config import FILE_TYPES, MODEL_FILE, TRAIN_FILE
from errors import RunFailure, UserError
from paths import is_folder, is_there

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
    def capsules(self) -> Path:
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
    def held(self) -> Iterator[None]:
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
        return disk.failure(self.path, "the lock of the run", error)


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


def create_like(name: str, like: str, settings: Sequence[str]) -> Path:
    """Make run folder `name` from run `like`, with the keys in `settings` (`key=value`) changed.

    A folder that was made so before is left as it is, so that the same command goes on.

    Raises:
        UserError: a setting or the folder is in the way of that; nothing is written then.
    """
    origin = find_run(like)
    target = Path(name) if len(Path(name).parts) > 1 else RUNS / name
    changes = _parse_settings(settings)
    texts = _changed_files(origin, target, changes)
    config.check_texts(target, texts[MODEL_FILE], texts[TRAIN_FILE])
    if is_there(target):
        if any(strict_json.read_text(target / name) != text for name, text in texts.items()):
            raise UserError(
                f"{target}: there already, with other keys than --like and --set make; choose"
                " another name, or leave out --like to go on with it"
            )
        return target
    _write_whole(target, texts)
    return target


def _write_whole(folder: Path, texts: dict[str, str]) -> None:
    """Make a folder with these files, or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as unfinished:
            new = Path(unfinished) / folder.name
            new.mkdir()
            for name, text in texts.items():
                (new / name).write_text(text, encoding="utf-8")
            new.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from None


def _parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: give it as key=value")
        try:
            changes[key] = json.loads(value)
        except (ValueError, RecursionError):
            changes[key] = value
    return changes


def _changed_files(origin: Path, target: Path, changes: dict[str, Any]) -> dict[str, str]:
    config.load_run(origin)
    contents = {name: json.loads(strict_json.read_text(origin / name)) for name in FILE_TYPES}
    for key, value in changes.items():
        in_model = key in FILE_TYPES[MODEL_FILE].model_fields
        contents[MODEL_FILE if in_model else TRAIN_FILE][key] = value
    for content in contents.values():
        schema = content.get("$schema")
        if isinstance(schema, str) and schema and "://" not in schema:
            content["$schema"] = Path(os.path.relpath(origin / schema, target)).as_posix()
    contents[TRAIN_FILE]["lineage"] = {"like": origin.as_posix(), "set": changes}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}


def known_runs() -> str:
    """The runs there are, as the end of a message about one that is not."""
    runs = sorted(path.parent.name for path in RUNS.glob(f"*/{TRAIN_FILE}"))
    return f"there are {', '.join(runs)}" if runs else "a run folder holds model.json, train.json"
