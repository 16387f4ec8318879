"""Sequences of pairs and chats: one document each, padded, or as many as fit.

A document is a pair (one answer) or a chat (one answer per assistant turn). Its inputs are all its
tokens but the last, its targets all but the first; those outside of answers do not count.

Axes: S tokens of a sequence, C documents, P answers, 2 for an answer's start and end.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rungs.data import token_file

IGNORED = -1
"""A target that does not count in the loss."""
_BLOCK_DOCUMENTS = 1 << 14


class AnsweredDocuments:
    """The documents of a token file of pairs or chats."""

    def __init__(self, path: Path) -> None:
        bounds_P2 = token_file.open_pair_bounds(path)
        assert bounds_P2 is not None
        self._tokens, self._bounds_P2 = token_file.open_tokens(path), bounds_P2
        self._chat_ends_C = token_file.open_chat_ends(path)

    def __len__(self) -> int:
        return len(self._bounds_P2 if self._chat_ends_C is None else self._chat_ends_C)

    @property
    def input_tokens(self) -> int:
        """Number of input tokens of all documents."""
        return len(self._tokens) - len(self)

    def lengths(self) -> Iterator[np.ndarray]:
        """Yield lengths_C: the number of tokens of each document, int64, in blocks."""
        for first in range(0, len(self), _BLOCK_DOCUMENTS):
            _, _, lengths_C = self._answers(first, min(first + _BLOCK_DOCUMENTS, len(self)))
            yield lengths_C

    def count_longer_than(self, length: int) -> int:
        """Return how many documents have more than `length` input tokens."""
        return sum(int((lengths_C > length + 1).sum()) for lengths_C in self.lengths())

    def read(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the documents from `first` to before `end`: their tokens, int32, whether each
        token is part of an answer, and lengths_C."""
        start, bounds_P2, lengths_C = self._answers(first, end)
        tokens = self._tokens[start : start + int(lengths_C.sum())].astype(np.int32)
        changes = np.zeros(len(tokens) + 1, np.int8)
        changes[bounds_P2[:, 0]] = 1
        np.subtract.at(changes, bounds_P2[:, 1], 1)
        return tokens, np.cumsum(changes[:-1]) > 0, lengths_C

    def _answers(self, first: int, end: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return where some documents start in `tokens`, bounds_P2 of their answers, counted from
        there, and lengths_C."""
        rows = self._rows(first, end)
        first_row, end_row = int(rows[0]), int(rows[-1])
        start = int(self._bounds_P2[first_row - 1 : first_row][0, 1]) if first_row else 0
        bounds_P2 = self._bounds_P2[first_row:end_row] - start
        return start, bounds_P2, np.diff(bounds_P2[rows[1:] - first_row - 1, 1], prepend=0)

    def _rows(self, first: int, end: int) -> np.ndarray:
        """Return the index of each document's first row of bounds, and the one after the last."""
        if self._chat_ends_C is None:
            return np.arange(first, end + 1)
        ends_C = self._chat_ends_C[max(first - 1, 0) : end]
        return ends_C if first else np.concatenate([[0], ends_C])


class PaddedDocuments:
    """Sequences of one document each."""

    def __init__(self, documents: AnsweredDocuments, length: int) -> None:
        self._documents, self._length = documents, length

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def padding(self) -> float:
        """Share of tokens that are padding."""
        return 1 - self._documents.input_tokens / (len(self) * self._length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return _sequence(self._documents, index, index + 1, self._length)[:2]


class PackedDocuments(PaddedDocuments):
    """Sequences of as many documents as fit, in the order of the file. Those that don't fit into a
    sequence cannot be read."""

    def __init__(self, documents: AnsweredDocuments, length: int) -> None:
        super().__init__(documents, length)
        self._firsts = _pack(np.concatenate(list(documents.lengths())) - 1, length)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        first, end = self._firsts[index : index + 2].tolist()
        return _sequence(self._documents, first, end, self._length)


def _pack(sizes_C: np.ndarray, length: int) -> np.ndarray:
    """Return the index of the first document of each sequence, and the number of documents."""
    totals_C, firsts = np.cumsum(sizes_C), [0]
    while (first := firsts[-1]) < len(sizes_C):
        before = totals_C[first - 1] if first else 0
        end = int(np.searchsorted(totals_C, before + length, side="right"))
        firsts.append(max(end, first + 1))
    return np.array(firsts)


def _sequence(
    documents: AnsweredDocuments, first: int, end: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs_S, targets_S and starts_S of documents; padding is a document of its own."""
    tokens, is_answer, lengths_C = documents.read(first, end)
    ends_C = np.cumsum(lengths_C)
    is_input, is_target = np.ones((2, len(tokens)), bool)
    is_input[ends_C - 1] = False
    is_target[ends_C - lengths_C] = False
    used = len(tokens) - len(lengths_C)
    inputs_S = np.full(length, tokens[-1], np.int32)  # pads with end of text
    inputs_S[:used] = tokens[is_input]
    targets_S = np.full(length, IGNORED, np.int32)
    targets_S[:used] = np.where(is_answer, tokens, IGNORED)[is_target]
    starts_S = np.full(length, used, np.int32)
    starts_S[:used] = np.repeat(np.cumsum(lengths_C - 1) - (lengths_C - 1), lengths_C - 1)
    return inputs_S, targets_S, starts_S
