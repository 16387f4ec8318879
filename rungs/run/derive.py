"""A run folder made from another one, with some keys changed."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.common.paths import is_there
from rungs.config import run_config
from rungs.config.run_config import FILE_TYPES, MODEL_FILE, TRAIN_FILE
from rungs.run.folder import RUNS, find_run


@dataclasses.dataclass(frozen=True)
class NewRun:
    """A run folder before it is made."""

    folder: Path
    texts: dict[str, str]
    """Of its two files."""

    @classmethod
    def of(cls, folder: Path, origin: Path, changes: Mapping[str, Any]) -> Self:
        """Nothing is written.

        Args:
            origin: the run folder that it is like.
            changes: keys of either file, with their new values.

        Raises:
            UserError: a change is wrong, or another run is there already.
        """
        texts = _changed_files(origin, folder, changes)
        run_config.check_texts(folder, texts[MODEL_FILE], texts[TRAIN_FILE])
        if is_there(folder) and any(
            strict_json.read_text(folder / name) != text for name, text in texts.items()
        ):
            raise UserError(
                f"{folder}: there already, with other keys than it would have as a copy of"
                f" {origin}; choose another name, or go on with it as it is"
            )
        return cls(folder, texts)

    def make(self) -> Path:
        """Write the folder, whole or not at all; one that is there is left as it is.

        Raises:
            UserError: it cannot be made.
        """
        if not is_there(self.folder):
            _write_whole(self.folder, self.texts)
        return self.folder


def create_like(name: str, like: str, settings: Sequence[str]) -> Path:
    """Make run folder `name` from run `like`, with the keys in `settings` (`key=value`) changed.

    A folder that was made so before is left as it is, so that the same command goes on.

    Raises:
        UserError: a setting or the folder is in the way of that; nothing is written then.
    """
    target = Path(name) if len(Path(name).parts) > 1 else RUNS / name
    return NewRun.of(target, find_run(like), _parse_settings(settings)).make()


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


def _changed_files(origin: Path, target: Path, changes: Mapping[str, Any]) -> dict[str, str]:
    run_config.load_run(origin)
    contents = {name: json.loads(strict_json.read_text(origin / name)) for name in FILE_TYPES}
    for key, value in changes.items():
        in_model = key in FILE_TYPES[MODEL_FILE].model_fields
        contents[MODEL_FILE if in_model else TRAIN_FILE][key] = value
    for content in contents.values():
        schema = content.get("$schema")
        if isinstance(schema, str) and schema and "://" not in schema:
            content["$schema"] = Path(os.path.relpath(origin / schema, target)).as_posix()
    contents[TRAIN_FILE]["lineage"] = {"like": origin.as_posix(), "set": dict(changes)}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}
