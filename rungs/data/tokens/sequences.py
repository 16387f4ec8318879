"""Slice datasets into sequences (text into windows of tokens, pairs and chats by document), and mix
datasets by weight. The two answers of a preference are two sequences that stay together; so are an
answer that is desirable or not, and another one to its prompt.

Axes: B sequences, S tokens of a sequence, C documents."""

import bisect
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rungs.common.errors import UserError, errors_at
from rungs.config.run_config import TRAIN_FILE, RunConfig
from rungs.config.train_config import Phase, TrainConfig
from rungs.data.build.sections import stable_hash
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import TRAIN, Dataset, Split
from rungs.data.tokens.packing import best_fit, in_order
from rungs.data.tokens.token_file import AnsweredDocuments, FileArray, Texts

_BLOCK_TOKENS = 1 << 20
IGNORED = -1
"""A target that does not count in the loss."""


class Sequences(Protocol):
    """Sequences by index, each a tuple of token ids inputs_S, targets_S and, if documents are
    separate, starts_S, the position where each token's document starts."""

    @property
    def padding(self) -> float:
        """Share of tokens that are padding."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]: ...


class TextWindows:
    """Consecutive, non-overlapping windows of a text's tokens.

    Window i covers the tokens [start + i·S, start + (i + 1)·S + target_offset): its first S tokens
    are inputs, its last S targets. If texts begin with special tokens, these replace the first
    inputs, as the model expects them. `separator` is the token that begins each document but the
    first, if documents are separate; `texts` has the tokens that begin and end texts."""

    padding = 0.0

    def __init__(
        self,
        tokens: FileArray,
        start: int,
        length: int,
        target_offset: int,
        separator: int | None = None,
        texts: Texts | None = None,
    ) -> None:
        self._tokens, self._start, self._separator = tokens, start, separator
        self._texts = texts if texts and texts.begin and target_offset else None
        self._length, self._target_offset = length, target_offset

    def __len__(self) -> int:
        return max(len(self._tokens) - self._start - self._target_offset, 0) // self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        window = self._window(index)
        size, offset = len(window) - self._target_offset, self._target_offset
        inputs_S, targets_S = window[:size], window[offset:]
        if self._texts:
            inputs_S, targets_S = _with_begin(inputs_S, targets_S, self._texts)
        if self._separator is None:
            return inputs_S, targets_S
        starts_S = np.where(inputs_S == self._separator, np.arange(self._length), 0)
        return inputs_S, targets_S, np.maximum.accumulate(starts_S)

    def _window(self, index: int) -> np.ndarray:
        """Return the tokens of a window."""
        first = self._start + self._offset(index)
        return self._tokens[first : first + self._length + self._target_offset]

    def _offset(self, index: int) -> int:
        """Return the first token of a window, counted from the start."""
        return index * self._length


class RandomWindows(TextWindows):
    """Windows of a text's tokens that start at random ones, all equally likely. Window i depends on
    `key` and i, which may be beyond the length: that is the number of consecutive windows."""

    def __init__(self, *text: Any, key: str) -> None:
        super().__init__(*text)
        self._key = key

    def _offset(self, index: int) -> int:
        offsets = len(self._tokens) - self._start - self._target_offset - self._length + 1
        return stable_hash(f"{self._key} {index}") * offsets >> 64


class ShuffledDocuments(TextWindows):
    """Windows of a text whose documents are in another order each time it is read. Windows beyond
    the length are of the next times; each depends on `key` and its index. A document starts at each
    `boundary`, or the token `after` it."""

    def __init__(self, *text: Any, boundary: int, after: bool, key: str) -> None:
        super().__init__(*text)
        self._key = key
        bounds = _bounds(self._tokens, self._start, len(self._tokens), boundary, after)
        self._starts, self._sizes = bounds[:-1], np.diff(bounds)
        self._arranged = functools.lru_cache(maxsize=2)(self._arrange)

    def _arrange(self, time: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents in order, and where each ends in the text that they make."""
        # These numbers are the same in every version of NumPy; a permutation may not be.
        random = np.random.Philox(stable_hash(f"{self._key} {time}")).random_raw(len(self._starts))
        order = np.argsort(random, kind="stable")
        return order, np.cumsum(self._sizes[order])

    def _window(self, index: int) -> np.ndarray:
        time, index = divmod(index, len(self))
        order, ends = self._arranged(time)
        first = index * self._length
        last = first + self._length + self._target_offset
        place, parts = int(np.searchsorted(ends, first, side="right")), list[np.ndarray]()
        while first < last:
            document, end = order[place], min(last, int(ends[place]))
            shift = int(self._starts[document] + self._sizes[document] - ends[place])
            parts.append(self._tokens[first + shift : end + shift])
            first, place = end, place + 1
        return np.concatenate(parts)


