"""The dataset builder for UTF-8 text, streamed in bounded memory; sections of text files, JSON
lines and writing of splits, which pairs and chats share."""

import codecs
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from rungs.common import paths, run_log
from rungs.common.errors import UserError, reason
from rungs.common.run_log import log
from rungs.data import dataset, tokenizer_files
from rungs.data.bpe import SMALLEST_VOCAB, train_bpe
from rungs.data.token_file import Texts, TokenWriter
from rungs.data.tokenizer import Tokenizer

_PIECE_BYTES = 1 << 20
_TRAINING_BYTES = 32 << 20
"""Bytes of text, in pieces spread evenly over all of it, to train a tokenizer on."""
_LARGEST_UINT16_VOCAB = 1 << 16
_BOM = codecs.BOM_UTF8
NO_TEXT = "there is no text for the {} split; give more text or change --validation-percent"
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")

Progress = Callable[[int], object]
"""Called with the number of bytes read."""
T = TypeVar("T")
W = TypeVar("W", bound=TokenWriter)


class Section(Protocol):
    """A part of a file."""

    @property
    def path(self) -> Path: ...
    @property
    def size(self) -> int:
        """Number of bytes or tokens."""

    def split(self, percent: float) -> tuple[Self, Self]:
        """Return the section without its last `percent`, and those."""


S = TypeVar("S", bound=Section)


class TextSection(NamedTuple):
    """A range of bytes in a UTF-8 text file."""

    path: Path
    start: int
    end: int

    @classmethod
    def of_file(cls, path: Path) -> "TextSection":
        """Return a whole file except a byte order mark. Raises UserError if it is unreadable."""
        try:
            paths.require_regular(path)
            with path.open("rb") as file:
                start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            return cls(path, start, path.stat().st_size)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    def pieces(self, progress: Progress) -> Iterator[str]:
        """Yield the text in pieces, with line ends as "\\n". Raises UserError unless UTF-8."""
        utf8 = codecs.getincrementaldecoder("utf-8")()
        decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        with self.path.open("rb") as file:
            file.seek(self.start)
            for offset in range(self.start, self.end, _PIECE_BYTES):
                end = min(offset + _PIECE_BYTES, self.end)
                content = file.read(end - offset)
                if len(content) < end - offset:
                    raise changed_while_read(self.path)
                try:
                    yield decoder.decode(content, final=end == self.end)
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{self.path}: not UTF-8 text, near byte {offset + error.start}; convert"
                        " it first"
                    ) from None
                progress(end - offset)

    def split(self, percent: float) -> tuple["TextSection", "TextSection"]:
        """Return the section without its last `percent`, and those, cut at a near line end."""
        target = self.end - round(self.size * percent / 100)
        with self.path.open("rb") as file:
            file.seek(target)
            following = file.read(min(_PIECE_BYTES, self.end - target))
        cut = following.find(b"\n") + 1
        if cut in (0, len(following)):
            character_starts = (i for i, byte in enumerate(following) if byte & 0xC0 != 0x80)
            cut = next(character_starts, len(following))
        return self._replace(end=target + cut), self._replace(start=target + cut)


Sections = dict[dataset.Split, list[TextSection]]


def build(
    folder: Path, texts: list[TextSection], tokenizer: Tokenizer | int, validation_percent: float
) -> dataset.Source:
    """Write the token files and tokenizer of a dataset into its folder. `texts` has a section per
    file; `tokenizer` can be the vocabulary size of one to train on the training text. Raises
    UserError if the text is not UTF-8, a split has no text, or the vocabulary is too small."""
    if isinstance(tokenizer, int) and tokenizer < SMALLEST_VOCAB:
        raise UserError(f"a vocabulary of {tokenizer} is too small; use at least {SMALLEST_VOCAB}")
    if as_json := [section.path for section in texts if _is_json(section)]:
        log.warning(
            "%s: looks like JSON%s; with --text its brackets, keys and escapes are trained on, too."
            " Put the plain text into files of their own, or use --pairs for prompts and answers",
            as_json[0],
            f", and so do {len(as_json) - 1:,} other files" if len(as_json) > 1 else "",
        )
    sections = split_sections(texts, validation_percent)
    if isinstance(tokenizer, int):
        tokenizer = train_tokenizer(sections["train"], tokenizer)
    write(folder, sections, tokenizer)
    return dataset.Source(kind="text", files=[text.path.name for text in texts])


def _is_json(section: TextSection) -> bool:
    """Whether a file's name or first line suggests JSON."""
    with section.path.open("rb") as file:
        first_line, *_ = file.read(_PIECE_BYTES).strip().splitlines() or [b""]
    try:
        return section.path.suffix in _JSON_SUFFIXES or isinstance(json.loads(first_line), dict)
    except (RecursionError, ValueError):
        return False


