"""From datasets to batches: the batch of step N is a pure function of (config, N).

Sequence i of a dataset of text covers the tokens [start + i·S, start + (i + 1)·S + target_offset):
its first S are the inputs, its last S the targets. Of a dataset of pairs it is the pair i by
itself, filled up, and only the answer's tokens and the end of text after them are targets. A step
takes A·B sequences, in the order of the file or of the mixture, or shuffled within each epoch.
Axes: A microbatches of a step, B sequences of a microbatch, S tokens of a sequence, P pairs.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from rungs.common.errors import UserError
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.dataset import TRAIN, VALIDATION, Dataset, Split
from rungs.data.token_file import FileArray

IGNORED = -1
"""A target that does not count in the loss."""
Rows = slice | np.ndarray
"""Some of a microbatch's sequences: all, or those of the numbers in an array."""
ALL_ROWS = slice(None)
_READ_AHEAD_STEPS = 4
_READ_AHEAD_THREADS = 2
_MOST_UNEQUAL_WEIGHTS = 1e6
_BLOCK_PAIRS = 1 << 14


class Batch(NamedTuple):
    """The sequences of one step."""

    inputs_ABS: np.ndarray
    """int32"""
    targets_ABS: np.ndarray
    """int32; `IGNORED` where none counts"""


class ValidationBatch(NamedTuple):
    """Sequences to evaluate on."""

    inputs_BS: np.ndarray
    """int32"""
    targets_BS: np.ndarray
    """int32; `IGNORED` where none counts"""
    real_rows: int
    """How many rows of the whole batch count; those after them only fill it."""


class _Sequences(Protocol):
    """Sequences by number, each the token ids inputs_S and targets_S."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class _Windows:
    """Sequences that follow one another in a token file, without overlap."""

    def __init__(self, tokens: FileArray, start: int, length: int, target_offset: int) -> None:
        self._tokens, self._start = tokens, start
        self._length, self._target_offset = length, target_offset

    def __len__(self) -> int:
        return max(len(self._tokens) - self._start - self._target_offset, 0) // self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        first = self._start + index * self._length
        read = self._tokens[first : first + self._length + self._target_offset]
        return read[: self._length], read[self._target_offset :]


class _Pairs:
    """Prompts with their answers, each a sequence of its own."""

    def __init__(self, tokens: FileArray, bounds_P2: FileArray, length: int) -> None:
        self._tokens, self._bounds_P2, self._length = tokens, bounds_P2, length

    def __len__(self) -> int:
        return len(self._bounds_P2)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        *before, (answer, end) = self._bounds_P2[max(index - 1, 0) : index + 1].tolist()
        start = before[0][1] if before else 0
        answer, end = answer - start, end - start
        pair = self._tokens[start : start + end]
        inputs_S = np.full(self._length, pair[-1], np.int32)  # filled up with its end of text
        inputs_S[: end - 1] = pair[:-1]
        targets_S = np.full(self._length, IGNORED, np.int32)
        first = max(answer, 1)  # of a pair without a prompt, nothing foretells the first token
        targets_S[first - 1 : end - 1] = pair[first:]
        return inputs_S, targets_S

    def longer_than(self, length: int) -> int:
        """How many pairs have more than `length` inputs."""
        count, start = 0, 0
        for first in range(0, len(self), _BLOCK_PAIRS):
            ends_P = self._bounds_P2[first : first + _BLOCK_PAIRS][:, 1]
            count += int((np.diff(ends_P, prepend=start) > length + 1).sum())
            start = int(ends_P[-1])
        return count


class TrainingData:
    """The training batches of a run.

    Raises:
        UserError: a line for each reason why the config and the datasets do not go together, in
            training or validation.
    """

    def __init__(self, config: RunConfig, datasets: dict[str, Dataset]) -> None:
        _raise_all(problems(config, datasets))
        train = config.train
        self._shape = (train.gradient_accumulation_steps, train.microbatch_size)
        self._sequences = _mixed(_sequences(config, datasets, TRAIN), train)
        self.tokens_per_step = config.tokens_per_step
        self.steps_per_epoch = (
            len(self._sequences) // train.sequences_per_step
            if train.min_train_tokens == -1
            else -(-train.min_train_tokens // self.tokens_per_step)
        )
        self.total_steps = self.steps_per_epoch * train.epochs
        order = _order(self.steps_per_epoch * train.sequences_per_step, train)
        self._steps = order.batch(train.sequences_per_step, batch_fn=np.array)

    def batch(self, step: int, rows: Rows = ALL_ROWS) -> Batch:
        """The batch of a step, counted from 0; raises IndexError beyond the last."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is not among the {self.total_steps}")
        return self._read(self._steps[step], rows)

    def batches(self, first_step: int = 0, rows: Rows = ALL_ROWS) -> Iterator[Batch]:
        """The batches from a step to the last, read ahead by threads.

        Args:
            rows: sequences of each microbatch that are wanted here; the others are not read.
        """
        if first_step < self.total_steps:
            read = functools.partial(self._read, rows=rows)
            yield from _read_ahead(self._steps[first_step:].map(read))

    def _read(self, indices: np.ndarray, rows: Rows) -> Batch:
        indices_AB = indices.reshape(self._shape)[:, rows]
        inputs, targets = _gather(self._sequences, indices_AB.ravel().tolist())
        shape = (*indices_AB.shape, -1)
        return Batch(inputs.reshape(shape), targets.reshape(shape))


