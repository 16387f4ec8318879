"""Token files: safetensors with a 1-D tensor `tokens`, read in slices and written as a stream.

Memory does not grow with the number of tokens. A file of pairs (prompts and answers) has a second
tensor `pair_bounds` with the start and the end of each answer. A file of chats has a row of it for
each assistant turn, and a third tensor `chat_ends` that counts the rows up to each chat's end. The
metadata has `texts` if special tokens begin them. One checksum covers all of it.

Axes: P answers, 2 for the answer's start and end, C chats.

The format: https://github.com/huggingface/safetensors#format
"""

import array
import json
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.paths import require_regular
from rungs.common.strict_json import StrictModel, format_name
from rungs.data.tokenizer import LARGEST_VOCAB

TENSOR = "tokens"
BOUNDS = "pair_bounds"
CHAT_ENDS = "chat_ends"
DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind in "UI"
    for size in (1, 2, 4, 8)
}
"""The integer dtypes of safetensors, which is little-endian."""
_HEADER_BYTES = 120
"""Space reserved for the header, which is written last."""
_HEADER_BYTES_OF_PAIRS = 248
_HEADER_BYTES_OF_CHATS = 376
_BOUNDS_CODE = "I64"
_TEXTS = "texts"


class Texts(StrictModel):
    """What is at the start and the end of each text, pairs included."""

    begin: list[Annotated[int, Field(ge=0, lt=LARGEST_VOCAB)]] = Field(min_length=1)
    """Token ids."""
    end: int | None = None
    """Token id of the end of a text, or of an answer."""


class TokenLayout(NamedTuple):
    """Positions of the tokens, and of the pair bounds and chat ends if any, in a file."""

    dtype: np.dtype[np.integer]
    offset: int
    """Position of the first token, in bytes."""
    tokens: int
    answers: int
    """Of pairs and chats; 0 in a file of text."""
    bounds_offset: int
    """Position of the first answer's bounds, in bytes; 0 in a file of text."""
    chats: int
    """0 in a file of text or pairs."""
    chat_ends_offset: int
    """Position of the first chat's end, in bytes; 0 in a file of text or pairs."""
    texts: Texts | None
    """None if nothing begins them, or if an earlier version wrote the file."""

    @property
    def documents(self) -> int:
        """Number of pairs or chats; 0 in a file of text."""
        return self.chats or self.answers


