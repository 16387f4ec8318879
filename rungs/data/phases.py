"""Mixtures whose weights change during training: the phases of `dataset` in `train.json`."""

import bisect
from typing import Any

from rungs.config.train_config import TrainConfig
from rungs.data.sequences import Sequences

_PRECISION = 100
"""Weights are rounded to this part of the smallest one, as in mixtures by Grain."""


class PhasedSequences:
    """The sequences of a run of `total` in order. Each dataset is read from its start on, over all
    phases, and again when it ends; with `shuffle` in another order each time."""

    def __init__(self, parts: dict[str, Sequences], train: TrainConfig, total: int) -> None:
        self._names, self._total = list(parts), total
        self._sources = [_source(part, train) for part in parts.values()]
        ends = [
            train.sequences_before(train.steps_of(round(phase.until * total)))
            for phase in train.phases[:-1]
        ]
        self._starts = [0, *ends]
        self._weights = [
            _whole([phase.weights.get(name, 0) for name in parts]) for phase in train.phases
        ]
        self._before = [[0] * len(parts)]
        for begin, end, weights in zip(self._starts, ends, self._weights, strict=False):
            self._before.append(_sum(self._before[-1], _counts(end - begin, weights)))

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> Any:
        before, after = self._counts_before(index), self._counts_before(index + 1)
        number = next(n for n, count in enumerate(after) if count > before[n])
        return self._sources[number][before[number]]

    def counts_before(self, index: int) -> dict[str, int]:
        """Return how many of the sequences before one are of each dataset."""
        return dict(zip(self._names, self._counts_before(index), strict=True))

    def _counts_before(self, index: int) -> list[int]:
        phase = max(bisect.bisect_left(self._starts, index) - 1, 0)
        counts = _counts(index - self._starts[phase], self._weights[phase])
        return _sum(self._before[phase], counts)


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

    source = grain.MapDataset.source(part)
    return (source.seed(train.seed).shuffle() if train.shuffle else source).repeat()


def _whole(weights: list[float]) -> list[int]:
    smallest = min(weight for weight in weights if weight)
    return [round(_PRECISION * weight / smallest) for weight in weights]


def _sum(first: list[int], second: list[int]) -> list[int]:
    return [one + other for one, other in zip(first, second, strict=True)]


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
