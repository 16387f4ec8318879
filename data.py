"""From datasets to batches: the batch of step N is a pure function of (config, N).

Sequence i of a dataset covers the tokens [start + i·S, start + (i + 1)·S + target_offset): its
first S are the inputs, its last S the targets. A step takes A·B sequences, in the order of the
file or of the mixture, or shuffled within each epoch. Axes: A microbatches of a step, B sequences
of a microbatch, S tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from config import MODEL_FILE, TRAIN_FILE
from dataset_folder import TRAIN, VALIDATION, Dataset, Split
from errors import UserError
from model_config import ModelConfig
from train_config import TrainConfig

_READ_AHEAD_STEPS = 4
_READ_AHEAD_THREADS = 2
_MOST_UNEQUAL_WEIGHTS = 1e6


class Batch(NamedTuple):
    """The sequences of one step."""

    inputs_ABS: np.ndarray
    """int32"""
    targets_ABS: np.ndarray
    """int32"""


class ValidationBatch(NamedTuple):
    """Sequences to evaluate on."""

    inputs_BS: np.ndarray
    """int32"""
    targets_BS: np.ndarray
    """int32"""
    real_rows: int
    """How many rows count; those after them only fill the batch."""


class _Sequences(Protocol):
    """Sequences by number, each an array of S + target_offset token ids."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> np.ndarray: ...


class _Windows:
    """Sequences that follow one another in a token file, without overlap."""

    def __init__(self, tokens: np.ndarray, start: int, length: int, target_offset: int) -> None:
        self._tokens, self._start = tokens, start
        self._length, self._target_offset = length, target_offset

    def __len__(self) -> int:
        return max(len(self._tokens) - self._start - self._target_offset, 0) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        first = self._start + index * self._length
        return self._tokens[first : first + self._length + self._target_offset]


class TrainingData:
    """The training batches of a run.

    Raises:
        UserError: a line for each reason why the config and the datasets do not go together, in
            training or validation.
    """

    def __init__(
        self, config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset]
    ) -> None:
        _raise_all(problems(config, model, datasets))
        self._shape = (config.gradient_accumulation_steps, config.microbatch_size)
        self._target_offset = config.target_offset
        self._sequences = _mixed(_windows(config, model, datasets, TRAIN), config)
        self.tokens_per_step = config.sequences_per_step * model.context_length
        """Input tokens of one step."""
        self.steps_per_epoch = (
            len(self._sequences) // config.sequences_per_step
            if config.min_train_tokens == -1
            else -(-config.min_train_tokens // self.tokens_per_step)
        )
        self.total_steps = self.steps_per_epoch * config.epochs
        order = _order(self.steps_per_epoch * config.sequences_per_step, config)
        self._steps = order.batch(config.sequences_per_step, batch_fn=list).map(self._read)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0; raises IndexError beyond the last."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is not among the {self.total_steps}")
        batch: Batch = self._steps[step]
        return batch

    def batches(self, first_step: int = 0) -> Iterator[Batch]:
        """The batches from a step to the last, read ahead by threads."""
        if first_step < self.total_steps:
            yield from _read_ahead(self._steps[first_step:])

    def _read(self, indices: list[int]) -> Batch:
        rows = _gather(self._sequences, indices)
        inputs, targets = _inputs_and_targets(rows, self._target_offset)
        return Batch(inputs.reshape(*self._shape, -1), targets.reshape(*self._shape, -1))


class ValidationData:
    """The validation batches of a run, the same each time; `of` makes it."""

    def __init__(
        self, config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset]
    ) -> None:
        self._batch_size = config.microbatch_size
        self._target_offset = config.target_offset
        self._sequences = _mixed(_windows(config, model, datasets, VALIDATION), config)
        wanted = -(-config.validation_tokens // model.context_length)
        self.sequences = min(wanted, len(self._sequences))
        """Sequences in one validation."""
        self.tokens = self.sequences * model.context_length
        """Input tokens of one validation."""

    @classmethod
    def of(
        cls, config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset]
    ) -> Self | None:
        """The validation batches; nothing where no dataset has a validation split.

        Raises:
            UserError: a line for each reason why config and validation splits do not go together.
        """
        _raise_all(_split_problems(config, model, datasets, VALIDATION))
        if not any(VALIDATION in datasets[name].splits for name in config.datasets):
            return None
        return cls(config, model, datasets)

    def __len__(self) -> int:
        """How many batches there are."""
        return -(-self.sequences // self._batch_size)

    def batches(self) -> Iterator[ValidationBatch]:
        """The batches, read ahead by threads; the last is filled up by repeating its rows."""
        import grain

        batches = grain.MapDataset.range(len(self)).map(self._read)
        yield from _read_ahead(batches)

    def _read(self, number: int) -> ValidationBatch:
        first = number * self._batch_size
        real_rows = min(self._batch_size, self.sequences - first)
        indices = [first + row % real_rows for row in range(self._batch_size)]
        rows = _gather(self._sequences, indices)
        return ValidationBatch(*_inputs_and_targets(rows, self._target_offset), real_rows)


def problems(config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset]) -> list[str]:
    """A line for each reason why a config and its datasets do not go together."""
    return [
        *_weight_problems(config),
        *_split_problems(config, model, datasets, TRAIN),
        *_length_problems(config, model, datasets),
        *_split_problems(config, model, datasets, VALIDATION),
    ]


