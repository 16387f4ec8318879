"""The documents in a file of Parquet, JSON lines or plain text, read as a stream."""

import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rungs.common.errors import UserError, reason
from rungs.common.paths import require_regular
from rungs.common.strict_json import format_name, format_value
from rungs.data.tokenizer import END_OF_TEXT

Format = Literal["parquet", "json lines", "plain text"]
FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".txt": "plain text",
    ".text": "plain text",
}
"""Format by the suffix of a file's name, without the suffix of its compression."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
DEFAULT_COLUMN = "text"
_BATCH_ROWS = 1024
_TEXT_BYTES = 1 << 20
"""A plain text without ends of text is cut into documents of so many bytes, at line ends."""


def format_of(name: str) -> Format | None:
    """Return the format that a file's name says it has, None if it is none of ours."""
    suffixes = Path(name).suffixes
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def read(path: Path, name: str, column: str | None, first: int = 0) -> Iterator[str | None]:
    """Yield the text of each row of a file, in order and in bounded memory; None if it has none.
    Raises UserError if the file cannot be read, is damaged or not UTF-8, or has no such column of
    texts.

    Args:
        name: as the user knows the file; its suffix says the format.
        column: column with the text; without one `text`, or the only column of texts.
        first: index of the first row to yield.
    """
    readers: dict[Format | None, Callable[..., Iterator[str | None]]] = {
        "parquet": _parquet,
        "json lines": _json_lines,
        "plain text": _plain_text,
    }
    try:
        require_regular(path)
        yield from readers[format_of(name)](path, name, column, first)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({reason(error)}); convert it first") from None
    except (OSError, EOFError, pa.ArrowException) as error:
        raise UserError(f"{name}: cannot be read: {reason(error)}; is it complete?") from None


def _parquet(path: Path, name: str, column: str | None, first: int) -> Iterator[str | None]:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        texts = [field.name for field in schema if _holds_text(field.type)]
        column = _text_column(name, column, schema.names, texts)
        start, groups = 0, range(file.num_row_groups)
        for group in groups:
            rows = file.metadata.row_group(group).num_rows
            if start + rows > first:
                for batch in file.iter_batches(_BATCH_ROWS, [group], [column]):
                    texts = batch.column(0).to_pylist()
                    yield from texts[max(first - start, 0) :]
                    start += len(texts)
            else:
                start += rows


def _holds_text(column: pa.DataType) -> bool:
    kind = column.value_type if pa.types.is_dictionary(column) else column
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _text_column(name: str, column: str | None, names: list[str], texts: list[str]) -> str:
    """Return the column with the texts, out of all `names` and those of `texts`; raises UserError
    if it isn't there or has none."""
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


def _json_lines(path: Path, name: str, column: str | None, first: int) -> Iterator[str | None]:
    with _opened(path, name) as file:
        for number, line in enumerate(file):
            if number < first:
                continue
            if not line.strip():
                yield None
                continue
            row = _parsed(line, name, number + 1)
            if column is None:
                is_text = {key: isinstance(value, str) for key, value in row.items()}
                is_text |= {DEFAULT_COLUMN: True} if row.get(DEFAULT_COLUMN, "") is None else {}
                column = _text_column(name, None, [*row], [key for key in row if is_text[key]])
            yield _value(row, column, name, number + 1)


def _parsed(line: bytes, name: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise UserError(
            f"{name}: line {number} is not UTF-8 text; convert the file first"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: line {number} is not JSON: {reason(error)}") from None
    if not isinstance(row, dict):
        raise UserError(
            f"{name}: line {number} is no JSON object; each line must be one, such as"
            ' {"text": "..."}'
        )
    return row


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
    return value


def _plain_text(path: Path, name: str, _column: str | None, first: int) -> Iterator[str | None]:
    with _opened(path, name) as file:
        yield from itertools.islice(_texts(io.TextIOWrapper(file, "utf-8-sig")), first, None)


def _texts(lines: IO[str]) -> Iterator[str]:
    """Yield the texts between ends of text."""
    text = ""
    while piece := "".join(lines.readlines(_TEXT_BYTES)):
        *whole, text = (text + piece).split(END_OF_TEXT)
        yield from (one.strip("\n") for one in whole)
        if len(text) >= _TEXT_BYTES:
            yield text
            text = ""
    yield text.strip("\n")


def _opened(path: Path, name: str) -> Any:
    """Open a file for reading bytes, without its compression."""
    compression = _COMPRESSIONS.get(Path(name).suffix)
    if compression is None:
        return path.open("rb")
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), compression))
