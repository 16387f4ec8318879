"""Datasets made of text: a tokenizer and a stream of tokens, in memory that does not grow with
the text."""

import codecs
import hashlib
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from tqdm import tqdm

from rungs.common.errors import UserError
from rungs.common.paths import require_regular
from rungs.data import dataset, token_file
from rungs.data.bpe import train_bpe
from rungs.data.dataset import Split
from rungs.data.tokenizer import TOKENIZER_FILE, Tokenizer

_PIECE_BYTES = 1 << 20
_TRAINING_BYTES = 32 << 20
"""Text that a tokenizer is trained on at most, in pieces from all over."""
_LARGEST_UINT16_VOCAB = 1 << 16
_BOM = codecs.BOM_UTF8


class TextSection(NamedTuple):
    """A range of bytes in a UTF-8 text file."""

    path: Path
    start: int
    end: int

    @classmethod
    def whole(cls, path: Path) -> "TextSection":
        """All of a file but a byte order mark; raises UserError where there is none to read."""
        try:
            require_regular(path)
            with path.open("rb") as file:
                start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            return cls(path, start, path.stat().st_size)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.end - self.start

    def pieces(self, progress: Callable[[int], object]) -> Iterator[str]:
        """The text, a piece at a time; all line ends as "\\n". `progress` is told of each
        piece's bytes.

        Raises:
            UserError: for bytes that are not UTF-8.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")()
        decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        with self.path.open("rb") as file:
            file.seek(self.start)
            for place in range(self.start, self.end, _PIECE_BYTES):
                end = min(place + _PIECE_BYTES, self.end)
                try:
                    yield decoder.decode(file.read(end - place), final=end == self.end)
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{self.path}: not UTF-8 text, near byte {place + error.start}; convert it"
                        " first"
                    ) from None
                progress(end - place)

    def split(self, percent: float) -> tuple["TextSection", "TextSection"]:
        """The section and its last `percent`, parted at a line end where there is one near."""
        target = self.end - round(self.size * percent / 100)
        with self.path.open("rb") as file:
            file.seek(target)
            following = file.read(min(_PIECE_BYTES, self.end - target))
        cut = following.find(b"\n") + 1
        if cut in (0, len(following)):
            starts = (place for place, byte in enumerate(following) if byte & 0xC0 != 0x80)
            cut = next(starts, len(following))  # of a character
        return self._replace(end=target + cut), self._replace(start=target + cut)


Sections = dict[Split, list[TextSection]]


def split_sections(
    sections: list[TextSection],
    percent: float,
    part: Callable[[TextSection, float], tuple[TextSection, TextSection]] = TextSection.split,
) -> Sections:
    """Part text into training and validation: one file near its end, several file by file.

    Of several, those are taken, in the order of a hash of their names, that fit into `percent`
    of the bytes; where none does, the smallest.

    Args:
        part: how one file is parted.
    """
    sections = [section for section in sections if section.size]
    if percent == 0:
        return {"train": sections}
    if len(sections) <= 1:
        parts = [part(section, percent) for section in sections]
        return {"train": [first for first, _ in parts], "validation": [last for _, last in parts]}
    room = sum(section.size for section in sections) * percent / 100
    chosen: set[TextSection] = set()
    for section in sorted(sections, key=lambda section: stable_hash(section.path.name)):
        if section.size <= room:
            chosen.add(section)
            room -= section.size
    chosen = chosen or {min(sections, key=lambda section: section.size)}
    return {
        "train": [section for section in sections if section not in chosen],
        "validation": [section for section in sections if section in chosen],
    }


def stable_hash(name: str) -> int:
    """A number that looks random, always the same for a name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8])


def tokenizer_for(sections: list[TextSection], vocab_size: int) -> Tokenizer:
    """Train a tokenizer on text, or on a sample of it, evenly spread, where it is large."""
    size = sum(section.size for section in sections)
    every = -(-size // _TRAINING_BYTES)
    with progress_bar("training the tokenizer", size) as bar:
        pieces = (piece for section in sections for piece in section.pieces(bar.update))
        return train_bpe(itertools.islice(pieces, 0, None, max(every, 1)), vocab_size)


def write(folder: Path, sections: Sections, tokenizer: Tokenizer) -> None:
    """Write the token files and the tokenizer of a dataset into its folder.

    The end-of-text token, where the tokenizer has one, follows each section.

    Raises:
        UserError: for text that is not UTF-8, or a split without any.
    """
    dtype = token_type(tokenizer)
    size = sum(section.size for split in sections.values() for section in split)
    with progress_bar("tokenizing", size) as bar:
        for split, parts in sections.items():
            path = folder / dataset.split_file(split)
            with token_file.TokenWriter(path, dtype) as writer:
                for section in parts:
                    for ids in tokenizer.encode_stream(section.pieces(bar.update)):
                        writer.append(ids)
                    if tokenizer.end_of_text is not None and section.size:
                        writer.append([tokenizer.end_of_text])
            if not writer.tokens:
                raise UserError(
                    f"there is no text for the {split} split; give more text, or let another"
                    " percentage of it be for validation"
                )
    tokenizer.save(folder / TOKENIZER_FILE)


def token_type(tokenizer: Tokenizer) -> str:
    """Code of the smallest type, of two or four bytes, that holds every id of a tokenizer."""
    return "U16" if tokenizer.vocab_size <= _LARGEST_UINT16_VOCAB else "U32"


def progress_bar(what: str, size: int) -> "tqdm[NoReturn]":
    """A bar over so many bytes, shown where it takes a while."""
    return tqdm(total=size, desc=what, unit="B", unit_scale=True, delay=1)
