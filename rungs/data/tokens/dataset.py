"""A dataset: a folder with a token file per split, described by `dataset.json`.

datasets/python-stdlib/
  train.safetensors        tokens; see `token_file.py`
  validation.safetensors   the same; optional
  tokenizer.json           the tokenizer that made the tokens; optional
  dataset.json             written by Rungs: source, counts, checksums"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np

from rungs.common import disk, run_log, strict_json
from rungs.common.errors import UserError
from rungs.data.text import tokenizer
from rungs.data.tokens.token_file import AnsweredDocuments, FileArray, TokenFile

Split = Literal["train", "validation"]
TRAIN: Split = "train"
VALIDATION: Split = "validation"
SPLITS = (TRAIN, VALIDATION)
DESCRIPTION_FILE = "dataset.json"
_BLOCK_TOKENS = 1 << 18
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class DocumentFile(strict_json.StrictModel):
    """A file of documents."""

    name: str
    bytes: int
    sha256: str
    documents: int
    """Number of its documents that are in the dataset."""


class Documents(strict_json.StrictModel):
    """Origin of a dataset built from files of documents."""

    request: str
    """Checksum of the options that the dataset was built with."""
    repository: str | None = None
    """Name on the hub; None for the user's own files."""
    license: str | None = None
    column: str | None = None
    """Column with the text; None for the default."""
    files: list[DocumentFile]
    rows_without_text: int
    text_bytes: int
    """Bytes of all documents in UTF-8."""


class Chats(strict_json.StrictModel):
    """Selection of a dataset's chats."""

    template_sha256: str
    """Checksum of `chat_template.jinja`."""
    max_tokens: int | None = None
    """Maximum tokens of a chat; None for no limit."""
    left_out: int
    """Number of longer chats, which were left out."""


class NearDuplicates(strict_json.StrictModel):
    """Documents of another dataset that were left out, as they are near an earlier one."""

    of: dict[str, str]
    """sha256 of each of the other dataset's token files."""
    similarity: float
    """Least similarity of near-duplicates."""
    documents: int
    """Number of documents before."""
    left_out: int


class Source(strict_json.StrictModel):
    """Where a dataset came from."""

    kind: Literal[
        "python-stdlib",
        "task",
        "text",
        "documents",
        "tokens",
        "pairs",
        "chats",
        "preferences",
        "unpaired",
        "near-duplicates",
        "hub",
        "folder",
    ]
    """Python's standard library, a built-in task, the user's text, files of documents, tokens of
    another program, pairs, chats, preferences or unpaired ones, a dataset without near-duplicates,
    tokens from the hub, or a folder that the user made."""
    python_version: str | None = None
    """Version of Python that the standard library is from."""
    files: list[str] | None = None
    revision: str | None = None
    """Commit of the hub repository."""
    documents: Documents | None = None
    chats: Chats | None = None
    near_duplicates: NearDuplicates | None = None


class PairsDescription(strict_json.StrictModel):
    """The pairs (prompt and answer) or chats in one token file."""

    pairs: int
    """Number of pairs or chats."""
    longest_tokens: int
    """Tokens of the longest pair or chat, including its end of text."""
    answer_tokens: int
    """Tokens in all answers, including the end of text after each."""
    is_chats: bool | None = None
    """Absent for pairs."""
    is_preferences: bool | None = None
    """Whether each two are a chosen and a rejected answer; absent if not."""
    is_unpaired: bool | None = None
    """Whether each is an answer that is desirable or not; absent if not."""

    @property
    def preferences(self) -> str:
        """The kind of preferences, as in `TrainConfig.preferences`."""
        if self.is_unpaired:
            return "unpaired preferences"
        return "preferences" if self.is_preferences else "no preferences"


class SplitDescription(strict_json.StrictModel):
    """The contents of one token file."""

    tokens: int
    dtype: str
    largest_token_id: int
    file_bytes: int
    sha256: str
    """Checksum of the file, in hexadecimal."""
    sample_sha256: str | None = None
    """Checksum of a sample of the file's bytes."""
    pairs: PairsDescription | None = None
    """Absent if the file holds text."""


class DatasetDescription(strict_json.StrictModel, extra="ignore"):
    """The contents of `dataset.json`."""

    source: Source
    splits: dict[Split, SplitDescription]

    @property
    def checksums(self) -> dict[str, str]:
        """sha256 of each split's token file."""
        return {split: found.sha256 for split, found in self.splits.items()}


def split_file(split: Split) -> str:
    """Return the name of a split's token file."""
    return f"{split}.safetensors"


class Dataset:
    """A dataset's folder, open for reading.

    If `dataset.json` is missing, older than a token file, or different from it (in size or a sample
    of its bytes), the token file is read once and `dataset.json` is rewritten, unless the folder is
    read-only. Raises UserError if there is no training split, or a token file is invalid."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        if known := read_description(folder):
            known = _without_newer_files(known, folder)
        source = known.source if known else Source(kind="folder")
        self.description = describe(folder, source, known)
        if self.description != known:
            with contextlib.suppress(OSError):  # a shared, read-only folder
                write_description(folder, self.description)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that exist, training first."""
        return tuple(split for split in SPLITS if split in self.description.splits)

    def open(self, split: Split) -> TokenFile:
        """Open a split's token file."""
        return TokenFile(self.token_path(split))

    def tokens(self, split: Split) -> FileArray:
        """Open a split's tokens."""
        return self.open(split).tokens

    def token_path(self, split: Split) -> Path:
        """Return the path of a split's token file."""
        return self.folder / split_file(split)

    @property
    def holds_pairs(self) -> bool:
        """Whether a split holds pairs of prompts and answers rather than text."""
        return any(split.pairs for split in self.description.splits.values())

    @property
    def begin(self) -> list[int]:
        """Token ids that begin each text; empty if unknown."""
        texts = self.open(TRAIN).texts
        return texts.begin if texts else []

    @property
    def tokenizer_file(self) -> Path | None:
        """Path of the dataset's own tokenizer, or None if it has none."""
        path = self.folder / tokenizer.TOKENIZER_FILE
        return path if path.exists() else None


