"""Arrays that a frozen model computes for a run's sequences: what a teacher predicts, a reference's
log-probabilities. They are stored for every run for which they are the same, in a folder
`predictions-0123456789abcdef/` or `reference-train-0123456789abcdef/`, which has

    predictions.json      what they depend on, and a sha256 of each file
    00000.safetensors …   the arrays by name, of consecutive sequences

The folder's name ends with a checksum of what they depend on."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import safetensors.numpy
from pydantic import Field

from rungs.common import disk, strict_json
from rungs.common.disk import atomic_folder, lock_folder
from rungs.common.errors import UserError
from rungs.common.paths import file_checksum
from rungs.data.tokens.token_file import FileArray, read_header

log = logging.getLogger("rungs")

_FILE_BYTES = 64 << 20

Arrays = Mapping[str, np.ndarray]
"""Arrays by name, whose first axis is n sequences."""
Row = tuple[type[np.generic], tuple[int, ...]]
"""Dtype and shape of a sequence's part of an array."""
ArraysOf = Callable[[Sequence[int]], Arrays]
"""Returns the arrays of some sequences, by their indices."""


class Description(strict_json.StrictModel):
    """The contents of `predictions.json`."""

    format: Literal[1] = 1
    key: dict[str, Any]
    """What the arrays depend on."""
    sequences: Annotated[int, Field(ge=1)]
    per_file: Annotated[int, Field(ge=1)]
    """Sequences in each file but the last."""
    sha256: dict[str, str]
    """Of each file, by name."""


class DamagedError(UserError):
    """Stored arrays are missing or damaged."""


class Store(NamedTuple):
    """A place for arrays, which may not exist yet."""

    folder: Path
    key: dict[str, Any]
    sequences: int
    rows: Mapping[str, Row]

    @classmethod
    def of(cls, parent: Path, name: str, key: dict[str, Any], sequences: int, **rows: Row) -> Self:
        """Return the place in a folder for arrays of so many sequences that depend on `key`, JSON;
        `rows` has what each array has for a sequence."""
        folder = parent / f"{name}-{strict_json.json_checksum(key)[:16]}"
        return cls(folder, key, sequences, rows)

    @property
    def description(self) -> Path:
        """Path of the description, which is written last."""
        return self.folder / f"{self.folder.name.rpartition('-')[0]}.json"

    def exists(self) -> bool:
        """Return whether all arrays were written."""
        return self.description.is_file()

    def write(self, arrays_of: ArraysOf) -> None:
        """Write the arrays, a file at a time. Killed and called again, it goes on with the first
        file that is missing. Raises the error of `disk.unwritable`."""
        row_bytes = sum(np.dtype(row).itemsize for row in self.rows.values())
        per_file, sha256 = max(_FILE_BYTES // row_bytes, 1), {}
        with (
            lock_folder(self.folder),
            atomic_folder(self.folder, replace=True, resume=True) as folder,
        ):
            for first in range(0, self.sequences, per_file):
                path = folder / f"{first // per_file:05}.safetensors"
                if not path.is_file():
                    log.info("%s: sequence %d of %d", path, first + 1, self.sequences)
                    arrays = arrays_of(range(first, min(first + per_file, self.sequences)))
                    disk.replace_file(path, safetensors.numpy.save(dict(arrays)))
                sha256[path.name] = file_checksum(path) or ""
            description = Description(
                key=self.key, sequences=self.sequences, per_file=per_file, sha256=sha256
            )
            text = json.dumps(description.model_dump(mode="json"), indent=2)
            disk.replace_file(folder / self.description.name, text + "\n")

    def open(self) -> "StoredArrays":
        """Open the arrays. Raises DamagedError if they are missing, damaged or others."""
        try:
            text = strict_json.read_text(self.description)
            found = strict_json.parse(text, self.description, Description)
        except UserError as error:
            raise DamagedError(str(error)) from None
        paths = {self.folder / name: sha256 for name, sha256 in found.sha256.items()}
        wrong = [path.name for path, sha256 in paths.items() if file_checksum(path) != sha256]
        is_other = (found.sequences, found.key) != (self.sequences, self.key)
        if wrong or is_other or len(paths) != len(range(0, self.sequences, found.per_file)):
            raise DamagedError(
                f"{self.folder}: {', '.join(wrong) or self.description.name}: missing or damaged;"
                " delete the folder and run the same command again"
            )
        files = []
        for path in sorted(paths):
            tensors, _ = read_header(path)
            files.append({name: FileArray(path, tensor) for name, tensor in tensors.items()})
        return StoredArrays(files, found.per_file)


class StoredArrays(NamedTuple):
    """The arrays of a store."""

    files: list[dict[str, FileArray]]
    per_file: int

    def read(self, indices: Sequence[int]) -> Arrays:
        """Return the arrays of some sequences."""
        places = [divmod(index, self.per_file) for index in indices]
        return {
            name: np.concatenate([self.files[file][name][row : row + 1] for file, row in places])
            for name in self.files[0]
        }

    def read_all(self, name: str) -> np.ndarray:
        """Return one of the arrays for all sequences."""
        return np.concatenate([file[name][:] for file in self.files])
