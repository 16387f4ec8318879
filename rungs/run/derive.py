"""New run folders made from another, or from a preset, with some keys changed."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rungs.common import disk, errors, paths, strict_json
from rungs.config import reinforce_config, run_config
from rungs.config.reference import write_schemas
from rungs.run.folder import RUNS, RunFolder, find_origin, new_run_path

Contents = dict[str, dict[str, Any]]
"""The contents of `model.json` and of the file beside it, by name, in this order."""


@dataclasses.dataclass(frozen=True)
class NewRun:
    """A run folder that is not written yet."""

    folder: Path
    texts: dict[str, str]
    """Contents of its two config files, by name."""
    task_files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Contents of the files that tasks name in the run folder: items and verifiers."""
    saved: tuple[Path, ...] = ()
    """The folders of a checkpoint that the run begins with, and of the weights under its LoRA
    adapter; files are hard-linked if possible."""
    records: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Contents of files that belong to that checkpoint, by name."""

    @classmethod
    def of(
        cls,
        folder: Path,
        origin: Path,
        changes: Mapping[str, Any],
        branch: "BranchPoint | None" = None,
    ) -> Self:
        """Prepare a copy of the run folder `origin` with `changes`, new values for keys of either
        file, without writing anything. Raises UserError if a change is wrong, or `folder` already
        exists with other contents."""
        contents = _read_files(origin, folder)
        like = origin.name if _is_packaged(origin) else origin.as_posix()
        found = branch.find() if branch and not folder.exists() else None
        lineage = _branched(folder, branch.step, changes, found) if branch else {}
        new = cls.from_contents(folder, contents, like, changes, lineage)
        new = dataclasses.replace(new, task_files=_task_files(origin))
        if found is None:
            return new
        saved, records, *_ = found
        if "max_minutes" in changes:  # the number of steps is decided anew
            records = {k: v for k, v in records.items() if k != RunFolder(folder).length.name}
        return dataclasses.replace(new, saved=saved, records=records)

    @classmethod
    def from_contents(
        cls,
        folder: Path,
        contents: Contents,
        origin: str,
        changes: Mapping[str, Any],
        lineage: Mapping[str, Any] = {},
    ) -> Self:
        """Like `of`, from the contents of `model.json` and of the file beside it, and the name of
        what they are from. `lineage` has keys of a branch."""
        texts = _changed(contents, origin, changes, lineage)
        run_config.check_texts(folder, texts)
        if folder.exists() and any(not _holds(folder / name, text) for name, text in texts.items()):
            raise errors.UserError(
                f"{folder}: already exists with other keys than this copy of {origin} would have;"
                " choose another name or use it as it is"
            )
        return cls(folder, texts)

    def make(self) -> Path:
        """Write the folder atomically, unless it exists; return it. Raises the error of
        `disk.unwritable`."""
        if self.folder.exists():
            return self.folder
        write_schemas()
        with disk.atomic_folder(self.folder) as new:
            for name, text in self.texts.items():
                (new / name).write_text(text, encoding="utf-8")
            for name, content in self.task_files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(content)
            for folder in self.saved:
                disk.copy(folder, RunFolder(new).checkpoints / folder.name, link=True)
            for name, content in self.records.items():
                (new / name).write_bytes(content)
        return self.folder

    def remove(self) -> None:
        """Remove the folder again, unless more than `make` wrote is in it by now."""
        if not self.folder.exists():
            return
        run, names = RunFolder(self.folder), {*self.texts, *self.task_files}
        files = {path for path in run.path.rglob("*") if path.is_file()}
        files -= set(map(run.path.joinpath, self.records))
        for folder in self.saved:
            files -= set((run.checkpoints / folder.name).rglob("*"))
        if files == {run.path / name for name in names}:
            disk.remove(self.folder)


def config_with(origin: Path, changes: Mapping[str, Any]) -> run_config.AnyRunConfig:
    """Return the config of a copy of the run folder `origin` with `changes`. Raises UserError if a
    change is wrong."""
    texts = _changed(_read_files(origin, origin), origin.as_posix(), changes, {})
    return run_config.check_texts(origin, texts)


class Parent(NamedTuple):
    """What a branch takes from the run that it continues."""

    saved: tuple[Path, ...]
    """As in `NewRun`."""
    records: Mapping[str, bytes]
    """Contents of the files that belong to it, by name."""
    warmup_of: int | None
    """The same in its lineage."""
    total_steps: int
    """Its length, by which its schedule goes."""


class BranchPoint(NamedTuple):
    """A step of another run at which a new one begins."""

    step: int
    find: Callable[[], Parent]
    """Raises UserError if there is no such checkpoint."""


def _branched(
    folder: Path, step: int, changes: Mapping[str, Any], found: Parent | None
) -> dict[str, Any]:
    """Return the keys of a branch's lineage. If its folder is there, so that the other run need not
    be, they are as in that folder."""
    keys = {"from_step": step}
    if found is None:
        lineage = run_config.load_any_run(folder).train.lineage
        warmup_of = lineage and lineage.warmup_of
    else:
        is_timed = RunFolder(folder).length.name in found.records
        follows_lengths = is_timed and "max_minutes" not in changes
        warmup_of = found.warmup_of or (None if follows_lengths else found.total_steps)
        warmup_of = None if "warmup_period_percent" in changes else warmup_of
    return keys if warmup_of is None else keys | {"warmup_of": warmup_of}


def create_like(
    name: str,
    like: str,
    settings: Sequence[str],
    keep: bool = True,
    branch: Callable[[Path], BranchPoint] | None = None,
) -> contextlib.AbstractContextManager[Path]:
    """Create the run folder `name` from the run `like` with `settings` (`key=value`) changed, and
    yield it. If the same call created it before, it is unchanged, so the same command resumes. If
    the block raises, for example UserError because the run does not fit its data or devices, or
    without `keep`, a folder created by this call is removed, unless more was written to it. With
    `branch`, a function of the folder of `like`, it begins with a checkpoint of that run. Raises
    UserError, before writing anything, if a setting is wrong or the folder cannot be created."""
    target = new_run_path(name)
    origin = find_origin(like, target)
    point = branch(origin) if branch else None
    return _created(NewRun.of(target, origin, parse_settings(settings), point), keep)


def create_from(
    name: str, contents: Contents, origin: str, settings: Sequence[str], keep: bool = True
) -> contextlib.AbstractContextManager[Path]:
    """Like `create_like`, from the contents of the config files instead of another run."""
    changes = parse_settings(settings)
    return _created(NewRun.from_contents(new_run_path(name), contents, origin, changes), keep)


@contextlib.contextmanager
def _created(new: NewRun, keep: bool) -> Iterator[Path]:
    is_new = not new.folder.exists()
    new.make()
    try:
        yield new.folder
    except Exception:
        keep = False
        raise
    finally:
        if is_new and not keep:
            new.remove()


def _holds(path: Path, text: str) -> bool:
    """Return whether a file has the JSON of `text`, possibly written in another way."""
    found = strict_json.read_text(path)
    with errors.errors_at(f"{path}: "):
        there = strict_json.parse_value(found)
    return strict_json.json_checksum(there) == strict_json.json_checksum(json.loads(text))


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return keys with their new values from `key=value`; values that are not JSON are strings.
    Raises UserError."""
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise errors.UserError(f"--set {setting}: must have the form key=value")
        if key == "lineage":
            raise errors.UserError("--set lineage: a copy gets its own; leave it out")
        if key in changes:
            raise errors.UserError(f"--set {key}: given more than once; keep one")
        with errors.errors_at(f"--set {setting}: "):
            changes[key] = strict_json.parse_value(value)
    return changes


