"""Token files: safetensors with one 1-D tensor `tokens`, read through a memory map and written
as a stream, so that neither takes memory in proportion to the text.

Where the tokens are prompts with their answers, one after the other, a second tensor
`pair_bounds` says where each answer starts and where it ends. Both stand in one file, so one
checksum covers them. Axes: P pairs, 2 for the answer's start and end.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from errors import UserError, reason
from paths import require_regular
from strict_json import shown_name

TENSOR = "tokens"
BOUNDS = "pair_bounds"
DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind in "UI"
    for size in (1, 2, 4, 8)
}
"""The integer types of safetensors; all of the format is little-endian."""
_HEADER_BYTES = 120
"""Room for the header of a file being written, whose length is known only at its end."""
_HEADER_BYTES_OF_PAIRS = 248
_BOUNDS_CODE = "I64"


class Layout(NamedTuple):
    """Where the tokens stand in a file, and the bounds of its pairs where it holds such."""

    dtype: np.dtype[np.integer]
    offset: int
    """Of the first token, in bytes from the start of the file."""
    tokens: int
    pairs: int
    """0 in a file of text."""
    bounds_offset: int
    """Of the first pair's bounds, in bytes from the start of the file; 0 in a file of text."""


def read_layout(path: Path) -> Layout:
    """Check a token file's header, without reading the tokens.

    Raises:
        UserError: for a file that is missing, not whole, or without a 1-D integer `tokens`; or
            with `pair_bounds` that are not int64 of shape (P, 2).
    """
    try:
        require_regular(path)
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            parts = {name: file.get_slice(name) for name in (TENSOR, BOUNDS) if name in names}
            types = {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
        offsets = _data_offsets(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {reason(error)}") from None
    if TENSOR not in types:
        found = ", ".join(map(shown_name, names[:5])) or "none"
        raise UserError(f"{path}: has no tensor {TENSOR!r} (its tensors: {found})")
    shape, code = types[TENSOR]
    if len(shape) != 1:
        raise UserError(f"{path}: {TENSOR!r} has the shape {shape}; it must have one dimension")
    if code not in DTYPES:
        raise UserError(f"{path}: {TENSOR!r} is of type {code}; it must be of an integer type")
    if shape[0] == 0:
        raise UserError(f"{path}: {TENSOR!r} is empty")
    pairs = _count_pairs(path, *types[BOUNDS]) if BOUNDS in types else 0
    return Layout(DTYPES[code], offsets[TENSOR], shape[0], pairs, offsets.get(BOUNDS, 0))


def _count_pairs(path: Path, shape: list[int], code: str) -> int:
    if code != _BOUNDS_CODE or len(shape) != 2 or shape[1] != 2 or shape[0] == 0:
        raise UserError(
            f"{path}: {BOUNDS!r} is of type {code} and shape {shape}; it must be of type"
            f" {_BOUNDS_CODE} and have a row of 2 for each pair"
        )
    return shape[0]


def _data_offsets(path: Path) -> dict[str, int]:
    """Offsets of the tensors in a file whose header safetensors has checked."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    first = 8 + header_bytes
    return {name: first + int(entry["data_offsets"][0]) for name, entry in header.items()}


def open_tokens(path: Path) -> np.ndarray:
    """The tokens of a file: a read-only 1-D array over a memory map.

    What has been read counts as page cache, not as the process's own memory. A plain array: its
    slices cost 0.15 µs, those of `np.memmap` and of safetensors several µs.

    Raises:
        UserError: as `read_layout`.
    """
    layout = read_layout(path)
    mapped = np.memmap(path, layout.dtype, "r", layout.offset, (layout.tokens,))
    return mapped.view(np.ndarray)


def open_pair_bounds(path: Path) -> np.ndarray | None:
    """Of each pair, the index in `tokens` of its answer's first token, and the one after its last,
    where the next pair starts: a read-only int64 array (P, 2) over a memory map. Nothing where the
    file holds text.

    Raises:
        UserError: as `read_layout`.
    """
    layout = read_layout(path)
    if not layout.pairs:
        return None
    dtype = DTYPES[_BOUNDS_CODE]
    mapped = np.memmap(path, dtype, "r", layout.bounds_offset, (layout.pairs, 2))
    return mapped.view(np.ndarray)


class TokenWriter:
    """A token file being written. Only at the end of a `with` block that raised nothing does it
    get its header; before, nothing takes it for a token file."""

    _header_bytes = _HEADER_BYTES

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("wb")
        self._code = dtype
        self._file.write(bytes(8 + self._header_bytes))
        self.tokens = 0

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens; raises OverflowError for an id that the type cannot hold."""
        self._file.write(np.array(ids, DTYPES[self._code]).tobytes())
        self.tokens += len(ids)

    def _finish(self) -> None:
        size = self.tokens * DTYPES[self._code].itemsize
        entry = {"dtype": self._code, "shape": [self.tokens], "data_offsets": [0, size]}
        self._write_header({TENSOR: entry})

    def _write_header(self, entries: dict[str, object]) -> None:
        header = json.dumps(entries).encode().ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._file.close()


class PairWriter(TokenWriter):
    """A token file of pairs being written. Their bounds wait in a file without a name, so that
    memory does not grow with their number."""

    _header_bytes = _HEADER_BYTES_OF_PAIRS

    def __init__(self, path: Path, dtype: str) -> None:
        super().__init__(path, dtype)
        self._bounds = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 — __exit__ closes it
        self.pairs = 0

    def append_pair(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Add a prompt and its answer; raises OverflowError for an id that the type cannot hold."""
        self.append(prompt_ids)
        start = self.tokens
        self.append(answer_ids)
        self._bounds.write(np.array([start, self.tokens], DTYPES[_BOUNDS_CODE]).tobytes())
        self.pairs += 1

    def _finish(self) -> None:
        size = self.tokens * DTYPES[self._code].itemsize
        end = size + self._bounds.tell()
        self._bounds.seek(0)
        shutil.copyfileobj(self._bounds, self._file)
        tokens = {"dtype": self._code, "shape": [self.tokens], "data_offsets": [0, size]}
        bounds = {"dtype": _BOUNDS_CODE, "shape": [self.pairs, 2], "data_offsets": [size, end]}
        self._write_header({TENSOR: tokens, BOUNDS: bounds})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._bounds:
            super().__exit__(kind, error, _)