def split_sections(
    sections: list[S],
    percent: float,
    split: Callable[[S, float], tuple[S, S]] = lambda section, percent: section.split(percent),
) -> dict[dataset.Split, list[S]]:
    """Split files into training and validation. A single file is cut near its end by `split`. Of
    several files, those that fit into `percent` of the bytes or tokens are for validation, tried in
    the order of a hash of their names, or the smallest if none fits."""
    sections = [section for section in sections if section.size]
    if percent == 0:
        return {"train": sections}
    if len(sections) <= 1:
        parts = [split(section, percent) for section in sections]
        return {"train": [first for first, _ in parts], "validation": [last for _, last in parts]}
    room = sum(section.size for section in sections) * percent / 100
    chosen: set[S] = set()
    for section in sorted(sections, key=lambda section: stable_hash(section.path.name)):
        if section.size <= room:
            chosen.add(section)
            room -= section.size
    chosen = chosen or {min(sections, key=lambda section: section.size)}
    return {
        "train": [section for section in sections if section not in chosen],
        "validation": [section for section in sections if section in chosen],
    }


def stable_hash(text: str) -> int:
    """Return a 64-bit hash of a text or a file's name that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8])


def train_tokenizer(sections: list[TextSection], vocab_size: int) -> Tokenizer:
    """Train a BPE tokenizer on text, or on an evenly spread sample of a long one."""
    size = sum(section.size for section in sections)
    every = -(-size // _TRAINING_BYTES)
    with run_log.byte_progress("training the tokenizer", size) as bar:
        pieces = (piece for section in sections for piece in section.pieces(bar.update))
        return train_bpe(itertools.islice(pieces, 0, None, max(every, 1)), vocab_size)


def write(folder: Path, sections: Sections, tokenizer: Tokenizer) -> None:
    """Write the token files and tokenizer of a dataset into its folder, each section between the
    tokenizer's begin and end tokens. Raises UserError if a split has no text, or not UTF-8."""
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]

    def write_section(writer: TokenWriter, section: TextSection, progress: Progress) -> None:
        if section.size:
            writer.append(tokenizer.begin)
            for ids in tokenizer.encode_stream(section.pieces(progress)):
                writer.append(ids)
            writer.append(end)

    open_writer = partial(TokenWriter, texts=log_texts(tokenizer, tokenizer.end_of_text))
    write_splits(folder, sections, tokenizer, open_writer, write_section)


def write_splits(
    folder: Path,
    sections: Sections,
    tokenizer: Tokenizer,
    open_writer: Callable[[Path, str], W],
    write_section: Callable[[W, TextSection, Progress], None],
    lacking: str = NO_TEXT,
) -> None:
    """Write each split's token file, section by section, and the tokenizer. `open_writer` gets a
    path and a dtype. Raises UserError with the message `lacking` if a split gets no tokens."""
    size = sum(section.size for split in sections.values() for section in split)
    with run_log.byte_progress("tokenizing", size) as bar:
        for split, parts in sections.items():
            path = folder / dataset.split_file(split)
            with open_writer(path, token_dtype(tokenizer.vocab_size)) as writer:
                for section in parts:
                    write_section(writer, section, bar.update)
            if not writer.tokens:
                raise UserError(lacking.format(split))
    tokenizer_files.save_tokenizer(tokenizer, folder)


def log_texts(tokenizer: Tokenizer, end: int | None) -> Texts | None:
    """Log the tokens that begin and end texts; return them, or None if none begin texts."""
    log.info("%s", tokenizer.describe_texts(tokenizer.begin))
    return Texts(begin=tokenizer.begin, end=end) if tokenizer.begin else None


def token_dtype(vocab_size: int) -> str:
    """Return the safetensors name of the 2- or 4-byte dtype that holds every token id."""
    return "U16" if vocab_size <= _LARGEST_UINT16_VOCAB else "U32"


def json_lines(section: TextSection) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a section, each with the offset of its first byte."""
    offset = section.start
    with section.path.open("rb") as file:
        file.seek(offset)
        while offset < section.end and (line := file.readline(paths.MOST_LINE)):
            if len(line) == paths.MOST_LINE:
                raise UserError(
                    f"{section.path}: a line has {len(line):,} bytes or more; one value is to be in"
                    " each line"
                )
            if line.strip():
                yield offset, line
            offset += len(line)
    if offset < section.end:
        raise changed_while_read(section.path)


def parse_json(line: bytes, make_object: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Return the value of a line, building objects from their items with `make_object`. Raises
    ValueError with the reason if it is not JSON."""
    try:
        return json.loads(line.rstrip().decode(), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, near byte {error.start + 1}; convert it first") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON at column {error.colno}: {error.msg}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"unreadable JSON: {reason(error)}") from None


def read_lines(
    section: TextSection, read: Callable[[int, bytes], T], progress: Progress = lambda _: None
) -> Iterator[T]:
    """Yield what `read` returns for each line that is not blank, with the offset of its first byte.
    Its ValueErrors become UserErrors that name the file and the line."""
    for offset, line in json_lines(section):
        try:
            found = read(offset, line)
        except LineError:
            raise
        except ValueError as error:
            raise line_error(section.path, offset, str(error)) from None
        yield found
        progress(len(line))


def changed_while_read(path: Path) -> UserError:
    """Return the error for a file that ends before it did."""
    return UserError(f"{path}: was shortened while it was read; run the same command again")


class LineError(UserError):
    """A line of a file is wrong."""


def line_error(path: Path, offset: int, problem: str) -> LineError:
    """Return the error for the line that starts at an offset of a file."""
    number = 1
    with path.open("rb") as file:
        while offset and (block := file.read(min(offset, _PIECE_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return LineError(f"{path}: line {number}: {problem}")