def _raise_all(lines: list[str]) -> None:
    if lines:
        raise UserError("\n".join(lines))


def _weight_problems(config: TrainConfig) -> list[str]:
    weights = config.datasets.values()
    if max(weights) / min(weights) > _MOST_UNEQUAL_WEIGHTS:
        return [f"{TRAIN_FILE}: dataset: the weights differ by more than a million times"]
    return []


def _split_problems(
    config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset], split: Split
) -> list[str]:
    """What is wrong with each dataset's split by itself."""
    lines = []
    key = _start_key(split)
    start = getattr(config, key)
    needed = model.context_length + config.target_offset
    for name in config.datasets:
        if split not in datasets[name].splits:
            continue
        found = datasets[name].description.splits[split]
        what = f"{split} split of dataset {name}"
        if found.largest_token_id >= model.vocab_size:
            lines.append(
                f"{MODEL_FILE}: vocab_size: {model.vocab_size} is too small for the token id"
                f" {found.largest_token_id} in the {what}; at least {found.largest_token_id + 1}"
            )
        if found.tokens < needed:
            lines.append(
                f"{MODEL_FILE}: context_length: {model.context_length} is too long for the {what},"
                f" of {found.tokens} tokens; at most {found.tokens - config.target_offset}"
            )
        elif start + needed > found.tokens:
            lines.append(
                f"{TRAIN_FILE}: {key}: {start} leaves no whole sequence of the {what}, of"
                f" {found.tokens} tokens; at most {found.tokens - needed}"
            )
    return lines


def _length_problems(
    config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset]
) -> list[str]:
    """Whether the training tokens are enough, where that can be told."""
    windows = _windows(config, model, datasets, TRAIN)
    if not all(map(len, windows.values())) or _weight_problems(config):
        return []
    sequences = len(_mixed(windows, config))
    room_steps = sequences // config.sequences_per_step
    step_tokens = config.sequences_per_step * model.context_length
    there = f"there are {sequences} sequences of {model.context_length} tokens"
    if len(config.datasets) > 1:
        there += " until the first dataset of the mixture runs out"
    if config.start_train_token:
        there += f" from token {config.start_train_token} on"
    if not room_steps:
        return [
            f"{TRAIN_FILE}: microbatch_size: {config.microbatch_size} ×"
            f" gradient_accumulation_steps {config.gradient_accumulation_steps} is more than one"
            f" epoch has: {there}; at most {sequences} in a step"
        ]
    if config.min_train_tokens > room_steps * step_tokens:
        needed_steps = -(-config.min_train_tokens // step_tokens)
        return [
            f"{TRAIN_FILE}: min_train_tokens: {config.min_train_tokens} are {needed_steps} steps of"
            f" {step_tokens} tokens, but there is room for {room_steps}: {there}; at most"
            f" {room_steps * step_tokens}, or -1 for all"
        ]
    return []


def _start_key(split: Split) -> str:
    return "start_train_token" if split == TRAIN else "start_val_token"


def _windows(
    config: TrainConfig, model: ModelConfig, datasets: dict[str, Dataset], split: Split
) -> dict[str, _Windows]:
    """The sequences of each dataset that has the split."""
    start = getattr(config, _start_key(split))
    return {
        name: _Windows(
            datasets[name].tokens(split), start, model.context_length, config.target_offset
        )
        for name in config.datasets
        if split in datasets[name].splits
    }


def _mixed(windows: dict[str, _Windows], config: TrainConfig) -> _Sequences:
    """One row of sequences, until a component of the mixture would run out. Grain rounds the
    weights to hundredths of the smallest."""
    if len(windows) == 1:
        return next(iter(windows.values()))
    import grain

    sources = [grain.MapDataset.source(part) for part in windows.values()]
    mixed: _Sequences = grain.MapDataset.mix(sources, [config.datasets[name] for name in windows])
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


def _gather(sequences: _Sequences, indices: Sequence[int]) -> np.ndarray:
    """The sequences of these numbers, one below the other."""
    first = sequences[indices[0]]
    rows = np.empty((len(indices), len(first)), np.int32)
    rows[0] = first
    for row, index in zip(rows[1:], indices[1:], strict=True):
        row[:] = sequences[index]
    return rows


def _inputs_and_targets(rows: np.ndarray, target_offset: int) -> tuple[np.ndarray, np.ndarray]:
    length = rows.shape[1] - target_offset
    return np.ascontiguousarray(rows[:, :length]), np.ascontiguousarray(rows[:, target_offset:])


def _read_ahead(batches: Any) -> Iterator[Any]:
    """Read a `grain.MapDataset` in order, the next elements while one is in use."""
    import grain

    options = grain.ReadOptions(_READ_AHEAD_THREADS, _READ_AHEAD_STEPS)
    with closing(iter(batches.to_iter_dataset(options))) as iterator:
        yield from iterator
