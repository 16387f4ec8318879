"""Sections of the user's files: of UTF-8 text, and of JSON lines, such as pairs and chats. They are
divided between training and validation, read in bounded memory, and written as a token file for
each split."""

import codecs
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rungs.common import paths, run_log
from rungs.common.errors import UserError, reason
from rungs.common.run_log import log
from rungs.data.text import tokenizer_files
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens import dataset
from rungs.data.tokens.dataset import Split
from rungs.data.tokens.token_file import Texts, TokenWriter

PIECE_BYTES = 1 << 20
_BOM = codecs.BOM_UTF8
NO_TEXT = "there is no text for the {} split; give more text or change --validation-percent"

Progress = Callable[[int], object]
"""Called with the number of bytes read."""


S = TypeVar("S", bound=Any)
"""A part of a file: has its `path`, its `size` in bytes or tokens, and `split(percent)`, which
returns it without its last `percent`, and those."""


class TextSection(NamedTuple):
    """A range of bytes in a UTF-8 text file."""

    path: Path
    start: int
    end: int
    name: str
    """The user's name for the file."""
    first_line: int = 1
    """Number of its first line in the file, in a section of lines."""

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Return a whole file except a byte order mark. Raises UserError if it is unreadable."""
        with paths.open_given(path) as file:
            start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            return cls(path, start, file.seek(0, io.SEEK_END), str(path))

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    def pieces(self, progress: Progress) -> Iterator[str]:
        """Yield the text in pieces, with its own line ends. Raises UserError unless UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with self.path.open("rb") as file:
            file.seek(self.start)
            for offset in range(self.start, self.end, PIECE_BYTES):
                end = min(offset + PIECE_BYTES, self.end)
                try:
                    yield decoder.decode(file.read(end - offset), final=end == self.end)
                except UnicodeDecodeError as error:
                    place = f"near byte {offset + error.start}"
                    raise UserError(
                        f"{self.path}: not UTF-8 text, {place}; convert it first"
                    ) from None
                progress(end - offset)

    def split(self, percent: float) -> tuple[Self, Self]:
        """Return the section without its last `percent`, and those, cut at a near line end."""
        target = self.end - round(self.size * percent / 100)
        with self.path.open("rb") as file:
            file.seek(target)
            following = file.read(min(PIECE_BYTES, self.end - target))
        cut = following.find(b"\n") + 1
        if cut in (0, len(following)):
            character_starts = (i for i, byte in enumerate(following) if byte & 0xC0 != 0x80)
            cut = next(character_starts, len(following))
        return self._replace(end=target + cut), self._replace(start=target + cut)


class LineSection(TextSection):
    """A range of lines, one value of JSON each."""

    def lines(self, progress: Progress = lambda _: None) -> Iterator[tuple[str, bytes]]:
        """Yield the place, such as `a.jsonl: line 7`, and the content of each line that is not
        blank."""
        for number, _, line in self._numbered():
            yield f"{self.name}: line {number}", line
            progress(len(line))

    def split(self, percent: float) -> tuple[Self, Self]:
        """Return the section without its last `percent`, and those; both have at least a line.
        Raises UserError if there is only one."""
        target = self.end - round(self.size * percent / 100)
        lines = self._numbered()
        first = last = next(lines)
        for last in lines:
            if last[1] >= target:
                break
        number, cut, _ = last
        if last is first:
            raise UserError(
                f"{self.name}: line {number}: this is the only line, so none is left"
                " for validation; give more, or a --validation-percent of 0"
            )
        return self._replace(end=cut), self._replace(start=cut, first_line=number)

    def _numbered(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the number, the offset and the content of each line that is not blank."""
        offset = self.start
        with self.path.open("rb") as file:
            file.seek(offset)
            for number, line in enumerate(file, self.first_line):
                if offset >= self.end:
                    return
                if line.strip():
                    yield number, offset, line
                offset += len(line)


def text_of(line: bytes) -> str:
    """Return the text of a line. Raises ValueError if it is not UTF-8."""
    try:
        return line.rstrip().decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, near byte {error.start + 1}; convert it first") from None


def parse_json(line: bytes) -> Any:
    """Return the value of a line. Raises ValueError with the reason if it is not JSON."""
    text = text_of(line)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON at column {error.colno}: {error.msg}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"unreadable JSON: {reason(error)}") from None


def without_surrogates(text: str) -> str:
    """Return a text of JSON, which may escape anything, with U+FFFD for lone surrogates."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def split_sections(sections: list[S], percent: float) -> dict[Split, list[S]]:
    """Divide files between training and validation. A single file is cut near its end. Of several
    files, those that fit into `percent` of the bytes or tokens are for validation, tried in the
    order of a hash of their names, or the smallest if none fits."""
    sections = [section for section in sections if section.size]
    if percent == 0:
        return {"train": sections}
    if len(sections) <= 1:
        parts = [section.split(percent) for section in sections]
        return {"train": [first for first, _ in parts], "validation": [last for _, last in parts]}
    room = sum(section.size for section in sections) * percent / 100
    chosen: list[S] = []
    for section in sorted(sections, key=lambda section: stable_hash(section.path.name)):
        if section.size <= room:
            chosen.append(section)
            room -= section.size
    chosen = chosen or [min(sections, key=lambda section: section.size)]
    return {
        "train": [section for section in sections if section not in chosen],
        "validation": [section for section in sections if section in chosen],
    }


def split_lines(sections: list[LineSection], percent: float) -> dict[Split, list[LineSection]]:
    """Like `split_sections`. Raises UserError if a file has no lines, or a single file only one."""
    for section in sections:
        if next(section.lines(), None) is None:
            raise UserError(f"{section.name}: has no lines; each line must be a pair or a chat")
    return split_sections(sections, percent)


def stable_hash(text: str) -> int:
    """Return a 64-bit hash of a text or a file's name that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8])


T = TypeVar("T", bound=TextSection)
W = TypeVar("W", bound=TokenWriter)


def write_splits(
    folder: Path,
    sections: Mapping[dataset.Split, Sequence[T]],
    tokenizer: Tokenizer,
    open_writer: Callable[[Path, str], W],
    write_section: Callable[[W, T, Progress], None],
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
    return "U16" if vocab_size <= 1 << 16 else "U32"
