"""A dataset: a folder with a token file for each split, described in `dataset.json`.

datasets/python-stdlib/
  train.safetensors        one 1-D integer tensor `tokens`; where they are prompts and answers,
                           `pair_bounds` beside it (`token_file.py`)
  validation.safetensors   the same; may be absent
  tokenizer.json           what made the tokens; may be absent
  dataset.json             written by us: where it came from, counts, checksums
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from rungs.common import disk, strict_json
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_there
from rungs.common.strict_json import StrictModel
from rungs.data import token_file
from rungs.data.token_file import FileArray
from rungs.data.tokenizer import TOKENIZER_FILE

Split = Literal["train", "validation"]
TRAIN: Split = "train"
VALIDATION: Split = "validation"
SPLITS = (TRAIN, VALIDATION)
DESCRIPTION_FILE = "dataset.json"
_BLOCK_TOKENS = 1 << 18
_BLOCK_PAIRS = 1 << 14


class Source(StrictModel):
    """Where a dataset came from."""

    kind: Literal["python-stdlib", "text", "pairs", "hub", "folder"]
    """The embedded text, the user's text or pairs, the hub, or a folder that was simply there."""
    python_version: str | None = None
    """The Python whose standard library the text is."""
    files: list[str] | None = None
    """Names of the user's files."""
    revision: str | None = None
    """Commit of the hub repository."""


class PairsDescription(StrictModel):
    """The prompts with their answers in one token file."""

    pairs: int
    longest_tokens: int
    """Of prompt, answer and end of text together."""
    answer_tokens: int
    """In all answers, the end of text after each counted."""


class SplitDescription(StrictModel):
    """What stands in one token file."""

    tokens: int
    dtype: str
    largest_token_id: int
    file_bytes: int
    sha256: str
    """Of the whole file, in hexadecimal."""
    pairs: PairsDescription | None = None
    """Absent where the file holds text."""


