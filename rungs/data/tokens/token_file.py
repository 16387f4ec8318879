"""Token files: safetensors (https://github.com/huggingface/safetensors#format) with a 1-D tensor
`tokens`, read in slices and written as a stream, in memory that does not grow with the tokens.

A file of pairs (prompts and answers) has a second tensor `pair_bounds`, the start and end of each
answer. A file of chats has one row per assistant turn, and a third tensor `chat_ends`, the rows up
to each chat's end. The metadata has `texts` if special tokens begin texts. A file of preferences is
one of chats, in pairs: a chosen and a rejected one; its metadata has `preferences`. In a file of
unpaired preferences `desirable` tells of each chat whether its answer is, 1 or 0.

Axes: P answers, 2 for the answer's start and end, C documents: pairs or chats."""

import json
import math
import os
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from rungs.common import disk, strict_json
from rungs.common.errors import RunFailure, UserError, reason
from rungs.data.text.tokenizer import LARGEST_VOCAB

TENSOR = "tokens"
BOUNDS = "pair_bounds"
CHAT_ENDS = "chat_ends"
DESIRABLE = "desirable"
INTEGERS = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind in "UI"
    for size in (1, 2, 4, 8)
}
"""The little-endian integer dtypes of safetensors."""
DTYPES = INTEGERS | {"F32": np.dtype("<f4")}
_HEADER_BYTES = 128
"""Bytes reserved for the header's length and one tensor; the header is written last."""
_BOUNDS_CODE = "I64"
_TEXTS = "texts"
_PREFERENCES = "preferences"


_TokenId = Annotated[int, Field(ge=0, lt=LARGEST_VOCAB)]


class Texts(strict_json.StrictModel):
    """The tokens that begin and end each text, pairs included."""

    begin: list[_TokenId] = Field(min_length=1)
    end: _TokenId | None = None
    """Id of the token that ends a text or an answer."""


class Tensor(NamedTuple):
    """Location of a tensor in a file."""

    code: str
    """safetensors name of its dtype."""
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte."""


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata. Raises UserError if it is
    missing or incomplete."""
    try:
        # safe_open checks the file, but calls one without permission missing
        with path.open("rb") as file, safe_open(path, framework="np"):
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except PermissionError:
        raise
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {reason(error)}") from None
    metadata = header.pop("__metadata__", None) or {}
    tensors = {
        name: Tensor(one["dtype"], tuple(one["shape"]), 8 + header_bytes + one["data_offsets"][0])
        for name, one in header.items()
    }
    return tensors, metadata


class TokenFile:
    """A token file, open for reading. Raises UserError if it is missing or incomplete, `tokens` is
    not a 1-D integer tensor, `pair_bounds` not int64 (P, 2), `chat_ends` not int64 (C,), or `texts`
    not valid."""

    def __init__(self, path: Path) -> None:
        tensors, metadata = read_header(path)
        if TENSOR not in tensors:
            found = ", ".join(map(strict_json.format_name, list(tensors)[:5])) or "none"
            raise UserError(f"{path}: has no tensor {TENSOR!r} (its tensors: {found})")
        if problem := _problem(tensors):
            raise UserError(f"{path}: {problem}")
        self.tokens = FileArray(path, tensors[TENSOR])
        """(tokens,)"""
        self.bounds = FileArray(path, tensors[BOUNDS]) if BOUNDS in tensors else None
        """int64 (P, 2), None in a file of text: the indices into `tokens` of an answer's first
        token and after its last, where the next pair or turn starts."""
        self.chat_ends = FileArray(path, tensors[CHAT_ENDS]) if CHAT_ENDS in tensors else None
        """int64 (C,), None in a file of text or pairs: the number of answers up to a chat's end."""
        self.texts = _texts(path, metadata[_TEXTS]) if _TEXTS in metadata else None
        """None if nothing begins texts."""
        self.is_preferences = _PREFERENCES in metadata
        """Whether each two documents are a chosen and a rejected answer."""
        self.desirable = FileArray(path, tensors[DESIRABLE]) if DESIRABLE in tensors else None
        """int64 (C,), only of unpaired preferences: 1 for a desirable answer, else 0."""

    @property
    def documents(self) -> int:
        """Number of pairs or chats; 0 in a file of text."""
        last = self.chat_ends or self.bounds
        return len(last) if last else 0