def _task_files(origin: Path) -> dict[str, bytes]:
    """Return the contents of the files that tasks name in a run folder, by relative path."""
    train = run_config.load_any_run(origin).train
    tasks = train.tasks if isinstance(train, reinforce_config.ReinforceConfig) else ()
    names = {name for task in tasks for name in task.files if paths.is_inside(name)}
    return {name: (origin / name).read_bytes() for name in names if (origin / name).is_file()}


def _read_files(origin: Path, target: Path) -> Contents:
    """Return the contents of a run's config files, with their schemas' paths from `target`."""
    run_config.load_any_run(origin)
    files = run_config.config_files(origin)
    contents = {name: json.loads(strict_json.read_text(origin / name)) for name in files}
    place = RUNS / origin.name if _is_packaged(origin) else origin
    for content in contents.values():
        schema = content.get("$schema")
        if isinstance(schema, str) and schema and "://" not in schema:
            content["$schema"] = Path(os.path.relpath(place / schema, target)).as_posix()
    return contents


def _is_packaged(origin: Path) -> bool:
    return origin.is_relative_to(paths.PACKAGED)


def _changed(
    contents: Contents, origin: str, changes: Mapping[str, Any], branch: Mapping[str, Any]
) -> dict[str, str]:
    """Return the texts of config files after `changes`, with the run's lineage."""
    model_file, train_file = contents
    changed = {name: dict(content) for name, content in contents.items()}
    for key, value in changes.items():
        in_model = key in run_config.FILE_TYPES[model_file].model_fields
        changed[model_file if in_model else train_file][key] = value
    changed[train_file]["lineage"] = {"like": origin, "set": dict(changes), **branch}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in changed.items()}
