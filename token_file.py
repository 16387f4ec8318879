"""Token files: safetensors with one 1-D tensor `tokens`, read through a memory map and written
as a stream, so that neither takes memory in proportion to the text.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from errors import UserError

TENSOR = "tokens"
DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind in "UI"
    for size in (1, 2, 4, 8)
}
"""The integer types of safetensors; all of the format is little-endian."""
_HEADER_BYTES = 120
"""Room for the header of a file being written, whose length is known only at its end."""


class Layout(NamedTuple):
    """Where the tokens stand in a file."""

    dtype: np.dtype[np.integer]
    offset: int
    """Of the first token, in bytes from the start of the file."""
    tokens: int


def read_layout(path: Path) -> Layout:
    """Check a token file's header, without reading the tokens.

    Raises:
        UserError: for a file that is missing, not whole, or without a 1-D integer `tokens`.
    """
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            part = file.get_slice(TENSOR) if TENSOR in names else None
            shape, dtype = (part.get_shape(), part.get_dtype()) if part else ([], "")
        offset = _data_offset(path) if part else 0
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from None
    if part is None:
        found = ", ".join(names[:5]) or "none"
        raise UserError(f"{path}: has no tensor {TENSOR!r} (its tensors: {found})")
    if len(shape) != 1:
        raise UserError(f"{path}: {TENSOR!r} has the shape {shape}; it must have one dimension")
    if dtype not in DTYPES:
        raise UserError(f"{path}: {TENSOR!r} is of type {dtype}; it must be of an integer type")
    if shape[0] == 0:
        raise UserError(f"{path}: {TENSOR!r} is empty")
    return Layout(DTYPES[dtype], offset, shape[0])


def _data_offset(path: Path) -> int:
    """Offset of the tokens in a file whose header safetensors has checked."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    return 8 + header_bytes + int(header[TENSOR]["data_offsets"][0])


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


class TokenWriter:
    """A token file being written. Only at the end of a `with` block that raised nothing does it
    get its header; before, nothing takes it for a token file."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("wb")
        self._code = dtype
        self._file.write(bytes(8 + _HEADER_BYTES))
        self.tokens = 0

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens; raises OverflowError for an id that the type cannot hold."""
        self._file.write(np.array(ids, DTYPES[self._code]).tobytes())
        self.tokens += len(ids)

    def _finish(self) -> None:
        size = self.tokens * DTYPES[self._code].itemsize
        entry = {"dtype": self._code, "shape": [self.tokens], "data_offsets": [0, size]}
        header = json.dumps({TENSOR: entry}).encode().ljust(_HEADER_BYTES)
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header)
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
