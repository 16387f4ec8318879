"""Files in a run folder with a record in each line: evaluations, samples, events."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rungs.common import disk
from rungs.common.paths import is_file
from rungs.common.strict_json import StrictModel

Record = TypeVar("Record", bound=StrictModel)


def append(path: Path, records: Sequence[StrictModel]) -> None:
    """Add records to a file, on disk for good; raises RunFailure."""
    content = _as_text(records)
    with disk.writing(path, path.stem), disk.open_to_append(path) as file:
        if file.tell() and not _ends_with_newline(path):
            content = "\n" + content  # a kill tore the last line
        file.write(content.encode())
        disk.flush(file)


def write(path: Path, records: Sequence[StrictModel]) -> None:
    """Replace a file, completely or not at all; raises RunFailure."""
    with disk.writing(path, path.stem):
        disk.replace_file(path, _as_text(records))


def read(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records in a file, in order. Damaged lines are left out."""
    if not is_file(path):
        return []
    found = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValidationError):
            found.append(kind.model_validate_json(line))
    return found


def _as_text(records: Sequence[StrictModel]) -> str:
    return "".join(one.model_dump_json(exclude_none=True) + "\n" for one in records)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
