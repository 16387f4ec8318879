"""Slice a dataset into sequences: text into windows of tokens, pairs into one sequence each.

Text: sequence i covers the tokens [start + i·S, start + (i + 1)·S + target_offset). Its first S
tokens are the inputs, its last S the targets.
Pairs: sequence i is pair i, padded. Only the answer's tokens and the end of text are targets.
Mixtures: sequences of several datasets, interleaved by weight.

Axes: B sequences, S tokens of a sequence, P pairs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.dataset import TRAIN, Dataset, Split
from rungs.data.token_file import FileArray

IGNORED = -1
"""A target that does not count in the loss."""
_BLOCK_PAIRS = 1 << 14


class Sequences(Protocol):
    """Sequences by index, each a tuple of the token ids inputs_S and targets_S."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class TextWindows:
    """Consecutive windows of a text's tokens. They do not overlap."""

    def __init__(self, tokens: FileArray, start: int, length: int, target_offset: int) -> None:
        self._tokens, self._start = tokens, start
        self._length, self._target_offset = length, target_offset

    def __len__(self) -> int:
        return max(len(self._tokens) - self._start - self._target_offset, 0) // self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        first = self._start + index * self._length
        window = self._tokens[first : first + self._length + self._target_offset]
        return window[: self._length], window[self._target_offset :]


class PaddedPairs:
    """Pairs of a prompt and an answer, each padded to a sequence of its own."""

    def __init__(self, tokens: FileArray, bounds_P2: FileArray, length: int) -> None:
        self._tokens, self._bounds_P2, self._length = tokens, bounds_P2, length

    def __len__(self) -> int:
        return len(self._bounds_P2)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        *before, (answer, end) = self._bounds_P2[max(index - 1, 0) : index + 1].tolist()
        start = before[0][1] if before else 0
        answer, end = answer - start, end - start
        pair = self._tokens[start : start + end]
        inputs_S = np.full(self._length, pair[-1], np.int32)  # pads with end of text
        inputs_S[: end - 1] = pair[:-1]
        targets_S = np.full(self._length, IGNORED, np.int32)
        first = max(answer, 1)  # without a prompt, the first token has no input that predicts it
        targets_S[first - 1 : end - 1] = pair[first:]
        return inputs_S, targets_S

    def count_longer_than(self, length: int) -> int:
        """Return how many pairs have more than `length` input tokens."""
        count, start = 0, 0
        for first in range(0, len(self), _BLOCK_PAIRS):
            ends_P = self._bounds_P2[first : first + _BLOCK_PAIRS][:, 1]
            count += int((np.diff(ends_P, prepend=start) > length + 1).sum())
            start = int(ends_P[-1])
        return count


def sequences_by_dataset(
    config: RunConfig, datasets: dict[str, Dataset], split: Split
) -> dict[str, Sequences]:
    """Return the sequences of each dataset that has the split."""
    return {
        name: padded_pairs(config, datasets[name], split)
        if datasets[name].description.splits[split].pairs
        else _text_windows(config, datasets[name], split)
        for name in config.train.datasets
        if split in datasets[name].splits
    }


def padded_pairs(config: RunConfig, dataset: Dataset, split: Split) -> PaddedPairs:
    """Return the sequences of a split that holds pairs."""
    bounds_P2 = dataset.pair_bounds(split)
    assert bounds_P2 is not None
    return PaddedPairs(dataset.tokens(split), bounds_P2, config.sequence_length)


def _text_windows(config: RunConfig, dataset: Dataset, split: Split) -> TextWindows:
    start = getattr(config.train, start_key(split))
    length, offset = config.sequence_length, config.train.target_offset
    return TextWindows(dataset.tokens(split), start, length, offset)


def start_key(split: Split) -> str:
    """Return the key of `train.json` that says at which token of a split to start."""
    return "start_train_token" if split == TRAIN else "start_val_token"


def mix(parts: dict[str, Sequences], config: TrainConfig) -> Sequences:
    """Interleave datasets by their weights, up to where the first of them runs out.

    Grain rounds the weights to hundredths of the smallest.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    import grain

    sources = [grain.MapDataset.source(part) for part in parts.values()]
    mixture: Sequences = grain.MapDataset.mix(sources, [config.datasets[name] for name in parts])
    return mixture


def dataset_numbers(parts: dict[str, Sequences], config: TrainConfig, count: int) -> np.ndarray:
    """Return which dataset each of the first sequences of `mix` is from: numbers in the order of
    `parts`."""
    numbers: dict[str, Any] = {
        name: np.full(len(part), number) for number, (name, part) in enumerate(parts.items())
    }
    mixture: Any = mix(numbers, config)
    return np.array([mixture[index] for index in range(count)])


def read(sequences: Sequences, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs_BS and targets_BS of the sequences with these indices."""
    first = sequences[indices[0]]
    shape = (len(indices), len(first[0]))
    inputs_BS, targets_BS = np.empty(shape, np.int32), np.empty(shape, np.int32)
    inputs_BS[0], targets_BS[0] = first
    for row, index in enumerate(indices[1:], 1):
        inputs_BS[row], targets_BS[row] = sequences[index]
    return inputs_BS, targets_BS
