"""Files in a run folder with a record in each line: evaluations, samples, events."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rungs.common import disk
from rungs.common.paths import is_file
from rungs.common.strict_json import StrictModel
from rungs.run.folder import RunFolder

Record = TypeVar("Record", bound=StrictModel)


def append(run: RunFolder, path: Path, records: Sequence[StrictModel]) -> None:
    """Add records to a file of a run, on disk for good; raises RunFailure."""
    run.check()
    with disk.writing(path, path.stem), disk.open_to_append(path) as file:
        is_torn = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            is_torn = file.read() != b"\n"  # a kill tore the last line
        file.write(b"\n" * is_torn + _as_text(records).encode())
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