class PackedText(TextWindows):
    """Sequences of a text's documents, packed by best fit; those longer than a sequence are cut.
    What comes after a document is the target of its last token."""

    def __init__(self, *text: Any, boundary: int) -> None:
        super().__init__(*text)
        end = len(self._tokens) - self._target_offset
        bounds = _bounds(self._tokens, self._start, end, boundary)
        counts = -(-np.diff(bounds) // self._length)
        number_P = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts_P = np.repeat(bounds[:-1], counts) + number_P * self._length
        self._sizes_P = np.minimum(np.repeat(bounds[1:], counts) - self._starts_P, self._length)
        self._order, self._firsts = best_fit(self._sizes_P, self._length)
        self.padding = 1 - float(self._sizes_P.sum()) / max(len(self) * self._length, 1)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def _window(self, index: int) -> np.ndarray:
        first = int(self._starts_P[index])
        return self._tokens[first : first + int(self._sizes_P[index]) + self._target_offset]

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        first, end = self._firsts[index : index + 2]
        pieces = self._order[first:end]
        parts = map(super().__getitem__, pieces.tolist())
        inputs_S, targets_S = map(np.concatenate, zip(*parts, strict=True))
        padding = 0, self._length - len(inputs_S)
        return (
            np.pad(inputs_S, padding, mode="edge"),
            np.pad(targets_S.astype(np.int32), padding, constant_values=IGNORED),
            _starts(self._sizes_P[pieces], self._length),
        )


def _bounds(
    tokens: FileArray, start: int, end: int, boundary: int, after: bool = False
) -> np.ndarray:
    """Return where documents start, then `end`: at `start` and each `boundary`, or after it."""
    found = [np.array([start, max(start, end)])]
    for at in range(start, end, _BLOCK_TOKENS):
        block = tokens[at : min(at + _BLOCK_TOKENS, end)]
        found.append(np.flatnonzero(block == boundary) + at + after)
    return np.unique(np.concatenate(found))


def _with_begin(
    inputs_S: np.ndarray, targets_S: np.ndarray, texts: Texts
) -> tuple[np.ndarray, np.ndarray]:
    """Return a sequence that starts with begin tokens. The next text's are not targets."""
    inputs_S, targets_S = inputs_S.astype(np.int32), targets_S.astype(np.int32)
    is_begin_S = targets_S == texts.begin[0]
    targets_S[is_begin_S if texts.end is None else is_begin_S & (inputs_S == texts.end)] = IGNORED
    count = min(len(texts.begin), len(inputs_S))
    inputs_S[:count] = texts.begin[:count]
    targets_S[: count - 1] = IGNORED
    return inputs_S, targets_S


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
        return _sequence(self._documents, np.array([index]), self._length)[:2]


class PackedDocuments(PaddedDocuments):
    """Sequences of several whole documents, none longer; `pack` is a function of `packing`."""

    def __init__(self, documents: AnsweredDocuments, length: int, pack: Any = in_order) -> None:
        super().__init__(documents, length)
        self._order, self._firsts = pack(documents.lengths_C - 1, length)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        first, end = self._firsts[index : index + 2]
        return _sequence(self._documents, self._order[first:end], self._length)


class PairedDocuments(PaddedDocuments):
    """Pairs of sequences of one document each: (2, S) arrays of a chosen and a rejected answer."""

    reference_C: np.ndarray | None = None
    """The reference's log-probability of each document's answer. If set, there is a third array,
    float32: that at the first token, 0 at the others."""

    def __len__(self) -> int:
        return len(self._documents) // 2

    @property
    def padding(self) -> float:
        """Share of tokens that are padding."""
        return 1 - self._documents.input_tokens / (2 * len(self) * self._length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        rows = 2 * index, 2 * index + 1
        arrays = [_sequence(self._documents, np.array([row]), self._length)[:2] for row in rows]
        pair = tuple(np.stack(both) for both in zip(*arrays, strict=True))
        return pair if self.reference_C is None else (*pair, self._reference(index))

    def _reference(self, index: int) -> np.ndarray:
        reference_2S = np.zeros((2, self._length), np.float32)
        if self.reference_C is not None:
            reference_2S[:, 0] = self.reference_C[2 * index : 2 * index + 2]
        return reference_2S


class UnpairedDocuments(PairedDocuments):
    """Pairs of sequences of unpaired preferences, (2, S) arrays: a document, and its prompt with
    another's answer, cut to fit, for the KL divergence of KTO. `reference_C` has both of each
    document. The third array is as in `PairedDocuments`, 0 if it is not set; the fourth is 1 at the
    first token of both if the document is desirable, else 0."""

    padding = PaddedDocuments.padding

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        assert self._documents.desirable_C is not None
        other = (index + max(618 * len(self) // 1000, 1)) % len(self)  # far from the same prompt
        (own, is_own, _), (others, is_other, _) = (
            self._documents.read(number, number + 1) for number in (index, other)
        )
        first, begin = int(is_own.argmax()), int(is_other.argmax())
        mixed = np.append(own[:first], others[begin:])[: self._length + 1]
        is_mixed = np.append(is_own[:first], is_other[begin:])[: self._length + 1]
        arrays = [
            _arranged(tokens, is_answer, np.array([len(tokens)]), self._length)
            for tokens, is_answer in ((own, is_own), (mixed, is_mixed))
        ]
        desirable_2S = np.zeros((2, self._length), np.int32)
        desirable_2S[:, 0] = self._documents.desirable_C[index]
        pair = (np.stack(both) for both in zip(*arrays, strict=True))
        return *pair, self._reference(index), desirable_2S


class _Rows:
    """The sequences of a mixture of pairs, two of each."""

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    padding = 0.0

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(array[index % 2] for array in self._pairs[index // 2])


def _sequence(
    documents: AnsweredDocuments, indices: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs_S, targets_S and starts_S of some documents; padding is a document too."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    parts = [documents.read(int(run[0]), int(run[-1]) + 1) for run in runs]
    tokens, is_answer, lengths_C = map(np.concatenate, zip(*parts, strict=True))
    return *_arranged(tokens, is_answer, lengths_C, length), _starts(lengths_C - 1, length)


def _arranged(
    tokens: np.ndarray, is_answer: np.ndarray, lengths_C: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs_S and targets_S of documents of these lengths."""
    ends_C = np.cumsum(lengths_C)
    is_input, is_target = np.ones((2, len(tokens)), bool)
    is_input[ends_C - 1] = False
    is_target[ends_C - lengths_C] = False
    used = len(tokens) - len(lengths_C)
    inputs_S = np.full(length, tokens[-1], np.int32)  # pads with end of text
    inputs_S[:used] = tokens[is_input]
    targets_S = np.full(length, IGNORED, np.int32)
    targets_S[:used] = np.where(is_answer, tokens, IGNORED)[is_target]
    return inputs_S, targets_S


def _starts(sizes: np.ndarray, length: int) -> np.ndarray:
    """Return where each token's document starts, by the documents' sizes; so does padding."""
    ends = np.append(0, np.cumsum(sizes))
    return ends.repeat(np.append(sizes, length - ends[-1])).astype(np.int32)


def sequences_by_dataset(
    config: RunConfig, datasets: dict[str, Dataset], split: Split, *, is_training: bool = False
) -> dict[str, Sequences]:
    """Return the sequences of each dataset that has the split. Only in training are windows random,
    and documents shuffled or packed by best fit, if the config asks for it. Raises UserError if a
    text has no separator of the documents that should be separate or shuffled."""
    return {
        name: _of_split(config, datasets[name], split, is_training)
        for name in config.train.datasets
        if split in datasets[name].splits
    }


def _of_split(config: RunConfig, dataset: Dataset, split: Split, is_training: bool) -> Sequences:
    train, length = config.train, config.sequence_length
    is_separate = train.documents == "separate"
    is_packed = is_training and train.packing == "best_fit"
    if dataset.description.splits[split].pairs:
        documents = AnsweredDocuments(dataset.token_path(split))
        if train.learns_preferences:
            is_unpaired = train.objective == "kto"
            return (UnpairedDocuments if is_unpaired else PairedDocuments)(documents, length)
        if not is_separate:
            return PaddedDocuments(documents, length)
        return PackedDocuments(documents, length, best_fit if is_packed else in_order)
    start, key = getattr(train, start_key(split)), f"{train.seed} {dataset.name}"
    separator: Any = _separator(config, dataset) if is_separate else None
    file = dataset.open(split)
    text: Any = file.tokens, start, length, train.target_offset
    if is_packed:
        return PackedText(*text, None, file.texts, boundary=separator)
    text = *text, separator, file.texts
    if is_training and train.has_random_windows:
        return RandomWindows(*text, key=key)
    if is_training and train.shuffle == "documents":
        boundary, after = _separator(config, dataset), not dataset.begin
        return ShuffledDocuments(*text, boundary=boundary, after=after, key=key)
    return TextWindows(*text)


def _separator(config: RunConfig, dataset: Dataset) -> int:
    if dataset.begin:
        return dataset.begin[0]
    own, other = dataset.tokenizer_file, config.train.tokenizer
    tokenizer = "its tokenizer" if own else f"{other}, the tokenizer of datasets without one,"
    is_separate = config.train.documents == "separate"
    name, what = ("documents", '"separate"') if is_separate else ("shuffle", "shuffled")
    key = f"{TRAIN_FILE}: {name if own else 'tokenizer'}: "
    needs = f"{what} documents need the end-of-text token of dataset {dataset.name}"
    with errors_at(f"{key}{needs}: "):
        end_of_text = _end_of_text(own or other)
    if end_of_text is None:
        raise UserError(f"{key}{needs}, but {tokenizer} has none")
    if end_of_text >= config.model.vocab_size:
        raise UserError(
            f"{key}{needs}, but that of {tokenizer} is {end_of_text}, beyond vocab_size"
        )
    return end_of_text


@functools.cache
def _end_of_text(tokenizer: Path | str) -> int | None:
    return load_tokenizer(tokenizer).end_of_text


def start_key(split: Split) -> str:
    """Return the key of `train.json` for the first token of a split."""
    return "start_train_token" if split == TRAIN else "start_val_token"


def mix(parts: dict[str, Sequences], config: TrainConfig) -> Sequences:
    """Interleave datasets by weight, rounded by Grain to 1% of the smallest, until one ends."""
    mixture = _interleaved(parts, config)
    return _Rows(mixture) if config.learns_preferences else mixture


def _interleaved(parts: dict[str, Sequences], config: TrainConfig) -> Sequences:
    if len(parts) == 1:
        return next(iter(parts.values()))
    import grain

    sources = [grain.MapDataset.source(part) for part in parts.values()]
    return grain.MapDataset.mix(sources, [config.datasets[name] for name in parts])


def dataset_numbers(parts: dict[str, Sequences], config: TrainConfig, count: int) -> np.ndarray:
    """Return the dataset's index in `parts` for each of the first `count` sequences of `mix`."""
    numbers: dict[str, Any] = {
        name: np.full(len(part), number) for number, (name, part) in enumerate(parts.items())
    }
    mixture: Any = _interleaved(numbers, config)
    per_example = config.sequences_per_example
    return np.array([mixture[index // per_example] for index in range(count)])


class PhasedSequences:
    """The sequences of a run of `total` in order, by the phases of `dataset` in `train.json`: a
    mixture whose weights change. Each dataset is read from its start on, over all phases, and again
    when it ends; with `shuffle` in another order each time. Random windows have no end."""

    def __init__(self, parts: dict[str, Sequences], train: TrainConfig, total: int) -> None:
        phases = train.phases or (Phase(until=1, weights=train.datasets),)
        self._names, self._total = list(parts), total
        self._seed = train.seed if train.shuffle else None
        self._sources = [_source(part, train) for part in parts.values()]
        ends = [
            train.sequences_before(train.steps_of(round(phase.until * total)))
            for phase in phases[:-1]
        ]
        self._starts = [0, *ends]
        self._weights = [_whole([phase.weights.get(name, 0) for name in parts]) for phase in phases]
        self._before = [[0] * len(parts)]
        for begin, end, weights in zip(self._starts, ends, self._weights, strict=False):
            counts = _counts(end - begin, weights)
            self._before.append(list(map(sum, zip(self._before[-1], counts, strict=True))))

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> Any:
        before, after = self._counts_before(index), self._counts_before(index + 1)
        number = next(n for n, count in enumerate(after) if count > before[n])
        return self._sources[number][before[number]]

    @property
    def settings(self) -> dict[str, Any]:
        """What the order depends on besides the datasets and the mixture."""
        return {"starts": self._starts, "seed": self._seed}

    def counts_before(self, index: int) -> dict[str, int]:
        """Return how many of the sequences before one are of each dataset."""
        return dict(zip(self._names, self._counts_before(index), strict=True))

    def _counts_before(self, index: int) -> list[int]:
        phase = max(bisect.bisect_left(self._starts, index) - 1, 0)
        counts = _counts(index - self._starts[phase], self._weights[phase])
        return list(map(sum, zip(self._before[phase], counts, strict=True)))


def longest(parts: dict[str, Sequences], train: TrainConfig) -> int:
    """Return how many sequences a run has in which no dataset is read twice."""
    shares = train.datasets
    total = min(int(len(part) / shares[name]) for name, part in parts.items())
    total = train.sequences_before(train.steps_of(total))
    while total > 0:
        counts = PhasedSequences(parts, train, total).counts_before(total)
        fitting = min(len(part) / max(counts[name], 1) for name, part in parts.items())
        if fitting >= 1:
            break
        total = train.sequences_before(train.steps_of(int(total * fitting)))
    return total


def _source(part: Sequences, train: TrainConfig) -> Any:
    import grain

    if train.epochs_differ:
        return part
    source = grain.MapDataset.source(part)
    return (source.seed(train.seed).shuffle() if train.shuffle else source).repeat()


def _whole(weights: list[float]) -> list[int]:
    """Return weights rounded to 1% of the smallest, as in mixtures by Grain."""
    smallest = min(weight for weight in weights if weight)
    return [round(100 * weight / smallest) for weight in weights]


def _counts(sequences: int, weights: list[int]) -> list[int]:
    """Return how many of the first sequences of a phase are of each dataset. One more sequence is
    one more of exactly one dataset: the last dataset gets its share of all, rounded down, the one
    before it that of the rest, and so on."""
    counts = [0] * len(weights)
    for number in range(len(weights) - 1, 0, -1):
        total = sum(weights[: number + 1])
        counts[number] = sequences * weights[number] // total if total else 0
        sequences -= counts[number]
    counts[0] = sequences
    return counts


def read(sequences: Sequences, indices: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return int32 inputs_BS, targets_BS and, if documents are separate, starts_BS of sequences; or
    the arrays of `PairedDocuments`."""
    first = sequences[indices[0]]
    dtypes = [np.float32 if array.dtype.kind == "f" else np.int32 for array in first]
    shape = len(indices), len(first[0])
    arrays = tuple(np.empty(shape, dtype) for dtype in dtypes)
    for row, index in enumerate(indices):
        for array, part in zip(arrays, sequences[index] if row else first, strict=True):
            array[row] = part
    return arrays
