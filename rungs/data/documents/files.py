"""The files that a dataset is made of: the user's own or a repository's, which of them are for
validation, and how they get to this machine, a few ahead of the one that is being read."""

import fnmatch
import hashlib
import itertools
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common import hub
from rungs.common.errors import UserError
from rungs.common.paths import require_regular
from rungs.common.strict_json import format_value
from rungs.data.dataset import TRAIN, VALIDATION, Split
from rungs.data.documents.reading import FORMATS, Format, format_of

_SPLIT_WORDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""What the hub's own viewer reads split names from:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
FILES_AHEAD = 3
"""Files on the way or waiting, besides the one that is being read."""


class DataFile(NamedTuple):
    """A file of documents."""

    name: str
    """Its path, in the repository or on this machine."""
    bytes: int
    sha256: str | None
    """As the hub says; None if it does not."""
    split: Split | None
    """None if its documents are divided between the splits."""


class FetchedFile(NamedTuple):
    """A file on this machine."""

    file: DataFile
    path: Path
    sha256: str


class Choice(NamedTuple):
    """What the user asked for."""

    config: str | None = None
    """Name of one of the repository's configurations."""
    split: str | None = None
    """Train on this one only."""
    patterns: tuple[str, ...] = ()
    """Patterns of file names."""


def local_files(paths: Iterable[Path], kind: Format) -> list[DataFile]:
    """Return the user's files; raises UserError if one is missing or of another format."""
    found = []
    for path in dict.fromkeys(paths):
        try:
            require_regular(path)
            found.append(DataFile(str(path), path.stat().st_size, None, None))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if format_of(path.name) != kind:
            raise UserError(f"{path}: its name does not end like the name of a file of {kind}")
    return found


def hub_files(name: str, repository: hub.HubRepository, choice: Choice) -> list[DataFile]:
    """Return the chosen files of a repository; raises UserError if it has none."""
    files = {file: (found.bytes, found.sha256) for file, found in repository.files.items()}
    try:
        return choose(files, repository.configs, choice)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def choose(
    files: dict[str, tuple[int, str | None]], configs: Sequence[dict[str, Any]], choice: Choice
) -> list[DataFile]:
    """Return the chosen files of a repository, in the order of their names. Without a choice, these
    are the files of the default configuration if the repository's card has any, or else all files
    of documents. Raises UserError if there are no such files, or no such configuration or split.

    Args:
        files: size and sha256 by name.
        configs: `configs` of the repository's card.
    """
    names = sorted(name for name in files if format_of(name))
    if not names:
        raise UserError(f"no file of documents; these are known: {', '.join(FORMATS)}")
    splits = _splits(names, configs, choice)
    known = sorted(set(splits.values()))
    if choice.split is not None:
        splits = {name: TRAIN for name, split in splits.items() if split == choice.split}
        if not splits:
            raise UserError(f"no split {format_value(choice.split)}; there are {', '.join(known)}")
        return [DataFile(name, *files[name], None) for name in splits]
    held_out = next((split for split in ("validation", "test") if split in known), None)
    if "train" not in known:  # nothing says which files are for what
        return [DataFile(name, *files[name], None) for name in splits]
    uses: dict[str, Split | None] = {"train": TRAIN if held_out else None}
    if held_out:
        uses[held_out] = VALIDATION
    return [
        DataFile(name, *files[name], uses[split]) for name, split in splits.items() if split in uses
    ]


def _splits(names: list[str], configs: Sequence[dict[str, Any]], choice: Choice) -> dict[str, str]:
    """Return the split of each chosen file."""
    if choice.patterns:
        chosen = {name: split_of(name) for name in names if _matches(name, choice.patterns)}
        if not chosen:
            raise UserError(
                f"no file matches --files {' '.join(choice.patterns)}; the first is {names[0]}"
            )
        return chosen
    try:
        config = _config(configs, choice.config)
        if config is None:
            return {name: split_of(name) for name in names}
        found = {
            name: split
            for split, patterns in _patterns(config).items()
            for name in names
            if _matches(name, patterns)
        }
    except (AttributeError, LookupError, TypeError):
        raise UserError(
            "the configurations in its card have an unknown form; choose files with --files"
        ) from None
    return dict(sorted(found.items()))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _config(configs: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any] | None:
    """Return the configuration of a name; without one the default, None if the card has none."""
    with_files = [config for config in configs if config.get("data_files")]
    by_name = {str(config.get("config_name")): config for config in with_files}
    if name is not None:
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise UserError(f"no configuration {format_value(name)}; there are {known}")
        return by_name[name]
    marked = [config for config in with_files if config.get("default")]
    if not with_files or marked or len(with_files) == 1:
        return next(iter(marked or with_files), None)
    if "default" in by_name:
        return by_name["default"]
    raise UserError(f"choose a configuration with --config; there are {', '.join(by_name)}")


def _patterns(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the patterns of each split: `data_files` is a pattern, several, or a list of splits
    with theirs."""
    data_files = config["data_files"]
    if isinstance(data_files, str):
        data_files = [data_files]
    if all(isinstance(pattern, str) for pattern in data_files):
        return {"train": data_files}
    found = {}
    for entry in data_files:
        patterns = entry["path"]
        found[str(entry["split"])] = [patterns] if isinstance(patterns, str) else list(patterns)
    return found


def split_of(name: str) -> str:
    """Return the split that a file's name or one of its folders says it belongs to: "train",
    "validation" or "test", or "" if it says nothing."""
    words = re.split(r"[^a-z]+", name.lower())
    for split, spellings in _SPLIT_WORDS.items():
        if any(word in spellings for word in words):
            return split
    return ""


def fetch_ahead(
    files: Sequence[DataFile], fetch: Callable[[DataFile], Path], keep: bool = True
) -> Generator[FetchedFile, None, None]:
    """Yield files in order, while the next ones are being fetched. Raises UserError if a file
    cannot be fetched, or has another checksum than on the hub.

    Args:
        fetch: returns the path of a file on this machine, after a download if it isn't there.
        keep: if False, each file is deleted after it was read.
    """
    with ThreadPoolExecutor(FILES_AHEAD) as pool:
        fetched = (pool.submit(_fetch, file, fetch) for file in files)
        coming = deque(itertools.islice(fetched, FILES_AHEAD))
        try:
            while True:
                coming.extend(itertools.islice(fetched, 1))
                if not coming:
                    return
                found = coming.popleft().result()
                yield found
                if not keep:
                    found.path.unlink(missing_ok=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _fetch(file: DataFile, fetch: Callable[[DataFile], Path]) -> FetchedFile:
    path = fetch(file)
    try:
        with path.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file.name}: cannot be read: {error.strerror}") from None
    if file.sha256 not in (None, sha256):
        path.unlink()
        raise UserError(f"{file.name}: was not downloaded correctly; run the same command again")
    return FetchedFile(file, path, sha256)
