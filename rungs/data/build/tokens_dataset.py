"""The dataset builder for tokens of another program, read in blocks, in bounded memory. Nothing is
unpickled.

    .npy          NumPy: a one-dimensional array of integers of any size and byte order
    .bin          nanoGPT: uint16, or what `dtype` says, without a header
    .bin          llm.c and modded-nanogpt: 256 int32, of which the first three are a magic number,
                  a version and the number of tokens; then uint16, or uint32 for Llama 3
                  (https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py)
    .safetensors  a one-dimensional tensor of integers: `tokens`, or the only one

Numbers are little-endian, except in .npy, which says what they are. The tokens are copied as uint16
or, if the vocabulary is too large for that, as uint32."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from rungs.common import paths, run_log
from rungs.common.errors import UserError, errors_at, reason
from rungs.data.build.sections import Progress, log_texts, split_sections, token_dtype
from rungs.data.text import tokenizer_files
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens import dataset, token_file
from rungs.data.tokens.token_file import Texts, TokenWriter

_NO_TOKENS = (
    "there are no tokens for the {} split; give more tokens, change --validation-percent, or give a"
    " --validation-file"
)
_MOST_HEADER = 1 << 16
"""Bytes of the largest header of a .npy file that is read."""
_BLOCK_TOKENS = 1 << 20
_FEWEST_TO_TELL = 8
"""Numbers of which every second one is hardly 0 by chance."""
_LLM_C_HEADER = 256
"""Numbers in llm.c's header."""
_LLM_C_FORMATS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
"""Dtype of the tokens by magic number and version."""
_LLM_C_MAGICS = range(20240101, 20250101)
"""llm.c's formats are numbered by the date; the others are of models, tokenizers and questions. As
uint16 each is the token 308 after one of at least 55,013, which GPT-2's vocabulary doesn't have."""


class _Layout(NamedTuple):
    """What a file's header says."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Position of the first token, in bytes."""


class TokenSection(NamedTuple):
    """A range of the tokens in a file."""

    path: Path
    dtype: np.dtype
    offset: int
    """Position of the file's first token, in bytes."""
    start: int
    end: int
    texts: Texts | None = None
    """What the file says of the tokens that begin and end texts."""

    @classmethod
    def of_file(cls, path: Path, dtype: str | None = None) -> "TokenSection":
        """Return all tokens of a file. `dtype` is what its user says of it. Raises UserError if it
        can't be read, has no tokens, not as many as its header says, or another dtype or number of
        dimensions."""
        with paths.open_given(path) as file:
            head = file.read(_MOST_HEADER)
        if (suffix := path.suffix.lower()) == ".safetensors":
            found = _of_safetensors(path)
        elif suffix not in (".npy", ".bin"):
            raise UserError(f"{path}: its name must end in .npy, .bin or .safetensors")
        else:
            size = path.stat().st_size
            with errors_at(f"{path}: ", ValueError):
                layout = _npy_layout(head) if suffix == ".npy" else _bin_layout(head, size, dtype)
                found = cls(path, layout.dtype, layout.offset, 0, _count(layout, size))
        if dtype not in (None, found.dtype.name):
            raise UserError(f"{path}: holds {found.dtype.name}, not the {dtype} of --token-dtype")
        return found

    def check_dtype(self, vocab_size: int, said: str | None) -> None:
        """Raise UserError if the dtype, which the user may have said, is probably wrong: ids of the
        vocabulary don't fit, unless it is said, or numbers are wider, so that each leaves its upper
        half, 0 or -1, at every second place, unless it is said to be uint16."""
        name = self.dtype.name
        if (most := np.iinfo(self.dtype).max) < vocab_size - 1 and said is None:
            raise UserError(
                f"{self.path}: as {name} it has no ids over {most:,}, and the vocabulary has"
                f" {vocab_size:,} tokens: larger ids may have been cut off, or it is not {name};"
                f" say --token-dtype uint32, or {name} if no id was larger"
            )
        block = self._read(self.start, min(self.start + _BLOCK_TOKENS, self.end))
        upper = (0, -1, np.iinfo(self.dtype).max)
        first, second = (np.isin(block[place::2], upper).all() for place in (0, 1))
        is_doubtful = name == "uint16" if said is None else said != "uint16"
        if is_doubtful and len(block) >= _FEWEST_TO_TELL and first != second:
            wider = "uint32 or int64" if name == "uint16" else "wider"
            raise UserError(
                f"{self.path}: as {name} every second number is 0 or {most:,}, as if it were"
                f" {wider}; say which with --token-dtype (uint16 if it is)"
            )

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    def split(self, percent: float) -> tuple["TokenSection", "TokenSection"]:
        """Return the section without its last `percent`, and those."""
        cut = self.end - round(self.size * percent / 100)
        return self._replace(end=cut), self._replace(start=cut)

    def first(self, count: int) -> list[int]:
        """Return the first tokens."""
        return self._read(self.start, min(self.start + count, self.end)).tolist()

    def blocks(self, vocab_size: int, progress: Progress) -> Iterator[np.ndarray]:
        """Yield the tokens in blocks. Raises UserError if one is not in the vocabulary."""
        for start in range(self.start, self.end, _BLOCK_TOKENS):
            block = self._read(start, min(start + _BLOCK_TOKENS, self.end))
            if block.min() < 0 or block.max() >= vocab_size:
                index = int(((block < 0) | (block >= vocab_size)).argmax())
                raise UserError(
                    f"{self.path}: token {start + index:,} has the id {block[index]}, but the"
                    f" vocabulary has {vocab_size:,}: it is from another tokenizer"
                )
            yield block
            progress(block.nbytes)

    def _read(self, start: int, end: int) -> np.ndarray:
        offset = self.offset + start * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, end - start, offset=offset)


