"""Files of documents, the user's own or a repository's: which splits they belong to, fetching them
a few ahead, and reading the documents from Parquet, JSON lines or plain text as a stream."""

import fnmatch
import io
import itertools
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rungs.common import hub
from rungs.common.errors import UserError, errors_at, reason
from rungs.common.paths import file_checksum, open_given
from rungs.common.strict_json import format_name, format_value
from rungs.data.build.sections import parse_json, without_surrogates
from rungs.data.text.tokenizer import END_OF_TEXT
from rungs.data.tokens.dataset import TRAIN, VALIDATION, Split

Format = Literal["parquet", "json lines", "plain text"]
FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".txt": "plain text",
    ".text": "plain text",
}
"""Format by file name suffix, without that of a compression."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
DEFAULT_COLUMN = "text"
_BATCH_ROWS = 1024
_TEXT_BYTES = 1 << 20
"""Plain text without end-of-text marks is cut at line ends into documents of about this size."""
_SPLIT_WORDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in file names that mean a split, as in the hub's viewer:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
FILES_AHEAD = 3
"""Files being downloaded or waiting, besides the one being read."""


class DataFile(NamedTuple):
    """A file of documents."""

    name: str
    """Path in the repository or on this machine."""
    bytes: int
    sha256: str | None
    """As given by the hub, else None."""
    split: Split | None
    """None to divide its documents between the splits."""


class FetchedFile(NamedTuple):
    """A file on this machine."""

    file: DataFile
    path: Path
    sha256: str


class Choice(NamedTuple):
    """The user's selection of files."""

    config: str | None = None
    """Name of one of the repository's configurations."""
    split: str | None = None
    """The only split to train on."""
    patterns: tuple[str, ...] = ()


def local_files(paths: Iterable[Path], kind: Format) -> list[DataFile]:
    """Return the user's files. Raises UserError if one is missing or of another format."""
    found = []
    for path in dict.fromkeys(paths):
        with open_given(path) as file:
            found.append(DataFile(str(path), file.seek(0, io.SEEK_END), None, None))
        if format_of(path.name) != kind:
            raise UserError(f"{path}: its name does not end like the name of a file of {kind}")
    return found


def hub_files(name: str, repository: hub.HubRepository, choice: Choice) -> list[DataFile]:
    """Return the chosen files of a repository. Raises UserError if there are none."""
    files = {file: (found.bytes, found.sha256) for file, found in repository.files.items()}
    with errors_at(f"{name}: "):
        return choose(files, repository.configs, choice)


def choose(
    files: dict[str, tuple[int, str | None]], configs: Sequence[dict[str, Any]], choice: Choice
) -> list[DataFile]:
    """Return the chosen files of a repository, sorted by name, from their sizes and sha256s and the
    `configs` of its card. The default is the card's default configuration, or all files of
    documents without one. Raises UserError if there are no such files, configuration or split."""
    names = sorted(name for name in files if format_of(name))
    if not names:
        raise UserError(f"no file of documents; these are known: {', '.join(FORMATS)}")
    splits = _splits(names, configs, choice)
    known = sorted(set(splits.values()))
    chosen: dict[str, Split | None]
    if choice.split is not None:
        chosen = {name: None for name, split in splits.items() if split == choice.split}
        if not chosen:
            raise UserError(f"no split {format_value(choice.split)}; there are {', '.join(known)}")
    elif "train" not in known:  # no name tells the splits apart
        chosen = dict.fromkeys(splits)
    else:
        held_out = [split for split in ("validation", "test") if split in known][:1]
        uses: dict[str, Split | None] = {"train": TRAIN if held_out else None}
        uses |= dict.fromkeys(held_out, VALIDATION)
        chosen = {name: uses[split] for name, split in splits.items() if split in uses}
    return [DataFile(name, *files[name], split) for name, split in chosen.items()]


def _splits(names: list[str], configs: Sequence[dict[str, Any]], choice: Choice) -> dict[str, str]:
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
    """Return the configuration of this name; for None the default, or None without `configs`."""
    by_name = {str(each.get("config_name")): each for each in configs if each.get("data_files")}
    if name is not None and name not in by_name:
        known = ", ".join(by_name) or "none"
        raise UserError(f"no configuration {format_value(name)}; there are {known}")
    marked = [key for key, config in by_name.items() if config.get("default")]
    only = list(by_name) if len(by_name) == 1 else []
    for key in (name, *marked, *only, "default"):
        if key in by_name:
            return by_name[key]
    if by_name:
        raise UserError(f"choose a configuration with --config; there are {', '.join(by_name)}")
    return None