def _problem(tensors: Mapping[str, Tensor]) -> str | None:
    code, shape, _ = tensors[TENSOR]
    if len(shape) != 1 or code not in INTEGERS:
        found = f"has dtype {code} and shape {[*shape]}"
        return f"{TENSOR!r} {found}; it must have an integer dtype and one dimension"
    if shape[0] == 0:
        return f"{TENSOR!r} is empty"
    rows: dict[str, tuple[int, ...]] = {CHAT_ENDS: (), BOUNDS: (2,), DESIRABLE: ()}
    for name in sorted(tensors.keys() & rows):
        code, shape, _ = tensors[name]
        row = rows[name]
        if code != _BOUNDS_CODE or shape[1:] != row or 0 in (len(shape), *shape):
            found = f"has dtype {code} and shape {[*shape]}"
            return f"{name!r} {found}; it must have {_BOUNDS_CODE} and shape {['n', *row]}"
    return f"has {CHAT_ENDS}, but no {BOUNDS}" if tensors.keys() & rows == {CHAT_ENDS} else None


def _texts(path: Path, content: str) -> Texts:
    try:
        return Texts.model_validate_json(content)
    except ValidationError:
        problem = "its metadata doesn't say what begins and ends texts, as Rungs writes it"
        raise UserError(f"{path}: {_TEXTS!r}: {problem}; build the dataset again") from None


class FileArray:
    """An array in a file, with the `shape` and `dtype` of NumPy. Slices along the first axis are
    read as read-only NumPy arrays, also after the file was deleted. Not a memory map, because that
    kills the process without a message if the file was truncated or the disk fails."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        self._path, self.dtype = path, DTYPES[tensor.code]
        _, self.shape, self.offset = tensor
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._as_opened = self._size_and_time()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Read a slice. Raises RunFailure if it can't be read or the file has changed."""
        start, stop, _ = rows.indices(len(self))
        size = max(stop - start, 0) * self._row_bytes
        try:
            content = disk.read_at(self._descriptor, self.offset + start * self._row_bytes, size)
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