def _npy_layout(head: bytes) -> _Layout:
    file = io.BytesIO(head)
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
    except Exception as error:  # the header is parsed as Python
        raise ValueError(f"not a complete .npy file: {reason(error)}") from None
    return _Layout(dtype, shape, file.tell())


def _bin_layout(head: bytes, size: int, name: str | None) -> _Layout:
    """Return the layout of llm.c's format, or else of numbers alone, uint16 unless named."""
    header = np.frombuffer(head[: len(head) // 4 * 4], "<i4")[:_LLM_C_HEADER]
    numbers: list[int] = header.tolist()
    magic, version, count, *_ = [*numbers, 0, 0, 0]
    if tuple(header[:2].byteswap().tolist()) in _LLM_C_FORMATS:
        raise ValueError("its header is big-endian; convert it to little-endian first")
    if magic in _LLM_C_MAGICS:
        if len(header) < _LLM_C_HEADER:
            raise ValueError(f"has {size:,} bytes, fewer than llm.c's header: it is truncated")
        if (magic, version) not in _LLM_C_FORMATS:
            known = " or ".join(f"{magic} and {version}" for magic, version in _LLM_C_FORMATS)
            raise ValueError(
                f"its header has the magic number {magic} and version {version}; tokens of llm.c"
                f" have {known}"
            )
        return _Layout(_LLM_C_FORMATS[magic, version], (count,), 4 * _LLM_C_HEADER)
    dtype = np.dtype(name or "uint16").newbyteorder("<")
    if size % dtype.itemsize:
        raise ValueError(f"has {size:,} bytes, which is no whole number of {dtype.name}")
    return _Layout(dtype, (size // dtype.itemsize,), 0)


def _count(layout: _Layout, size: int) -> int:
    """Return the number of tokens in a file of so many bytes; raises ValueError."""
    dtype, shape, offset = layout
    if dtype.kind not in "iu":
        raise ValueError(f"has dtype {dtype.name}; it must be an integer dtype")
    if len(shape) != 1:
        raise ValueError(f"has shape {[*shape]}; it must have one dimension")
    if shape[0] < 1:
        raise ValueError("has no tokens")
    expected = offset + shape[0] * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"has {size:,} bytes, but should have {expected:,} with the {shape[0]:,} tokens in its"
            " header: it is truncated, or something else"
        )
    return shape[0]


def _of_safetensors(path: Path) -> TokenSection:
    tensors, _ = token_file.read_header(path)
    if token_file.BOUNDS in tensors:
        raise UserError(
            f"{path}: holds pairs or chats, not a text; put it into a dataset's folder as it is"
        )
    name = token_file.TENSOR if token_file.TENSOR in tensors else next(iter(tensors), "")
    if name != token_file.TENSOR and len(tensors) != 1:
        raise UserError(
            f"{path}: has {len(tensors)} tensors, of which none is called {token_file.TENSOR!r}"
        )
    code, shape, offset = tensors[name]
    dtype = token_file.INTEGERS.get(code)
    if dtype is None:
        raise UserError(f"{path}: {name!r} has dtype {code}; it must be an integer dtype")
    try:
        count = _count(_Layout(dtype, shape, offset), offset + dtype.itemsize * math.prod(shape))
    except ValueError as error:
        raise UserError(f"{path}: {name!r} {error}") from None
    texts = token_file.TokenFile(path).texts if name == token_file.TENSOR else None
    return TokenSection(path, dtype, offset, 0, count, texts)


def build(
    folder: Path,
    files: list[Path],
    validation_files: list[Path],
    vocabulary: Tokenizer | int,
    validation_percent: float,
    dtype: str | None = None,
) -> dataset.Source:
    """Write the token files of a dataset, and the tokenizer if it is known, into its folder.
    `vocabulary` can be the number of its tokens, and `dtype` says what the files hold. Without
    files for validation, it is `validation_percent` of the others. Raises UserError if a token is
    not in the vocabulary, the dtype is probably another, or a split has no tokens."""
    found, held_out = (
        [TokenSection.of_file(path, dtype) for path in paths] for paths in (files, validation_files)
    )
    splits = split_sections(found, validation_percent)
    if held_out:
        splits = {"train": found, "validation": held_out}
    vocab_size = vocabulary if isinstance(vocabulary, int) else vocabulary.vocab_size
    for section in [*found, *held_out]:
        section.check_dtype(vocab_size, dtype)
    texts = _texts(splits["train"][0], vocabulary)
    size = sum(part.size * part.dtype.itemsize for parts in splits.values() for part in parts)
    with run_log.byte_progress("reading tokens", size) as bar:
        for split, parts in splits.items():
            if not any(part.size for part in parts):
                raise UserError(_NO_TOKENS.format(split))
            path = folder / dataset.split_file(split)
            with TokenWriter(path, token_dtype(vocab_size), texts) as writer:
                for part in parts:
                    for block in part.blocks(vocab_size, bar.update):
                        writer.append(block)
    if isinstance(vocabulary, Tokenizer):
        tokenizer_files.save_tokenizer(vocabulary, folder)
    return dataset.Source(kind="tokens", files=[path.name for path in [*files, *validation_files]])


def _texts(first: TokenSection, vocabulary: Tokenizer | int) -> Texts | None:
    """Return the tokens that begin and end texts: as the first file says, or else the tokenizer's
    if that file begins with them, or else None."""
    if first.texts or isinstance(vocabulary, int):
        return first.texts
    begin = vocabulary.begin
    begins_texts = bool(begin) and first.first(len(begin)) == begin
    return log_texts(vocabulary, vocabulary.end_of_text) if begins_texts else None
