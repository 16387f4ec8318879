"""How much of some texts, such as a validation split, is also in training; and duplicates.

Two texts overlap if they share 13 consecutive words, in lower case without punctuation (GPT-3,
arXiv 2005.14165, appendix C). Words and texts are compared by 64-bit hashes. To bound memory, only
the first of very many texts are examined."""

import functools
import itertools
import string
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rungs.common import errors, strict_json
from rungs.data.build.sections import LineSection, parse_json, stable_hash, without_surrogates
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import TRAIN, VALIDATION, Dataset, Split, read_description
from rungs.data.tokens.token_file import FileArray

WORDS = 13
"""Consecutive words that two overlapping texts share."""
SHOWN_SHARE = 0.01
"""A larger overlap is mentioned next to the validation loss."""
_MOST_HASHES = 1 << 24
_MOST_WORDS = 1 << 20
_BATCH_HASHES = 1 << 20
_BLOCK_TOKENS, _BATCH_DOCUMENTS = 1 << 20, 256
_FACTORS_N = np.random.default_rng(13).integers(0, 1 << 63, WORDS, np.uint64) * np.uint64(2) + 1
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Found(strict_json.StrictModel):
    """How much of some texts appears in training."""

    texts: int
    examined: int
    """Number of texts that were examined; fewer than all if there are very many."""
    copies: int
    """Number of examined texts that are in training verbatim."""
    overlapping: int
    """Number of examined texts that share `WORDS` consecutive words with training."""
    long_enough: int
    """Number of examined texts with at least `WORDS` words."""
    repeated: float
    """Share of texts that are copies of an earlier one."""

    @property
    def overlapping_share(self) -> float:
        """Overlapping share of the texts with at least `WORDS` words."""
        return self.overlapping / max(self.long_enough, 1)

    @property
    def copied_share(self) -> float:
        """Share of the examined texts that are in training verbatim."""
        return self.copies / max(self.examined, 1)


class Overlap(strict_json.StrictModel):
    """The contents of `overlap.json` in a dataset's folder."""

    FILE: ClassVar = "overlap.json"

    checksums: dict[str, str]
    """sha256 of each token file that was examined."""
    validation: Found | None
    repeated_in_training: float
    """Share of training documents that are copies of an earlier one."""

    def save(self, folder: Path) -> None:
        """Write the file; raises OSError."""
        (folder / self.FILE).write_text(self.model_dump_json(indent=2) + "\n", "utf-8")


def recorded(folder: Path) -> Overlap | None:
    """Return the content of a folder's `overlap.json`; None if missing or of other token files."""
    path, description = folder / Overlap.FILE, read_description(folder)
    if description is None:
        return None
    try:
        found = strict_json.parse(strict_json.read_text(path), path, Overlap)
    except errors.UserError:
        return None
    return found if found.checksums == description.checksums else None


def notes(datasets: Mapping[str, Path]) -> list[str]:
    """Return a line for each dataset (name and folder) with more than `SHOWN_SHARE` of its
    validation split in training."""
    return [
        f"{share:.1%} of the validation documents of {name} share {WORDS} words in a row with"
        " training"
        for name, folder in datasets.items()
        if (found := recorded(folder)) is not None
        and found.validation is not None
        and (share := found.validation.overlapping_share) > SHOWN_SHARE
    ]


def check(dataset: Dataset) -> Overlap:
    """Compare a dataset's validation split with its training split, and look for duplicates. Raises
    UserError if the dataset has no tokenizer with an end-of-text token."""
    held_out = VALIDATION in dataset.splits
    examined = Examined(texts_of(dataset, VALIDATION) if held_out else ())
    hashes = examined.compare(texts_of(dataset, TRAIN))
    return Overlap(
        checksums=dataset.description.checksums,
        validation=examined.found() if held_out else None,
        repeated_in_training=_repeated_share(hashes),
    )


def read_items(path: Path) -> "Examined":
    """Return a benchmark's items, one per line of JSON, to look for in training. Raises UserError
    if the file cannot be read or has none."""
    examined = Examined(_items(path))
    if not examined.count:
        raise errors.UserError(f"{path}: has no items")
    return examined


def check_items(dataset: Dataset, items: "Examined") -> Found:
    """Look for a benchmark's items in a dataset's training split. Raises UserError if the dataset's
    tokenizer has no end-of-text token."""
    items.compare(texts_of(dataset, TRAIN))
    return items.found()


def texts_of(dataset: Dataset, split: Split) -> Iterator[str]:
    """Yield the text of each document of a split; see `documents_of`."""
    return (text for _, text in documents_of(dataset, split))


