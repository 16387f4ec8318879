"""Token files: safetensors with one 1-D tensor `tokens`, read a slice at a time and written as a
stream, so that neither takes memory in proportion to the text.

Where the tokens are prompts with their answers, one after the other, a second tensor
`pair_bounds` says where each answer starts and where it ends. Both stand in one file, so one
checksum covers them. Axes: P pairs, 2 for the answer's start and end.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.paths import require_regular
from rungs.common.strict_json import format_name

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


class TokenLayout(NamedTuple):
    """Where the tokens stand in a file, and the bounds of its pairs where it holds such."""

    dtype: np.dtype[np.integer]
    offset: int
    """Of the first token, in bytes from the start of the file."""
    tokens: int
    pairs: int
    """0 in a file of text."""
    bounds_offset: int
    """Of the first pair's bounds, in bytes from the start of the file; 0 in a file of text."""


def read_layout(path: Path) -> TokenLayout:
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
        found = ", ".join(map(format_name, names[:5])) or "none"
        raise UserError(f"{path}: has no tensor {TENSOR!r} (its tensors: {found})")
    shape, code = types[TENSOR]
    if len(shape) != 1:
        raise UserError(f"{path}: {TENSOR!r} has the shape {shape}; it must have one dimension")
    if code not in DTYPES:
        raise UserError(f"{path}: {TENSOR!r} is of type {code}; it must be of an integer type")
    if shape[0] == 0:
        raise UserError(f"{path}: {TENSOR!r} is empty")
    pairs = _count_pairs(path, *types[BOUNDS]) if BOUNDS in types else 0
    return TokenLayout(DTYPES[code], offsets[TENSOR], shape[0], pairs, offsets.get(BOUNDS, 0))


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


class FileArray:
    """An array in a file, of which slices along the first axis are read, as read-only arrays.

    Not a memory map, whose pages end the process without a word where they cannot be read: those
    of a file that was cut, or on a disk that fails. A file that was removed can still be read.

    Attributes:
        shape, dtype: as of a NumPy array.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[np.integer], offset: int, shape: tuple[int, ...]
    ) -> None:
        self._path, self._offset = path, offset
        self.dtype, self.shape = dtype, shape
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._descriptor)
        self._as_opened = self._size_and_time()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Some rows.

        Raises:
            RunFailure: they cannot be read, or the file was changed since it was opened.
        """
        first, after, _ = rows.indices(len(self))
        size = max(after - first, 0) * self._row_bytes
        try:
            content = _read_at(self._descriptor, self._offset + first * self._row_bytes, size)
        except OSError as error:
            raise RunFailure(f"{self._path}: cannot be read: {error.strerror}") from error
        if len(content) < size or self._size_and_time() != self._as_opened:
            raise RunFailure(
                f"{self._path}: was changed while it was in use (had {self._as_opened[0]:,} bytes,"
                f" has {self._size_and_time()[0]:,}); bring back what it was, then run the same"
                " command"
            )
        return np.frombuffer(content, self.dtype).reshape(-1, *self.shape[1:])

    def _size_and_time(self) -> tuple[int, int]:
        now = os.fstat(self._descriptor)
        return now.st_size, now.st_mtime_ns


_WITHOUT_PREAD = threading.Lock()


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Bytes of a file, fewer where it ends before."""
    content = b""
    while len(content) < size:
        start, missing = offset + len(content), size - len(content)
        if hasattr(os, "pread"):
            more = os.pread(descriptor, missing, start)
        else:  # Windows
            with _WITHOUT_PREAD:
                os.lseek(descriptor, start, os.SEEK_SET)
                more = os.read(descriptor, missing)
        if not more:
            break
        content += more
    return content


def open_tokens(path: Path) -> FileArray:
    """The tokens of a file, of shape (tokens,).

    What has been read counts as page cache, not as the process's own memory.

    Raises:
        UserError: as `read_layout`.
    """
    layout = read_layout(path)
    return FileArray(path, layout.dtype, layout.offset, (layout.tokens,))


def open_pair_bounds(path: Path) -> FileArray | None:
    """Of each pair, the index in `tokens` of its answer's first token, and the one after its last,
    where the next pair starts: int64 of shape (P, 2). Nothing where the file holds text.

    Raises:
        UserError: as `read_layout`.
    """
    layout = read_layout(path)
    if not layout.pairs:
        return None
    return FileArray(path, DTYPES[_BOUNDS_CODE], layout.bounds_offset, (layout.pairs, 2))


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
        disk.flush(self._file)

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