class DatasetDescription(StrictModel):
    """What `dataset.json` holds."""

    source: Source
    splits: dict[Split, SplitDescription]
    own_checksum: str | None = None
    """sha256 of this file's content without this key."""

    def sealed(self) -> "DatasetDescription":
        """With its own checksum."""
        return self.model_copy(update={"own_checksum": self._digest()})

    def believed(self) -> "DatasetDescription":
        """Without the checksum, and without what is said of the splits where that is wrong."""
        is_intact = self.own_checksum == self._digest()
        splits = self.splits if is_intact else {}
        return self.model_copy(update={"splits": splits, "own_checksum": None})

    def _digest(self) -> str:
        content = self.model_dump(mode="json", exclude={"own_checksum"}, exclude_none=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def split_file(split: Split) -> str:
    """Name of a split's token file."""
    return f"{split}.safetensors"


class Dataset:
    """A dataset's folder, open for reading.

    What `dataset.json` lacks, or has for another file than is there, or for one that was written
    after it, is found out in one pass over the token files and written beside them, where that can
    be written.

    Raises:
        UserError: without a training split, or with a token file that is not one.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        known = _still_true(read_description(folder), folder)
        source = known.source if known else Source(kind="folder")
        self.description = describe(folder, source, known)
        if self.description != known:
            with contextlib.suppress(OSError):  # a shared, read-only folder
                write_description(folder, self.description)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits there are, training first."""
        return tuple(split for split in SPLITS if split in self.description.splits)

    def tokens(self, split: Split) -> FileArray:
        """A split's tokens, as `token_file.open_tokens`."""
        return token_file.open_tokens(self.folder / split_file(split))

    def pair_bounds(self, split: Split) -> FileArray | None:
        """Where the answers of a split of pairs stand, as `token_file.open_pair_bounds`."""
        return token_file.open_pair_bounds(self.folder / split_file(split))

    @property
    def holds_pairs(self) -> bool:
        """Whether any split is of prompts with their answers rather than of text."""
        return any(split.pairs for split in self.description.splits.values())

    @property
    def tokenizer_file(self) -> Path | None:
        """The dataset's own tokenizer, where it has one."""
        path = self.folder / TOKENIZER_FILE
        return path if is_file(path) else None


def read_description(folder: Path) -> DatasetDescription | None:
    """What `dataset.json` says, without the splits where its checksum is wrong; nothing where it is
    missing or cannot be read."""
    path = folder / DESCRIPTION_FILE
    try:
        return strict_json.parse(strict_json.read_text(path), path, DatasetDescription).believed()
    except UserError:
        return None


def _still_true(known: DatasetDescription | None, folder: Path) -> DatasetDescription | None:
    """A description without the token files that were written after it."""
    if known is None:
        return None
    written = (folder / DESCRIPTION_FILE).stat().st_mtime_ns
    paths = {split: folder / split_file(split) for split in known.splits}
    later = {s for s, path in paths.items() if path.exists() and path.stat().st_mtime_ns > written}
    splits = {split: found for split, found in known.splits.items() if split not in later}
    return known.model_copy(update={"splits": splits})


def write_description(folder: Path, description: DatasetDescription) -> None:
    """Write `dataset.json`, whole or not at all; raises OSError."""
    content = description.sealed().model_dump(mode="json", exclude_none=True)
    text = json.dumps(content, indent=2) + "\n"
    new = folder / f".{DESCRIPTION_FILE}.{os.getpid()}"
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            disk.flush(file)
        new.replace(folder / DESCRIPTION_FILE)
    finally:
        new.unlink(missing_ok=True)


def describe(
    folder: Path, source: Source, known: DatasetDescription | None = None
) -> DatasetDescription:
    """Describe the token files of a folder, reading only those that `known` does not fit.

    Raises:
        UserError: without a training split, or with a token file that is not one.
    """
    if not is_there(folder / split_file(TRAIN)):
        raise UserError(f"{folder}: not a dataset: there is no {split_file(TRAIN)} in it")
    paths = {split: folder / split_file(split) for split in SPLITS}
    splits = {
        split: _describe_split(path, known.splits.get(split) if known else None)
        for split, path in paths.items()
        if is_there(path)
    }
    return DatasetDescription(source=source, splits=splits)


def _describe_split(path: Path, known: SplitDescription | None) -> SplitDescription:
    layout = token_file.read_layout(path)
    seen = (path.stat().st_size, layout.tokens, layout.dtype.name, layout.pairs)
    if known:
        known_pairs = known.pairs.pairs if known.pairs else 0
        if seen == (known.file_bytes, known.tokens, known.dtype, known_pairs):
            return known
    pairs = _describe_pairs(path, layout) if layout.pairs else None
    largest, sha256 = _read_through(path, layout)
    return SplitDescription(
        tokens=layout.tokens,
        dtype=layout.dtype.name,
        largest_token_id=largest,
        file_bytes=path.stat().st_size,
        sha256=sha256,
        pairs=pairs,
    )


def _describe_pairs(path: Path, layout: token_file.TokenLayout) -> PairsDescription:
    """Check the bounds of a file's pairs, and sum them up, a block at a time."""
    bounds_P2 = token_file.open_pair_bounds(path)
    assert bounds_P2 is not None
    longest, answer_tokens, start = 0, 0, 0
    for first in range(0, layout.pairs, _BLOCK_PAIRS):
        answers_P, ends_P = bounds_P2[first : first + _BLOCK_PAIRS].T
        starts_P = np.concatenate([[start], ends_P[:-1]])
        wrong_P = (answers_P < starts_P) | (answers_P >= ends_P) | (ends_P - starts_P < 2)
        if wrong_P.any():
            raise UserError(
                f"{path}: {token_file.BOUNDS!r}: pair {first + int(wrong_P.argmax())} does not"
                " follow the one before it with two tokens or more, one of them its answer's"
            )
        longest = max(longest, int((ends_P - starts_P).max()))
        answer_tokens += int((ends_P - answers_P).sum())
        start = int(ends_P[-1])
    if start != layout.tokens:
        raise UserError(
            f"{path}: {token_file.BOUNDS!r}: the last pair ends at token {start}, not at"
            f" {layout.tokens}, the last there is"
        )
    return PairsDescription(pairs=layout.pairs, longest_tokens=longest, answer_tokens=answer_tokens)


def _read_through(path: Path, layout: token_file.TokenLayout) -> tuple[int, str]:
    """Largest token id and SHA-256 of a file, in one pass over it."""
    whole = FileArray(path, np.dtype(np.uint8), 0, (path.stat().st_size,))
    digest, largest, hashed = hashlib.sha256(whole[: layout.offset].data), 0, layout.offset
    with tqdm(total=len(whole), desc=f"reading {path}", unit="B", unit_scale=True, delay=1) as bar:
        for start in range(0, layout.tokens, _BLOCK_TOKENS):
            size = min(_BLOCK_TOKENS, layout.tokens - start) * layout.dtype.itemsize
            content = whole[hashed : hashed + size]
            block = content.view(layout.dtype)
            if block.min() < 0:
                raise UserError(f"{path}: holds the token id {block.min()}; none may be negative")
            largest = max(largest, int(block.max()))
            digest.update(content.data)
            bar.update(size)
            hashed += size
    for start in range(hashed, len(whole), _BLOCK_TOKENS):
        digest.update(whole[start : start + _BLOCK_TOKENS].data)
    return largest, digest.hexdigest()