def read_description(folder: Path) -> DatasetDescription | None:
    """Read `dataset.json`; None if it is missing or not valid."""
    path = folder / DESCRIPTION_FILE
    try:
        return strict_json.parse(strict_json.read_text(path), path, DatasetDescription)
    except UserError:
        return None


def _without_newer_files(known: DatasetDescription, folder: Path) -> DatasetDescription:
    """Drop the splits whose token file is newer than `dataset.json`."""
    written = (folder / DESCRIPTION_FILE).stat().st_mtime_ns

    def is_newer(path: Path) -> bool:
        return path.exists() and path.stat().st_mtime_ns > written

    kept = {s: found for s, found in known.splits.items() if not is_newer(folder / split_file(s))}
    return known.model_copy(update={"splits": kept})


def write_description(folder: Path, description: DatasetDescription) -> None:
    """Write `dataset.json` atomically; raises OSError."""
    content = description.model_dump(mode="json", exclude_none=True)
    disk.replace_file(folder / DESCRIPTION_FILE, json.dumps(content, indent=2) + "\n")


def describe(
    folder: Path, source: Source, known: DatasetDescription | None = None
) -> DatasetDescription:
    """Describe a folder's token files, reading only those that differ from `known`. Raises
    UserError if there is no training split, or a token file is not valid."""
    if not (folder / split_file(TRAIN)).exists():
        raise UserError(f"{folder}: not a dataset: it has no {split_file(TRAIN)}")
    splits = {
        split: _describe_split(path, known.splits.get(split) if known else None)
        for split in SPLITS
        if (path := folder / split_file(split)).exists()
    }
    return DatasetDescription(source=source, splits=splits)


def _describe_split(path: Path, known: SplitDescription | None) -> SplitDescription:
    file_bytes, sample = path.stat().st_size, _sample_checksum(path)
    if known and (known.file_bytes, known.sample_sha256) == (file_bytes, sample):
        return known
    file = TokenFile(path)
    pairs = _describe_pairs(path, file) if file.documents else None
    largest, sha256 = _largest_id_and_checksum(path, file.tokens)
    return SplitDescription(
        tokens=len(file.tokens),
        dtype=file.tokens.dtype.name,
        largest_token_id=max(largest, *(file.texts.begin if file.texts else [0])),
        file_bytes=file_bytes,
        sha256=sha256,
        sample_sha256=sample,
        pairs=pairs,
    )


def _sample_checksum(path: Path) -> str:
    """Return the sha256 of blocks spread evenly over a file, or of all of a small file."""
    digest, last = hashlib.sha256(), max(path.stat().st_size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for start in np.linspace(0, last, _SAMPLES, dtype=int):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _describe_pairs(path: Path, file: TokenFile) -> PairsDescription:
    """Check and describe the bounds of a file's pairs."""
    assert file.bounds is not None
    answers_P, ends_P = file.bounds[:].T
    starts_P = np.concatenate([[0], ends_P[:-1]])
    is_valid = ((starts_P <= answers_P) & (answers_P < ends_P)).all()
    if file.chat_ends is not None:
        ends_C = file.chat_ends[:]
        is_valid &= (np.diff(ends_C, prepend=0) > 0).all() and ends_C[-1] == len(ends_P)
    if not is_valid or ends_P[-1] != len(file.tokens):
        raise UserError(f"{path}: its answers don't follow one another to the end of its tokens")
    lengths_C = AnsweredDocuments(path).lengths_C
    if file.is_preferences and len(lengths_C) % 2:
        raise UserError(f"{path}: has {len(lengths_C)} answers, which are not pairs")
    if lengths_C.min() < 2:
        raise UserError(f"{path}: a document has fewer than two tokens")
    return PairsDescription(
        pairs=len(lengths_C),
        longest_tokens=int(lengths_C.max()),
        answer_tokens=int((ends_P - answers_P).sum()),
        is_chats=file.chat_ends is not None or None,
        is_preferences=file.is_preferences or None,
        is_unpaired=file.desirable is not None or None,
    )


def _largest_id_and_checksum(path: Path, tokens: FileArray) -> tuple[int, str]:
    """Return the largest token id and the sha256 of a file, in one pass over it."""
    digest, largest, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file, run_log.byte_progress(f"reading {path}", size) as bar:
        digest.update(file.read(tokens.offset))
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            block = np.fromfile(file, tokens.dtype, min(_BLOCK_TOKENS, len(tokens) - start))
            if block.min() < 0:
                raise UserError(f"{path}: has the token id {block.min()}; ids must not be negative")
            largest = max(largest, int(block.max()))
            digest.update(block.data)
            bar.update(block.nbytes)
        while content := file.read(_BLOCK_TOKENS):
            digest.update(content)
    return largest, digest.hexdigest()