class AnsweredDocuments:
    """The documents of a token file: pairs (one answer each) or chats (one per assistant turn).
    The inputs of a document are all its tokens but the last, its targets all but the first. Their
    bounds are in memory, 32 bytes an answer."""

    def __init__(self, path: Path) -> None:
        file = TokenFile(path)
        assert file.bounds is not None
        self._tokens, self._bounds_P2 = file.tokens, file.bounds[:]
        ends_C = file.chat_ends[:] if file.chat_ends else np.arange(1, len(self._bounds_P2) + 1)
        self._rows = np.concatenate([[0], ends_C])
        """Each document's first row of bounds, then the number of rows."""
        self._starts = np.concatenate([[0], self._bounds_P2[ends_C - 1, 1]])
        """Each document's first token, then the number of tokens."""
        self.desirable_C = file.desirable[:] if file.desirable else None
        """As in `TokenFile`."""

    def __len__(self) -> int:
        return len(self._rows) - 1

    @property
    def input_tokens(self) -> int:
        """Total number of input tokens."""
        return len(self._tokens) - len(self)

    @property
    def lengths_C(self) -> np.ndarray:
        """Number of tokens of each document, int64."""
        return np.diff(self._starts)

    def read(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return documents `first` to before `end`: their tokens, int32, whether each token belongs
        to an answer, and lengths_C."""
        starts = self._starts[first : end + 1]
        tokens = self._tokens[int(starts[0]) : int(starts[-1])].astype(np.int32)
        bounds_P2 = self._bounds_P2[self._rows[first] : self._rows[end]] - starts[0]
        changes = np.zeros(len(tokens) + 1, np.int8)
        changes[bounds_P2[:, 0]] = 1
        np.subtract.at(changes, bounds_P2[:, 1], 1)
        return tokens, np.cumsum(changes[:-1]) > 0, np.diff(starts)


class TokenWriter:
    """Writes a token file, in a `with` block. The header is written at its end, so the file is not
    valid if the block raises. Until then, other tensors than the tokens are in memory. `texts` has
    the tokens that begin and end each text, None if nothing begins them. A file that already has
    `tokens` tokens keeps those; the rest is cut off."""

    more_tensors: ClassVar[dict[str, tuple[int, ...]]] = {}
    """Shape of a row of each further tensor."""
    marks: ClassVar[dict[str, str]] = {}
    """Further metadata."""

    def __init__(self, path: Path, dtype: str, texts: Texts | None = None, tokens: int = 0) -> None:
        self._code, self.tokens = dtype, tokens
        metadata = ({_TEXTS: texts.model_dump_json()} if texts else {}) | self.marks
        self._metadata = {"__metadata__": metadata} if metadata else {}
        metadata_bytes = -(-len(json.dumps(self._metadata)) // 64) * 64 if metadata else 0
        self._first_byte = _HEADER_BYTES * (1 + len(self.more_tensors)) + metadata_bytes
        self._rows = {name: array("q") for name in self.more_tensors}
        self._file = path.open("r+b" if tokens else "wb")
        self._file.write(bytes(self._first_byte))
        self._file.seek(tokens * DTYPES[dtype].itemsize, os.SEEK_CUR)
        self._file.truncate()

    def flush(self) -> None:
        """Wait until the tokens are durably on disk."""
        disk.flush(self._file)

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Write tokens; raises OverflowError if an id does not fit the dtype."""
        self._file.write(np.array(ids, DTYPES[self._code]).tobytes())
        self.tokens += len(ids)

    def _finish(self) -> None:
        end = self.tokens * DTYPES[self._code].itemsize
        entries = {TENSOR: _entry(self._code, [self.tokens], 0, end)}
        for name, row_shape in self.more_tensors.items():
            rows = np.array(self._rows[name], DTYPES[_BOUNDS_CODE]).reshape(-1, *row_shape)
            start, end = end, end + rows.nbytes
            entries[name] = _entry(_BOUNDS_CODE, [*rows.shape], start, end)
            self._file.write(rows.tobytes())
        header = json.dumps(self._metadata | entries).encode().ljust(self._first_byte - 8)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if failure is None:
                self._finish()


def _entry(code: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": [start, end]}


class PairWriter(TokenWriter):
    """Writes a token file of pairs."""

    more_tensors: ClassVar = {BOUNDS: (2,)}
    pairs = 0
    """Number of pairs, or of answers in chats, written so far."""

    def append_pair(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Write a pair; raises OverflowError if an id does not fit the dtype."""
        self.append(prompt_ids)
        start = self.tokens
        self.append(answer_ids)
        self._rows[BOUNDS].extend((start, self.tokens))
        self.pairs += 1

    def append_chat(self, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Write a chat of at least one turn (ids before an answer, ids of the answer); in a file of
        pairs, of one. Raises OverflowError if an id does not fit the dtype."""
        for prompt_ids, answer_ids in turns:
            self.append_pair(prompt_ids, answer_ids)


class ChatWriter(PairWriter):
    """Writes a token file of chats."""

    more_tensors: ClassVar = {BOUNDS: (2,), CHAT_ENDS: ()}

    def append_chat(self, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        super().append_chat(turns)
        self._rows[CHAT_ENDS].append(self.pairs)


class PreferenceWriter(ChatWriter):
    """Writes a token file of preferences: chats in pairs, the chosen one first."""

    marks: ClassVar = {_PREFERENCES: "chosen, rejected"}


class UnpairedWriter(ChatWriter):
    """Writes a token file of unpaired preferences."""

    more_tensors: ClassVar = ChatWriter.more_tensors | {DESIRABLE: ()}

    def rate(self, desirable: bool) -> None:
        """Say whether the answer of the last chat is desirable."""
        self._rows[DESIRABLE].append(desirable)