def _patterns(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the patterns of each split: `data_files` is one, several, or splits with theirs."""
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
    """Return the split in a file's name or folders: "train", "validation", "test", or ""."""
    words = re.split(r"[^a-z]+", name.lower())
    for split, spellings in _SPLIT_WORDS.items():
        if any(word in spellings for word in words):
            return split
    return ""


def fetcher(
    repository: str | None, revision: str | None, folder: Path
) -> Callable[[DataFile], Path]:
    """Return a function that returns a file's path on this machine; with a repository, it downloads
    the file into a folder first."""

    def fetch(file: DataFile) -> Path:
        if repository is None or revision is None:
            return Path(file.name)
        return hub.dataset_file(repository, revision, file.name, folder)

    return fetch


def fetch_ahead(
    files: Sequence[DataFile], fetch: Callable[[DataFile], Path], keep: bool = True
) -> Generator[FetchedFile, None, None]:
    """Yield files in order while fetching the next ones. `fetch` returns a file's path on this
    machine, downloading it if needed. Without `keep` each file is deleted after it was read. Raises
    UserError if a file cannot be fetched, or its checksum differs from the hub's."""
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
    sha256 = file_checksum(path) or ""
    if file.sha256 not in (None, sha256):
        path.unlink()
        raise UserError(f"{file.name}: was not downloaded correctly; run the same command again")
    return FetchedFile(file, path, sha256)


def format_of(name: str) -> Format | None:
    """Return the format that a file's name indicates, None if it is not supported."""
    suffixes = Path(name.lower()).suffixes
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def read(path: Path, name: str, column: str | None, first: int = 0) -> Iterator[str | None]:
    """Yield the text of each row of a file from row `first` on, None for rows without text, in
    bounded memory. `name` is the user's name for the file, whose suffix gives the format. The text
    is in `column`, or by default in `text` or the only column of strings; lone surrogates in it
    become U+FFFD. Raises UserError if the file cannot be read, is damaged or not UTF-8, or has no
    such column."""
    readers = {"parquet": _parquet, "json lines": _json_lines, "plain text": _plain_text}
    with _reading(name):
        rows = readers[format_of(name) or ""](path, name, column)
        yield from itertools.islice(rows, first, None)


def rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of Parquet or JSON lines; arguments and errors as for `read`."""
    with _reading(name):
        if format_of(name) == "parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_BATCH_ROWS):
                    yield from batch.to_pylist()
        else:
            yield from (row for row in _json_rows(path, name) if row is not None)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({reason(error)}); convert it first") from None
    except (OSError, EOFError, pa.ArrowException) as error:
        raise UserError(f"{name}: cannot be read: {reason(error)}; is it complete?") from None


def _parquet(path: Path, name: str, column: str | None) -> Iterator[str | None]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        texts = [field.name for field in file.schema_arrow if _holds_text(field.type)]
        column = _text_column(name, column, names, texts)
        if names.count(column) > 1:
            raise UserError(f"{name}: has several columns {column}; rename all but one")
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
            yield from batch.column(0).to_pylist()


def _holds_text(column: pa.DataType) -> bool:
    kind = column.value_type if pa.types.is_dictionary(column) else column
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _text_column(name: str, column: str | None, names: list[str], texts: list[str]) -> str:
    """Return the name of the text column; `texts` are the `names` of columns of strings. Raises
    UserError if it doesn't exist or holds no strings."""
    if column is None:
        only = texts[0] if len(texts) == 1 else None
        column = DEFAULT_COLUMN if DEFAULT_COLUMN in names else only
    if column in texts:
        return column
    found = ", ".join(map(format_name, texts)) or "none"
    if column is None:
        raise UserError(f"{name}: choose a column with --text-column; columns with text: {found}")
    problem = "has no text" if column in names else "is not there"
    raise UserError(
        f"{name}: the column {format_value(column)} {problem}; columns with text: {found}"
    )


def _json_lines(path: Path, name: str, column: str | None) -> Iterator[str | None]:
    for number, row in enumerate(_json_rows(path, name), 1):
        if row is not None and column is None:
            is_text = {key: isinstance(value, str) for key, value in row.items()}
            is_text |= {DEFAULT_COLUMN: True} if row.get(DEFAULT_COLUMN, "") is None else {}
            column = _text_column(name, None, [*row], [key for key in row if is_text[key]])
        yield None if row is None or column is None else _value(row, column, name, number)


def _json_rows(path: Path, name: str) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line, None for a blank one."""
    with _opened(path, name) as file:
        for number, line in enumerate(file, 1):
            row = None
            if line.strip():
                with errors_at(f"{name}: line {number}: ", ValueError):
                    row = parse_json(line)
                    if not isinstance(row, dict):
                        example = 'as {"text": "..."}'
                        raise ValueError(f"no JSON object; each line must be one, {example}")
            yield row


def _value(row: dict[str, Any], column: str, name: str, number: int) -> str | None:
    if column not in row:
        keys = ", ".join(map(format_name, row)) or "none"
        raise UserError(f"{name}: line {number} has no {format_value(column)}; its keys: {keys}")
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{name}: line {number}: {format_value(column)} is {format_value(value)}, which is no"
            " text; choose another --text-column"
        )
    return value and without_surrogates(value)


def _plain_text(path: Path, name: str, _column: str | None) -> Iterator[str | None]:
    """Yield the texts between end-of-text marks."""
    text = ""
    with _opened(path, name) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        while piece := _lines(lines):
            *whole, text = (text + piece).split(END_OF_TEXT)
            yield from (one.strip("\r\n") for one in whole)
            if len(text) >= _TEXT_BYTES:
                yield text
                text = ""
    yield text.strip("\r\n")


def _lines(file: IO[str]) -> str:
    """Return the next lines of a text, of about `_TEXT_BYTES`; a very long line in parts."""
    lines, size = [], 0
    while size <= _TEXT_BYTES and (line := file.readline()):
        lines.append(line)
        size += len(line)
    return "".join(lines)


def _opened(path: Path, name: str) -> Any:
    """Open a file for reading bytes, decompressed."""
    compression = _COMPRESSIONS.get(Path(name).suffix.lower())
    if compression is None:
        return path.open("rb")
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), compression))
