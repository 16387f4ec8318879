"""Batches for training and validation, and checks that a run's config fits its datasets. The batch
of step N depends only on the config and N. A step reads A·B sequences, in the order of the file or
mixture, or shuffled within each epoch; or random windows of the text.

Axes: A microbatches of a step, B sequences of a microbatch, S tokens of a sequence."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Self

import numpy as np

from rungs.common.errors import UserError
from rungs.common.strict_json import format_value
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens import sequences
from rungs.data.tokens.dataset import TRAIN, VALIDATION, Dataset, Split
from rungs.data.tokens.stored_arrays import ArraysOf
from rungs.data.tokens.token_file import AnsweredDocuments

Rows = slice | np.ndarray
"""Indices of the sequences to read from a microbatch."""
ALL_ROWS = slice(None)
_OBJECTIVES_FOR = {
    "preferences": '"dpo", "ipo" or "simpo"',
    "unpaired preferences": '"kto"',
    "no preferences": '"next_token"',
}
_PREFETCH_STEPS = 4
_PREFETCH_THREADS = 2


class Batch(NamedTuple):
    """The sequences of one step; all arrays are int32."""

    inputs_ABS: np.ndarray
    targets_ABS: np.ndarray
    """`sequences.IGNORED` for a target that does not count in the loss."""
    starts_ABS: np.ndarray | None = None
    """Position where each token's document starts, if documents are separate."""


class PreferenceBatch(NamedTuple):
    """The pairs of one step: sequences that alternate between chosen and rejected answers; or, if
    preferences are unpaired, answers and those of other prompts."""

    inputs_ABS: np.ndarray
    targets_ABS: np.ndarray
    starts_ABS: None = None
    reference_ABS: np.ndarray | None = None
    """float32: the reference's log-probability of a sequence's answer at its first token, 0 at the
    others; None without a reference."""
    desirable_ABS: np.ndarray | None = None
    """Of unpaired preferences, see `sequences.UnpairedDocuments`."""


class DistillationBatch(NamedTuple):
    """The sequences of one step with what a teacher predicts; see `objectives.distillation`."""

    inputs_ABS: np.ndarray
    targets_ABS: np.ndarray
    starts_ABS: np.ndarray | None
    log_probs_ABSK: np.ndarray
    tokens_ABSK: np.ndarray | None


def _as_batch(train: TrainConfig, arrays: Sequence[np.ndarray]) -> Batch:
    """Return the arrays of `sequences.read` as a batch, or as a `PreferenceBatch`."""
    inputs, targets, *other = arrays
    if train.learns_preferences:
        return PreferenceBatch(inputs, targets, None, *other)  # type: ignore[return-value]
    return Batch(inputs, targets, *other)


class ValidationBatch(NamedTuple):
    """Sequences to evaluate; arrays as in `Batch`."""

    inputs_BS: np.ndarray
    targets_BS: np.ndarray
    starts_BS: np.ndarray | None
    real_rows: int
    """Rows of the complete batch that count; those after them are padding."""


class _Data:
    _parts: Mapping[str, sequences.Sequences]

    def set_reference(self, log_probs: Mapping[str, np.ndarray]) -> None:
        """Set the reference's log-probability of each answer of each dataset."""
        for name, part in self._parts.items():
            assert isinstance(part, sequences.PairedDocuments)
            part.reference_C = log_probs[name]


