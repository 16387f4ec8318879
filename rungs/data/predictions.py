"""Stored predictions of a teacher: for each token of a run's training sequences, the most likely
next tokens and their log-probabilities. `datasets/predictions-0123456789abcdef/` has

    predictions.json      what they depend on, and a sha256 of each file
    00000.safetensors …   the sequences in the order before shuffling, PER_FILE in each:
                          log_probs, float32 (n, S, K + 1): of the K most likely tokens and, last,
                          of all others together; tokens, uint16 or int32 (n, S, K)

The folder's name is a checksum of what they depend on, so every run with the same teacher, data,
temperature and K reads the same files. Axes: B, S and n as in `sequences.py`; K likely tokens."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import safetensors.numpy

from rungs.common import disk, strict_json
from rungs.common.disk import lock_folder, replace_folder
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.data.token_file import FileArray, Tensor

log = logging.getLogger("rungs")

DESCRIPTION = "predictions.json"
_DTYPES = {"F32": np.float32, "U16": np.uint16, "I32": np.int32}
_FILE_BYTES = 64 << 20


class Description(strict_json.StrictModel):
    """The contents of `predictions.json`."""

    format: Literal[1] = 1
    key: dict[str, Any]
    """What the predictions depend on."""
    sequences: int
    per_file: int
    """Sequences in each file but the last."""
    sha256: dict[str, str]
    """Of each file, by name."""


class Rows(NamedTuple):
    """Predictions for n sequences, as in a file."""

    log_probs: np.ndarray
    tokens: np.ndarray | None
    """None if `log_probs` are of all tokens, which is never stored."""


class Predictions(Protocol):
    """Predictions by sequence."""

    def read(self, indices: Sequence[int]) -> Rows:
        """Return the predictions for some sequences."""


class Store(NamedTuple):
    """A place for predictions, which may not exist yet."""

    folder: Path
    key: dict[str, Any]

    @classmethod
    def of(cls, datasets_dir: Path, key: dict[str, Any]) -> Self:
        """Return the place for predictions that depend on `key`, JSON."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return cls(datasets_dir / f"predictions-{digest[:16]}", key)

    def exists(self) -> bool:
        """Return whether all predictions were written."""
        return is_file(self.folder / DESCRIPTION)

    def write(self, predictions: Predictions, sequences: int) -> None:
        """Write the predictions for so many sequences, a file at a time. Killed and called again,
        it goes on with the first file that is missing. Raises UserError if the folder can't be
        written."""
        row_bytes = sum(array.nbytes for array in predictions.read([0]) if array is not None)
        per_file, sha256 = max(_FILE_BYTES // row_bytes, 1), {}
        with lock_folder(self.folder), replace_folder(self.folder, resume=True) as folder:
            for first in range(0, sequences, per_file):
                path = folder / f"{first // per_file:05}.safetensors"
                if not is_file(path):
                    log.info("%s: sequence %s of %s", path, f"{first + 1:,}", f"{sequences:,}")
                    rows = predictions.read(range(first, min(first + per_file, sequences)))
                    disk.replace_file(path, safetensors.numpy.save(rows._asdict()))
                sha256[path.name] = _sha256(path)
            description = Description(
                key=self.key, sequences=sequences, per_file=per_file, sha256=sha256
            )
            text = json.dumps(description.model_dump(mode="json"), indent=2)
            disk.replace_file(folder / DESCRIPTION, text + "\n")

    def read(self) -> "StoredPredictions":
        """Open the predictions. Raises UserError if they are damaged."""
        path = self.folder / DESCRIPTION
        description = strict_json.parse(strict_json.read_text(path), path, Description)
        damaged = [
            name
            for name, sha256 in description.sha256.items()
            if not is_file(self.folder / name) or _sha256(self.folder / name) != sha256
        ]
        if damaged:
            raise UserError(
                f"{self.folder}: {', '.join(damaged)}: missing or damaged; delete the folder and"
                " store the predictions again: uv run train.py RUN --store-teacher"
            )
        files = [_open(self.folder / name) for name in sorted(description.sha256)]
        return StoredPredictions(files, description.per_file)


class StoredPredictions:
    """Predictions of a store."""

    def __init__(self, files: list[tuple[FileArray, FileArray]], per_file: int) -> None:
        self._files, self._per_file = files, per_file

    def read(self, indices: Sequence[int]) -> Rows:
        places = [divmod(index, self._per_file) for index in indices]
        rows = [[array[row : row + 1] for array in self._files[number]] for number, row in places]
        log_probs_BSK, tokens_BSK = map(np.concatenate, zip(*rows, strict=True))
        return Rows(log_probs_BSK, tokens_BSK.astype(np.int32))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> tuple[FileArray, FileArray]:
    """Open the log-probabilities and tokens of a file that was checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))

    def array(name: str) -> FileArray:
        entry = header[name]
        dtype: np.dtype[Any] = np.dtype(_DTYPES[entry["dtype"]])
        tensor = Tensor(dtype, tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        return FileArray(path, tensor)

    return array("log_probs"), array("tokens")