def documents_of(dataset: Dataset, split: Split) -> Iterator[tuple[list[int], str]]:
    """Yield the token ids and the text of each document of a split, without its end of text, or of
    each pair (prompt and answer), in order and in bounded memory. Raises UserError if the dataset's
    tokenizer has no end-of-text token."""
    tokenizer = load_tokenizer(dataset.folder) if dataset.tokenizer_file else None
    if tokenizer is None or tokenizer.end_of_text is None:
        raise errors.UserError(
            f"{dataset.folder}: has no tokenizer.json with an end-of-text token, which says where"
            " documents end"
        )
    file, end = dataset.open(split), tokenizer.end_of_text
    ids = _pairs(file.tokens, file.bounds) if file.bounds else _documents(file.tokens, end)
    while batch := [part.tolist() for part in itertools.islice(ids, _BATCH_DOCUMENTS)]:
        texts = tokenizer.decode_batch(batch, skip_special_tokens=True)
        yield from zip(batch, texts, strict=True)


def _documents(tokens: FileArray, end_of_text: int) -> Iterator[np.ndarray]:
    """Yield the token ids of each non-empty document."""
    started = list[np.ndarray]()
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        *whole, last = np.split(block, np.flatnonzero(block == end_of_text) + 1)
        for part in whole:
            document, started = np.concatenate([*started, part[:-1]]), []
            if document.size:
                yield document
        started.append(last)
    if (document := np.concatenate(started)).size:
        yield document


def _pairs(tokens: FileArray, bounds: FileArray) -> Iterator[np.ndarray]:
    ends = bounds[:][:, 1].tolist()
    for start, end in itertools.pairwise([0, *ends]):
        yield tokens[start:end]


def _items(path: Path) -> Iterator[str]:
    """Yield each item's strings, joined."""
    for place, line in LineSection.of_file(path).lines():
        with errors.errors_at(f"{place}: ", ValueError):
            yield " ".join(_strings(parse_json(line)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield without_surrogates(value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return text.lower().translate(_WITHOUT_PUNCTUATION).split()


class Examined:
    """Texts to look for in training; each is read once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._word_hash = functools.lru_cache(_MOST_WORDS)(stable_hash)
        self._hashes = array("Q")
        runs, size = list[np.ndarray](), 0
        for text in texts:
            self._hashes.append(stable_hash(text))
            if size < _MOST_HASHES:
                runs.append(self._runs_of(text))
                size += len(runs[-1]) + 1
        self._texts = np.array(self._hashes[: len(runs)], np.uint64)
        self._lengths = np.array([len(hashes) for hashes in runs], np.int64)
        self._runs, self._where = np.unique(_joined(runs), return_inverse=True)
        self._is_copied = np.zeros(len(self._texts), bool)
        self._is_shared = np.zeros(len(self._runs), bool)

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self._hashes)

    def _runs_of(self, text: str) -> np.ndarray:
        """Return the hashes of all `WORDS` consecutive words, uint64."""
        words = words_of(text)
        if len(words) < WORDS:
            return np.empty(0, np.uint64)
        hashes = np.array([*map(self._word_hash, words)], np.uint64)
        return (sliding_window_view(hashes, WORDS) * _FACTORS_N).sum(axis=1, dtype=np.uint64)

    def compare(self, training: Iterable[str]) -> "array[int]":
        """Look for the texts in the training texts, reading those once. Return the training texts'
        hashes."""
        hashes, runs, size = array("Q"), list[np.ndarray](), 0
        for text in training:
            hashes.append(stable_hash(text))
            runs.append(self._runs_of(text))
            size += len(runs[-1]) + 1
            if size >= _BATCH_HASHES:
                self._is_shared |= np.isin(self._runs, _joined(runs))
                runs, size = [], 0
        self._is_shared |= np.isin(self._runs, _joined(runs))
        self._is_copied |= np.isin(self._texts, np.array(hashes, np.uint64))
        return hashes

    def found(self) -> Found:
        """Return the result of the comparisons."""
        of_run = np.repeat(np.arange(len(self._texts)), self._lengths)
        shared = np.bincount(of_run, self._is_shared[self._where], minlength=len(self._texts))
        return Found(
            texts=self.count,
            examined=len(self._texts),
            copies=int(self._is_copied.sum()),
            overlapping=int((shared > 0).sum()),
            long_enough=int((self._lengths > 0).sum()),
            repeated=_repeated_share(self._hashes),
        )


def _repeated_share(hashes: "array[int]") -> float:
    """Return the share of texts that are copies of an earlier one, by their hashes."""
    different = len(np.unique(np.array(hashes, np.uint64)))
    return 1 - different / len(hashes) if hashes else 0.0


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint64), *arrays])
