"""The documents of a split as texts, in order and in bounded memory."""

import itertools
from collections.abc import Iterator

import numpy as np

from rungs.common.errors import UserError
from rungs.data.dataset import Dataset, Split
from rungs.data.tokenizer import Tokenizer
from rungs.data.tokenizer_files import load_tokenizer

_BLOCK_TOKENS = 1 << 20
_BLOCK_PAIRS = 1 << 12
_BATCH_DOCUMENTS = 256


def texts_of(dataset: Dataset, split: Split) -> Iterator[str]:
    """Yield the text of each document, or of each pair: the prompt and its answer.

    Raises:
        UserError: the dataset has no tokenizer with an end-of-text token.
    """
    tokenizer = load_tokenizer(dataset.folder) if dataset.tokenizer_file else None
    if tokenizer is None or tokenizer.end_of_text is None:
        raise UserError(
            f"{dataset.folder}: has no tokenizer.json with an end-of-text token, which says where"
            " documents end"
        )
    ids = _pairs(dataset, split) or _documents(dataset, split, tokenizer.end_of_text)
    while batch := list(itertools.islice(ids, _BATCH_DOCUMENTS)):
        yield from _decoded(tokenizer, batch)


def _decoded(tokenizer: Tokenizer, batch: list[np.ndarray]) -> list[str]:
    return tokenizer.decode_batch([ids.tolist() for ids in batch], skip_special_tokens=True)


def _documents(dataset: Dataset, split: Split, end_of_text: int) -> Iterator[np.ndarray]:
    """Yield the token ids of each document that has any."""
    tokens, started = dataset.tokens(split), list[np.ndarray]()
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        *whole, last = np.split(block, np.flatnonzero(block == end_of_text) + 1)
        for part in whole:
            document = np.concatenate([*started, part[:-1]])
            started = []
            if document.size:
                yield document
        started.append(last)
    document = np.concatenate(started)
    if document.size:
        yield document


def _pairs(dataset: Dataset, split: Split) -> Iterator[np.ndarray] | None:
    """Return the token ids of each pair, None if the split holds text."""
    bounds, tokens = dataset.pair_bounds(split), dataset.tokens(split)
    if bounds is None:
        return None

    def pairs() -> Iterator[np.ndarray]:
        start = 0
        for first in range(0, len(bounds), _BLOCK_PAIRS):
            ends = bounds[first : first + _BLOCK_PAIRS][:, 1]
            block = tokens[start : int(ends[-1])]
            yield from np.split(block, ends[:-1] - start)
            start = int(ends[-1])

    return pairs()