def read_layout(path: Path) -> TokenLayout:
    """Read and check a token file's header, without reading the tokens.

    Raises:
        UserError: the file is missing or incomplete, `tokens` is not a 1-D integer tensor,
            `pair_bounds` is not int64 of shape (P, 2), `chat_ends` not int64 of shape (C,), or
            `texts` not valid.
    """
    try:
        require_regular(path)
        with safe_open(path, framework="np") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
            known = {TENSOR, BOUNDS, CHAT_ENDS}.intersection(names)
            tensors = {name: file.get_slice(name) for name in known}
            headers = {
                name: (tensor.get_shape(), tensor.get_dtype()) for name, tensor in tensors.items()
            }
        offsets = _data_offsets(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {reason(error)}") from None
    if TENSOR not in headers:
        found = ", ".join(map(format_name, names[:5])) or "none"
        raise UserError(f"{path}: has no tensor {TENSOR!r} (its tensors: {found})")
    shape, code = headers[TENSOR]
    if len(shape) != 1:
        raise UserError(f"{path}: {TENSOR!r} has shape {shape}; it must have one dimension")
    if code not in DTYPES:
        raise UserError(f"{path}: {TENSOR!r} has dtype {code}; it must be an integer dtype")
    if shape[0] == 0:
        raise UserError(f"{path}: {TENSOR!r} is empty")
    answers = _count_answers(path, *headers[BOUNDS]) if BOUNDS in headers else 0
    chats = _count_chats(path, answers, *headers[CHAT_ENDS]) if CHAT_ENDS in headers else 0
    places = offsets.get(BOUNDS, 0), chats, offsets.get(CHAT_ENDS, 0)
    texts = _texts(path, metadata[_TEXTS]) if _TEXTS in metadata else None
    return TokenLayout(DTYPES[code], offsets[TENSOR], shape[0], answers, *places, texts)


def _texts(path: Path, content: str) -> Texts:
    try:
        return Texts.model_validate_json(content)
    except ValidationError:
        problem = "its metadata doesn't say what begins and ends texts, as Rungs writes it"
        raise UserError(f"{path}: {_TEXTS!r}: {problem}; build the dataset again") from None


def _count_chats(path: Path, answers: int, shape: list[int], code: str) -> int:
    if code != _BOUNDS_CODE or len(shape) != 1 or not 0 < shape[0] <= answers:
        raise UserError(
            f"{path}: {CHAT_ENDS!r} has dtype {code} and shape {shape}; it must have dtype"
            f" {_BOUNDS_CODE} and a number for each chat, each with at least a row of {BOUNDS!r}"
        )
    return shape[0]


def _count_answers(path: Path, shape: list[int], code: str) -> int:
    if code != _BOUNDS_CODE or len(shape) != 2 or shape[1] != 2 or shape[0] == 0:
        raise UserError(
            f"{path}: {BOUNDS!r} has dtype {code} and shape {shape}; it must have dtype"
            f" {_BOUNDS_CODE} and a row of 2 for each pair"
        )
    return shape[0]


def _data_offsets(path: Path) -> dict[str, int]:
    """Return the offsets of the tensors in a file whose header safetensors has checked."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    first = 8 + header_bytes
    return {name: first + int(entry["data_offsets"][0]) for name, entry in header.items()}


class FileArray:
    """An array in a file. Slices along the first axis are read as read-only NumPy arrays.

    This is not a memory map: if a page of a memory map cannot be read, because the file was
    truncated or the disk fails, the process dies without a message. A file that is deleted while
    open can still be read.

    Attributes:
        shape, dtype: as in NumPy.
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
        """Read a slice.

        Raises:
            RunFailure: it cannot be read, or the file was changed after it was opened.
        """
        start, stop, _ = rows.indices(len(self))
        size = max(stop - start, 0) * self._row_bytes
        try:
            content = _read_at(self._descriptor, self._offset + start * self._row_bytes, size)
        except OSError as error:
            raise RunFailure(f"{self._path}: cannot be read: {error.strerror}") from error
        if len(content) < size or self._size_and_time() != self._as_opened:
            raise RunFailure(
                f"{self._path}: was changed while it was in use (had {self._as_opened[0]:,} bytes,"
                f" has {self._size_and_time()[0]:,}); restore it, then run the same command"
            )
        return np.frombuffer(content, self.dtype).reshape(-1, *self.shape[1:])

    def _size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


_SEEK_LOCK = threading.Lock()


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file, or fewer if it ends before."""
    content = b""
    while len(content) < size:
        start, missing = offset + len(content), size - len(content)
        if hasattr(os, "pread"):
            more = os.pread(descriptor, missing, start)
        else:  # Windows
            with _SEEK_LOCK:
                os.lseek(descriptor, start, os.SEEK_SET)
                more = os.read(descriptor, missing)
        if not more:
            break
        content += more
    return content


def open_tokens(path: Path) -> FileArray:
    """Open the tokens of a file, of shape (tokens,).

    Raises:
        UserError: the file is not a valid token file; see `read_layout`.
    """
    layout = read_layout(path)
    return FileArray(path, layout.dtype, layout.offset, (layout.tokens,))


def open_pair_bounds(path: Path) -> FileArray | None:
    """Open the bounds of the answers, int64 of shape (P, 2), or return None for a file of text.

    A row has the index in `tokens` of the answer's first token and the index after its last token,
    where the next pair, or turn of the chat, starts.

    Raises:
        UserError: the file is not a valid token file; see `read_layout`.
    """
    layout = read_layout(path)
    if not layout.answers:
        return None
    return FileArray(path, DTYPES[_BOUNDS_CODE], layout.bounds_offset, (layout.answers, 2))


def open_chat_ends(path: Path) -> FileArray | None:
    """Open the number of answers up to the end of each chat, int64 of shape (C,), or return None
    for a file of text or pairs.

    Raises:
        UserError: the file is not a valid token file; see `read_layout`.
    """
    layout = read_layout(path)
    if not layout.chats:
        return None
    return FileArray(path, DTYPES[_BOUNDS_CODE], layout.chat_ends_offset, (layout.chats,))


class TokenWriter:
    """Writes a token file, in a `with` block.

    The header is written at the end of the block. If the block raises, the file has no header and
    is not a valid token file.

    Args:
        texts: what is at the start and the end of each text; None if nothing begins them.
        tokens: that the file already has and keeps; what follows them is cut off.
    """

    _header_bytes = _HEADER_BYTES

    def __init__(self, path: Path, dtype: str, texts: Texts | None = None, tokens: int = 0) -> None:
        self._file = path.open("r+b" if tokens else "wb")
        self._code = dtype
        self._metadata = {"__metadata__": {_TEXTS: texts.model_dump_json()}} if texts else {}
        self._header_bytes += -(-len(json.dumps(self._metadata)) // 64) * 64 if texts else 0
        self._file.write(bytes(8 + self._header_bytes))
        self.tokens = tokens
        self._file.seek(self.tokens * DTYPES[dtype].itemsize, os.SEEK_CUR)
        self._file.truncate()

    def flush(self) -> None:
        """Wait until the tokens are on disk for good."""
        disk.flush(self._file)

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Write tokens; raises OverflowError if an id does not fit the dtype."""
        self._file.write(np.array(ids, DTYPES[self._code]).tobytes())
        self.tokens += len(ids)

    def _finish(self) -> None:
        size = self.tokens * DTYPES[self._code].itemsize
        entry = {"dtype": self._code, "shape": [self.tokens], "data_offsets": [0, size]}
        self._write_header({TENSOR: entry})

    def _write_header(self, entries: dict[str, object]) -> None:
        header = json.dumps(self._metadata | entries).encode().ljust(self._header_bytes)
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
    """Writes a token file of pairs.

    The bounds are kept in a temporary file until the end, so memory does not grow with them.
    """

    _header_bytes = _HEADER_BYTES_OF_PAIRS

    def __init__(self, path: Path, dtype: str, texts: Texts | None = None) -> None:
        super().__init__(path, dtype, texts)
        self._bounds = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 — __exit__ closes it
        self.pairs = 0

    def append_pair(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Write a pair; raises OverflowError if an id does not fit the dtype."""
        self.append(prompt_ids)
        start = self.tokens
        self.append(answer_ids)
        self._bounds.write(np.array([start, self.tokens], DTYPES[_BOUNDS_CODE]).tobytes())
        self.pairs += 1

    def _finish(self) -> None:
        self._write_header(self._tensors())

    def _tensors(self) -> dict[str, object]:
        """Write the bounds and return the header's entries of all tensors."""
        size = self.tokens * DTYPES[self._code].itemsize
        end = size + self._bounds.tell()
        self._bounds.seek(0)
        shutil.copyfileobj(self._bounds, self._file)
        tokens = {"dtype": self._code, "shape": [self.tokens], "data_offsets": [0, size]}
        bounds = {"dtype": _BOUNDS_CODE, "shape": [self.pairs, 2], "data_offsets": [size, end]}
        return {TENSOR: tokens, BOUNDS: bounds}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._bounds:
            super().__exit__(kind, error, _)


class ChatWriter(PairWriter):
    """Writes a token file of chats."""

    _header_bytes = _HEADER_BYTES_OF_CHATS

    def __init__(self, path: Path, dtype: str) -> None:
        super().__init__(path, dtype)
        self._ends = array.array("q")

    def append_chat(self, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Write a chat; raises OverflowError if an id does not fit the dtype.

        Args:
            turns: at least one: the ids before an answer, and those of the answer.
        """
        for prompt_ids, answer_ids in turns:
            self.append_pair(prompt_ids, answer_ids)
        self._ends.append(self.pairs)

    def _tensors(self) -> dict[str, object]:
        tensors = super()._tensors()
        start = self._file.tell() - 8 - self._header_bytes
        content = np.array(self._ends, DTYPES[_BOUNDS_CODE]).tobytes()
        self._file.write(content)
        ends = [start, start + len(content)]
        entry = {"dtype": _BOUNDS_CODE, "shape": [len(self._ends)], "data_offsets": ends}
        return tensors | {CHAT_ENDS: entry}
