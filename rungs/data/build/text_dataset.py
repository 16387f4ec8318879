"""The dataset builders for UTF-8 text, streamed in bounded memory: the user's, and the source of
Python's standard library (PSF license), which every Python has."""

import itertools
import json
import platform
import sysconfig
from functools import partial
from pathlib import Path

from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.common.run_log import log
from rungs.common.shown_text import command_line
from rungs.config.option_values import VALIDATION_PERCENT, VOCAB_SIZE
from rungs.data.build.sections import (
    PIECE_BYTES,
    Progress,
    TextSection,
    log_texts,
    split_sections,
    stable_hash,
    write_splits,
)
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.tokens import dataset
from rungs.data.tokens.token_file import TokenWriter

_TRAINING_BYTES = 32 << 20
"""Bytes of text, in pieces spread evenly over all of it, to train a tokenizer on."""
PYTHON_STDLIB = "python-stdlib"
_EXCLUDED = {
    *("__pycache__", "_bundled", "dist-packages", "ensurepip", "idle_test", "site-packages"),
    *("encodings", "test", "tests"),  # encodings: mostly generated tables of characters
}
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")

Sections = dict[dataset.Split, list[TextSection]]


def build(
    folder: Path, files: list[Path], tokenizer: Tokenizer | int, validation_percent: float
) -> dataset.Source:
    """Write the token files and tokenizer of a dataset into its folder. `tokenizer` can be the
    vocabulary size of one to train on the training text. Raises UserError if a file is missing or
    not UTF-8, a split has no text, or the vocabulary is too small."""
    texts = list(map(TextSection.of_file, files))
    if as_json := next(filter(_is_json, texts), None):
        log.warning(
            "%s: looks like JSON; with --text its brackets, keys and escapes are trained on, too."
            " Put the plain text into files of their own, or use --pairs for prompts and answers",
            as_json.path,
        )
    sections = split_sections(texts, validation_percent)
    if isinstance(tokenizer, int):
        tokenizer = train_tokenizer(sections["train"], tokenizer)
    write(folder, sections, tokenizer)
    return dataset.Source(kind="text", files=[path.name for path in files])


def _is_json(section: TextSection) -> bool:
    """Whether a file's name or first line suggests JSON."""
    if section.path.suffix.lower() in _JSON_SUFFIXES:
        return True
    with section.path.open("rb") as file:
        first_line, *_ = file.read(PIECE_BYTES).strip().splitlines() or [b""]
    try:
        return isinstance(json.loads(first_line), dict)
    except (RecursionError, ValueError):
        return False


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


def build_stdlib(folder: Path) -> dataset.Source:
    """Write the token files and tokenizer of `python-stdlib` into a folder, the same bytes with
    the same version of Python. Raises UserError if this Python has no source code of its standard
    library."""
    sections = _split_library(Path(sysconfig.get_path("stdlib")))
    tokenizer = train_tokenizer(sections["train"], VOCAB_SIZE)
    write(folder, sections, tokenizer)
    return dataset.Source(kind="python-stdlib", python_version=platform.python_version())


def _split_library(library: Path) -> Sections:
    """Assign each file to training or validation by a hash of its path."""
    sections: Sections = {"train": [], "validation": []}
    for path in _source_files(library):
        number = stable_hash(path.relative_to(library).as_posix()) % 100
        split: dataset.Split = "validation" if number < VALIDATION_PERCENT else "train"
        sections[split].append(TextSection.of_file(path))
    if not all(sections.values()):
        raise UserError(
            f"{library}: this Python has no source code of its standard library; use another"
            f" Python, or your own text: {command_line('download_dataset')} --text FILE --name NAME"
        )
    return sections


def _source_files(library: Path) -> list[Path]:
    """Return the library's source files in order, except tests, third-party packages and files that
    differ between machines."""
    found = {path.relative_to(library): path for path in library.rglob("*.py")}
    return [
        found[place]
        for place in sorted(found, key=Path.as_posix)
        if not _EXCLUDED.intersection(place.parent.parts)
        and not any(folder.startswith("config-") for folder in place.parent.parts)
        and not place.name.startswith(("_sysconfigdata", "sitecustomize"))
        and _is_utf8(found[place])
    ]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