class ValidationData:
    """The validation batches of a run, the same each time; `of` makes it."""

    def __init__(self, config: RunConfig, datasets: dict[str, Dataset]) -> None:
        length, train = config.sequence_length, config.train
        self.batch_size = train.microbatch_size
        self._sequences = _mixed(_sequences(config, datasets, VALIDATION), train)
        wanted = -(-train.validation_tokens // length)
        self.sequences = min(wanted, len(self._sequences))
        """Sequences in one validation."""
        self.tokens = self.sequences * length
        """Input tokens of one validation, what pairs are filled up with among them."""

    @classmethod
    def of(cls, config: RunConfig, datasets: dict[str, Dataset]) -> Self | None:
        """The validation batches; nothing where no dataset has a validation split.

        Raises:
            UserError: a line for each reason why config and validation splits do not go together.
        """
        _raise_all(_split_problems(config, datasets, VALIDATION))
        if not any(VALIDATION in datasets[name].splits for name in config.train.datasets):
            return None
        return cls(config, datasets)

    def __len__(self) -> int:
        """How many batches there are."""
        return -(-self.sequences // self.batch_size)

    def batches(self, rows: Rows = ALL_ROWS) -> Iterator[ValidationBatch]:
        """The batches, read ahead by threads; the last is filled up by repeating its rows.

        Args:
            rows: sequences of each batch that are wanted here; the others are not read.
        """
        import grain

        read = functools.partial(self._read, rows=rows)
        yield from _read_ahead(grain.MapDataset.range(len(self)).map(read))

    def _read(self, number: int, rows: Rows) -> ValidationBatch:
        first = number * self.batch_size
        real_rows = min(self.batch_size, self.sequences - first)
        indices = first + np.arange(self.batch_size)[rows] % real_rows
        return ValidationBatch(*_gather(self._sequences, indices.tolist()), real_rows)


def problems(config: RunConfig, datasets: dict[str, Dataset]) -> list[str]:
    """A line for each reason why a config and its datasets do not go together."""
    return [
        *_weight_problems(config.train),
        *_split_problems(config, datasets, TRAIN),
        *_length_problems(config, datasets),
        *_split_problems(config, datasets, VALIDATION),
    ]


def _raise_all(lines: list[str]) -> None:
    if lines:
        raise UserError("\n".join(lines))


def _weight_problems(config: TrainConfig) -> list[str]:
    weights = config.datasets.values()
    if max(weights) / min(weights) > _MOST_UNEQUAL_WEIGHTS:
        return [f"{TRAIN_FILE}: dataset: the weights differ by more than a million times"]
    return []


def _split_problems(config: RunConfig, datasets: dict[str, Dataset], split: Split) -> list[str]:
    """What is wrong with each dataset's split by itself."""
    lines, model = [], config.model
    for name in config.train.datasets:
        if split not in datasets[name].splits:
            continue
        found = datasets[name].description.splits[split]
        what = f"{split} split of dataset {name}"
        if found.largest_token_id >= model.vocab_size:
            lines.append(
                f"{MODEL_FILE}: vocab_size: {model.vocab_size} is too small for the token id"
                f" {found.largest_token_id} in the {what}; at least {found.largest_token_id + 1}"
            )
        if found.pairs:
            lines += _pairs_problems(config, datasets[name], split, what)
        else:
            lines += _text_problems(config, found.tokens, split, what)
    return lines


def _text_problems(config: RunConfig, tokens: int, split: Split, what: str) -> list[str]:
    """Whether a text has room for a sequence."""
    key, length, train = _start_key(split), config.sequence_length, config.train
    start = getattr(train, key)
    needed = length + train.target_offset
    if tokens < needed:
        return [
            f"{_length_key(train)}: {length} is too long for the {what}, of {tokens} tokens; at"
            f" most {tokens - train.target_offset}"
        ]
    if start + needed > tokens:
        return [
            f"{TRAIN_FILE}: {key}: {start} leaves no whole sequence of the {what}, of {tokens}"
            f" tokens; at most {tokens - needed}"
        ]
    return []


def _pairs_problems(config: RunConfig, dataset: Dataset, split: Split, what: str) -> list[str]:
    """Whether pairs can be trained on, and each has room in a sequence."""
    lines, train = [], config.train
    key, length = _start_key(split), config.sequence_length
    if train.target_offset != 1:
        lines.append(
            f"{TRAIN_FILE}: target_offset: {train.target_offset} is for text only; the {what}"
            " holds pairs, which need 1"
        )
    if start := getattr(train, key):
        lines.append(
            f"{TRAIN_FILE}: {key}: {start} is for text only; the {what} holds pairs, which need 0"
        )
    pairs = dataset.description.splits[split].pairs
    assert pairs is not None
    needed = pairs.longest_tokens - 1
    if needed > length:
        count = _pairs(config, dataset, split).longer_than(length)
        is_possible = train.sequence_length is None or needed <= config.model.context_length
        lines.append(
            f"{_length_key(train)}: {length} is too short for {count:,} of the {pairs.pairs:,}"
            f" pairs in the {what} (the longest has {pairs.longest_tokens:,} tokens);"
            + (f" raise it to {needed} or" if is_possible else "")
            + " remove them"
        )
    return lines


def _length_key(config: TrainConfig) -> str:
    """File and key that say how long a sequence is."""
    if config.sequence_length is None:
        return f"{MODEL_FILE}: context_length"
    return f"{TRAIN_FILE}: sequence_length"


def _length_problems(config: RunConfig, datasets: dict[str, Dataset]) -> list[str]:
    """Whether the training tokens are enough, where that can be told."""
    train, length, step_tokens = config.train, config.sequence_length, config.tokens_per_step
    parts = _sequences(config, datasets, TRAIN)
    if not all(map(len, parts.values())) or _weight_problems(train):
        return []
    sequences = len(_mixed(parts, train))
    room_steps = sequences // train.sequences_per_step
    there = f"there are {sequences} sequences of {length} tokens"
    if len(train.datasets) > 1:
        there += " until the first dataset of the mixture runs out"
    if train.start_train_token:
        there += f" from token {train.start_train_token} on"
    if not room_steps:
        return [
            f"{TRAIN_FILE}: microbatch_size: {train.microbatch_size} ×"
            f" gradient_accumulation_steps {train.gradient_accumulation_steps} is more than one"
            f" epoch has: {there}; at most {sequences} in a step"
        ]
    if train.min_train_tokens > room_steps * step_tokens:
        needed_steps = -(-train.min_train_tokens // step_tokens)
        return [
            f"{TRAIN_FILE}: min_train_tokens: {train.min_train_tokens} are {needed_steps} steps of"
            f" {step_tokens} tokens, but there is room for {room_steps}: {there}; at most"
            f" {room_steps * step_tokens}, or -1 for all"
        ]
    return []


def _start_key(split: Split) -> str:
    return "start_train_token" if split == TRAIN else "start_val_token"


def _sequences(
    config: RunConfig, datasets: dict[str, Dataset], split: Split
) -> dict[str, _Sequences]:
    """The sequences of each dataset that has the split."""
    return {
        name: _pairs(config, datasets[name], split)
        if datasets[name].description.splits[split].pairs
        else _windows(config, datasets[name], split)
        for name in config.train.datasets
        if split in datasets[name].splits
    }


def _windows(config: RunConfig, dataset: Dataset, split: Split) -> _Windows:
    start = getattr(config.train, _start_key(split))
    length, offset = config.sequence_length, config.train.target_offset
    return _Windows(dataset.tokens(split), start, length, offset)


def _pairs(config: RunConfig, dataset: Dataset, split: Split) -> _Pairs:
    bounds_P2 = dataset.pair_bounds(split)
    assert bounds_P2 is not None
    return _Pairs(dataset.tokens(split), bounds_P2, config.sequence_length)


def _mixed(parts: dict[str, _Sequences], config: TrainConfig) -> _Sequences:
    """One row of sequences, until a component of the mixture would run out. Grain rounds the
    weights to hundredths of the smallest."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    import grain

    sources = [grain.MapDataset.source(part) for part in parts.values()]
    mixed: _Sequences = grain.MapDataset.mix(sources, [config.datasets[name] for name in parts])
    return mixed


def _order(sequences: int, config: TrainConfig) -> Any:
    """Numbers of the sequences of all epochs, in the order of training: a `grain.MapDataset`.

    It shuffles numbers, not sequences: the second epoch of a shuffled mixture would otherwise
    count on from the first, into sequences that the first did not have.
    """
    import grain

    numbers = grain.MapDataset.range(sequences)
    if config.shuffle:
        numbers = numbers.seed(config.seed).shuffle()
    return numbers.repeat(config.epochs)


def _gather(sequences: _Sequences, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the targets of the sequences of these numbers, one below the other."""
    first = sequences[indices[0]]
    shape = (len(indices), len(first[0]))
    inputs_BS, targets_BS = np.empty(shape, np.int32), np.empty(shape, np.int32)
    inputs_BS[0], targets_BS[0] = first
    for row, index in enumerate(indices[1:], 1):
        inputs_BS[row], targets_BS[row] = sequences[index]
    return inputs_BS, targets_BS


def _read_ahead(batches: Any) -> Iterator[Any]:
    """Read a `grain.MapDataset` in order, the next elements while one is in use."""
    import grain

    options = grain.ReadOptions(_READ_AHEAD_THREADS, _READ_AHEAD_STEPS)
    with closing(iter(batches.to_iter_dataset(options))) as iterator:
        yield from iterator