class TrainingData(_Data):
    """The training batches of a run. Raises UserError, with one line per reason, if the config and
    the datasets, for training or validation, do not fit together."""

    def __init__(self, config: RunConfig, datasets: dict[str, Dataset]) -> None:
        train = config.train
        self._train, self._length = train, config.sequence_length
        wrong = list(_split_problems(config, datasets, TRAIN))
        self._parts = parts = sequences.sequences_by_dataset(
            config, datasets, TRAIN, is_training=True
        )
        wrong += [*_length_problems(config, parts), *_split_problems(config, datasets, VALIDATION)]
        _raise_if_any(wrong)
        mixture: Any = None if train.phases else sequences.mix(parts, train)
        available = sequences.longest(parts, train) if train.phases else len(mixture)
        self.datasets = datasets
        self.padding = {name: part.padding for name, part in parts.items()}
        """Share of padding tokens, by dataset."""
        self.available_steps_per_epoch = train.steps_of(available)
        self.steps_per_epoch = (
            self.available_steps_per_epoch
            if train.min_train_tokens == -1
            else config.least_steps(train.min_train_tokens)
        )
        """Steps of the first epoch."""
        self.total_steps = train.total_steps(self.steps_per_epoch)
        self.total_tokens = config.tokens_before(self.total_steps)
        """Input tokens of all steps, padding included."""
        self.phases: sequences.PhasedSequences | None = None
        """The order of the sequences, if the mixture changes."""
        self.predictions: ArraysOf | None = None
        """Returns what a teacher predicts: log_probs and, of its most likely tokens, tokens."""
        is_one_pass = bool(train.phases) or train.epochs_differ
        if is_one_pass:
            total = train.sequences_before(self.total_steps)
            mixture = sequences.PhasedSequences(parts, train, total)
            self.phases = mixture if train.phases else None
        self._sequences = mixture
        epoch = train.sequences_before(self.steps_per_epoch)
        self.distinct_sequences = len(mixture) if is_one_pass else epoch
        """How many sequences `read` may be asked for: those of an epoch or, with phases or if
        epochs differ, of all."""
        examples = epoch // train.sequences_per_example
        self._order: Any = range(len(mixture)) if is_one_pass else _order(examples, train)

    def sequences_read(self) -> np.ndarray:
        """Return the sequences of all steps by their index before shuffling, in order; not for
        preferences, whose examples may be pairs of them."""
        count = self._train.sequences_before(self.total_steps)
        if count < self.distinct_sequences and self._train.shuffle:
            return np.sort([self._order[place] for place in range(count)])
        return np.arange(min(count, self.distinct_sequences))

    def dataset_tokens(self, steps: int) -> dict[str, int]:
        """Return the input tokens of each dataset in the first steps; empty without phases."""
        if self.phases is None:
            return {}
        counts = self.phases.counts_before(self._train.sequences_before(steps))
        return {name: count * self._length for name, count in counts.items()}

    def batch(self, step: int, rows: Rows = ALL_ROWS) -> Batch:
        """Return the batch of a step, counted from 0, of preferences a `PreferenceBatch`; raises
        IndexError after the last."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        return self._read(step, rows)

    def batches(self, first_step: int = 0, rows: Rows = ALL_ROWS) -> Iterator[Batch]:
        """Yield the batches from a step to the last, prefetched; of each microbatch only `rows`."""
        import grain

        if first_step < self.total_steps:
            read = functools.partial(self._read, rows=rows)
            yield from _prefetch(grain.MapDataset.range(first_step, self.total_steps).map(read))

    def _read(self, step: int, rows: Rows) -> Batch:
        train, size = self._train, self._train.sequences_per_example
        first, end = (train.sequences_before(each) // size for each in (step, step + 1))
        examples = np.array([self._order[index] for index in range(first, end)])
        indices = examples[:, None] * size + np.arange(size)
        return self.read(indices.reshape(-1, train.microbatch_size)[:, rows])

    def read(self, indices_AB: np.ndarray) -> Batch:
        """Return sequences by their index before shuffling, with what a teacher predicts."""
        batch = self.read_tokens(indices_AB)
        if self.predictions is None:
            return batch
        found = {
            name: array.reshape(*indices_AB.shape, *array.shape[1:])
            for name, array in self.predictions(indices_AB.ravel().tolist()).items()
        }
        tokens = found["tokens"].astype(np.int32) if "tokens" in found else None
        return DistillationBatch(*batch, found["log_probs"], tokens)  # type: ignore[return-value]

    def read_tokens(self, indices_AB: np.ndarray) -> Batch:
        """Like `read`, without what a teacher predicts."""
        arrays = sequences.read(self._sequences, indices_AB.ravel().tolist())
        shaped = [array.reshape(*indices_AB.shape, -1) for array in arrays]
        return _as_batch(self._train, shaped)


class ValidationData(_Data):
    """The validation batches of a run, always the same ones. Create it with `of`."""

    def __init__(
        self, config: RunConfig, datasets: dict[str, Dataset], split: Split = VALIDATION
    ) -> None:
        length, train = config.sequence_length, config.train
        self._train, self.batch_size = train, train.microbatch_size
        self._parts = parts = sequences.sequences_by_dataset(config, datasets, split)
        self._sequences = sequences.mix(parts, train)
        size = train.sequences_per_example
        wanted = -(-train.validation_tokens // (length * size)) * size
        self.sequences = min(wanted, len(self._sequences))
        """Sequences in one validation."""
        self.tokens = self.sequences * length
        """Input tokens of one validation, padding included."""
        self.datasets = list(parts)
        """Names of the datasets with a validation split."""
        self.dataset_numbers = sequences.dataset_numbers(parts, train, self.sequences)
        """Index into `datasets` for each sequence."""

    @classmethod
    def of(cls, config: RunConfig, datasets: dict[str, Dataset]) -> Self | None:
        """Return the validation batches, or None if no dataset has a validation split. Raises
        UserError, with one line per reason, if the config and a validation split do not fit."""
        _raise_if_any(list(_split_problems(config, datasets, VALIDATION)))
        if not any(VALIDATION in datasets[name].splits for name in config.train.datasets):
            return None
        return cls(config, datasets)

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.sequences // self.batch_size)

    def batches(self, rows: Rows = ALL_ROWS) -> Iterator[ValidationBatch]:
        """Yield the batches, prefetched by threads; of each only the sequences `rows`. The last
        batch is padded by repeating its rows."""
        import grain

        read = functools.partial(self._read, rows=rows)
        yield from _prefetch(grain.MapDataset.range(len(self)).map(read))

    def count_bytes(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """Return the number of targets that count, and their size in bytes of text."""
        rows = [
            row[row != sequences.IGNORED]
            for batch in self.batches()
            for row in batch.targets_BS[: batch.real_rows]
        ]
        return sum(map(len, rows)), sum(map(tokenizer.byte_count, rows))

    def _read(self, number: int, rows: Rows) -> ValidationBatch:
        first = number * self.batch_size
        real_rows = min(self.batch_size, self.sequences - first)
        indices = first + np.arange(self.batch_size)[rows] % real_rows
        arrays = sequences.read(self._sequences, indices.tolist())
        batch = _as_batch(self._train, arrays)
        return ValidationBatch(batch.inputs_ABS, batch.targets_ABS, batch.starts_ABS, real_rows)

    def answers(self) -> list[np.ndarray]:
        """Return the reference's log-probability of each sequence, 0 if it is not set, and of
        unpaired preferences whether each is desirable."""
        arrays = sequences.read(self._sequences, range(self.sequences))
        return [array.sum(axis=-1) for array in arrays[2:]] or [np.zeros(self.sequences)]


class ValidationSets(NamedTuple):
    """The validation data of a run."""

    own: ValidationData | None
    """Validation splits of the datasets that it trains on; None if there are none."""
    others: dict[str, ValidationData]
    """Validation splits of the datasets that `validation_datasets` names."""

    @classmethod
    def of(
        cls, config: RunConfig, datasets: dict[str, Dataset], others: dict[str, Dataset]
    ) -> Self:
        """Return the validation data. Errors as in `ValidationData.of`, and a UserError if one of
        `others` has no validation split."""
        key = f"{TRAIN_FILE}: validation_datasets"
        lacking = [name for name in others if VALIDATION not in others[name].splits]
        _raise_if_any([f"{key}: {name} has no validation split; leave it out" for name in lacking])
        data = {}
        for name, dataset in others.items():
            train = config.train.model_copy(update={"dataset": name, "start_val_token": 0})
            found = ValidationData.of(config._replace(train=train), {name: dataset})
            assert found is not None
            data[name] = found
        return cls(ValidationData.of(config, datasets), data)

    def __bool__(self) -> bool:
        return self.own is not None or bool(self.others)


def _raise_if_any(lines: list[str]) -> None:
    if lines:
        raise UserError("\n".join(lines))


def _order(count: int, config: TrainConfig) -> Any:
    """Return a `grain.MapDataset` of sequence indices in training order, over all epochs. Not of
    the mixture, whose second epoch would continue with sequences that the first did not have."""
    import grain

    indices = grain.MapDataset.range(count)
    if config.shuffle:
        indices = indices.seed(config.seed).shuffle()
    return indices.repeat(config.epochs)


def _prefetch(batches: Any) -> Iterator[Any]:
    """Yield the elements of a `grain.MapDataset` in order while threads read the next ones."""
    import grain

    options = grain.ReadOptions(_PREFETCH_THREADS, _PREFETCH_STEPS)
    with closing(iter(batches.to_iter_dataset(options))) as iterator:
        yield from iterator


def _split_problems(config: RunConfig, datasets: dict[str, Dataset], split: Split) -> Iterator[str]:
    """Yield one line per reason why the config does not fit the split of a dataset."""
    train, vocab_size, masks = config.train, config.model.vocab_size, config.model.bidirectional
    for name in train.datasets:
        if split not in datasets[name].splits:
            continue
        description = datasets[name].description.splits[split]
        where = f"{split} split of dataset {name}"
        if (largest := description.largest_token_id) >= vocab_size - masks:
            yield (
                f"{MODEL_FILE}: vocab_size: {vocab_size} is too small for the token id {largest} in"
                f" the {where}; at least {largest + 1 + masks}" + ", with the mask" * masks
            )
        holds = description.pairs.preferences if description.pairs else "no preferences"
        if train.preferences != holds:
            yield (
                f'{TRAIN_FILE}: objective: "{train.objective}", but dataset {name} holds {holds};'
                f" use {_OBJECTIVES_FOR[holds]}, or another dataset"
            )
        elif description.pairs:
            yield from _pairs_problems(config, datasets[name], split, where)
        else:
            yield from _text_problems(config, description.tokens, split, where)


def _text_problems(config: RunConfig, tokens: int, split: Split, where: str) -> Iterator[str]:
    """Check that a text has at least one sequence."""
    key, length, train = sequences.start_key(split), config.sequence_length, config.train
    start, needed = getattr(train, key), length + train.target_offset
    if tokens < needed:
        yield (
            f"{_length_key(train)}: {length} is too long for the {where}, which has {tokens}"
            f" tokens; at most {tokens - train.target_offset}"
        )
    elif start + needed > tokens:
        yield (
            f"{TRAIN_FILE}: {key}: {start} leaves no complete sequence in the {where}, which has"
            f" {tokens} tokens; at most {tokens - needed}"
        )


def _pairs_problems(config: RunConfig, dataset: Dataset, split: Split, where: str) -> Iterator[str]:
    """Check that no key is for text only, and that the longest pair fits into a sequence."""
    train, length = config.train, config.sequence_length
    needs: dict[str, Any] = {"target_offset": 1, sequences.start_key(split): 0}
    if split == TRAIN:
        needs |= {"windows": "consecutive", "shuffle": train.shuffle is not False}
    for key, needed in needs.items():
        if (value := getattr(train, key)) != needed:
            yield (
                f"{TRAIN_FILE}: {key}: {format_value(value)} is for text only; the {where} holds"
                f" pairs, which need {format_value(needed)}"
            )
    pairs = dataset.description.splits[split].pairs
    assert pairs is not None
    if (longest := pairs.longest_tokens - 1) > length:
        lengths_C = AnsweredDocuments(dataset.token_path(split)).lengths_C
        count = int((lengths_C > length + 1).sum())
        can_be_raised = train.sequence_length is None or longest <= config.model.context_length
        yield (
            f"{_length_key(train)}: {length} is too short for {count:,} of the {pairs.pairs:,}"
            f" pairs in the {where} (the longest has {pairs.longest_tokens:,} tokens);"
            + (f" raise it to {longest} or" if can_be_raised else "")
            + " remove them"
        )


def _length_key(config: TrainConfig) -> str:
    if config.sequence_length is None:
        return f"{MODEL_FILE}: context_length"
    return f"{TRAIN_FILE}: sequence_length"


def _length_problems(config: RunConfig, parts: dict[str, sequences.Sequences]) -> Iterator[str]:
    """Check that there are enough training sequences, if the other checks allow counting them."""
    train, minimum = config.train, config.train.min_train_tokens
    if not all(map(len, parts.values())):
        return
    count = sequences.longest(parts, train) if train.phases else len(sequences.mix(parts, train))
    available = f"there are {count} sequences of {config.sequence_length} tokens"
    if len(train.datasets) > 1:
        available += " until the first dataset of the mixture runs out"
    if train.start_train_token:
        available += f", starting at token {train.start_train_token}"
    steps = train.steps_of(count)
    if not steps:
        yield (
            f"{TRAIN_FILE}: microbatch_size: {train.microbatch_size} ×"
            f" gradient_accumulation_steps {train.gradient_accumulation_steps} is more than one"
            f" epoch has: {available}; at most {count} per step"
        )
    elif minimum > (most := config.tokens_before(steps)):
        more = " and more" * bool(train.batch_growth)
        yield (
            f"{TRAIN_FILE}: min_train_tokens: {minimum} needs {config.least_steps(minimum)} steps"
            f" of {config.tokens_per_step} tokens{more}, but one epoch has {steps}: {available}; at"
            f" most {most}, or -1 for all"
        )
