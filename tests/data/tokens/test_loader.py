"""Batches: by step, by epoch, in mixtures and in validation."""

import itertools
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.data.tokens import sequences
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from tests.support.token_datasets import (
    STEP_TOKENS,
    A,
    S,
    configs,
    first_tokens,
    training_data,
    validation_rows,
)

# Steps


VARIANTS: list[dict[str, Any]] = [
    {"epochs": 2},
    {"dataset": {"x": 1, "y": 2.5}, "shuffle": True, "epochs": 2, "min_train_tokens": 500},
    {"dataset": "p", "shuffle": True, "epochs": 2, "seed": 4},
    {"dataset": {"x": 1, "p": 2}, "shuffle": True, "epochs": 2},
    {"sequence_length": 5, "shuffle": True},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_prefetched_batches_equal_the_batches_of_their_steps(
    datasets: dict[str, Dataset], changes: dict[str, Any]
) -> None:
    data = training_data(datasets, **changes)
    steps = range(data.total_steps)
    backwards = [data.batch(step) for step in reversed(steps)]
    by_step = backwards[::-1]
    for step in (0, data.total_steps // 2, data.total_steps - 1):
        np.testing.assert_array_equal(
            training_data(datasets, **changes).batch(step)[:2], by_step[step][:2]
        )
    for first in (0, data.steps_per_epoch - 1, data.total_steps):
        prefetched = list(data.batches(first))
        assert len(prefetched) == data.total_steps - first
        for expected, batch in zip(by_step[first:], prefetched, strict=True):
            np.testing.assert_array_equal(batch[:2], expected[:2])
    with pytest.raises(IndexError):
        data.batch(data.total_steps)
    with pytest.raises(IndexError):
        data.batch(-1)


@pytest.mark.parametrize("host_rows", [[1], [0, 2]])
def test_a_host_reads_only_its_rows_of_each_batch(
    host_rows: list[int], datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"dataset": {"x": 1, "y": 2}, "shuffle": True}
    data, indices_read = training_data(datasets, **config), list[int]()
    batches = [data.batch(step) for step in range(3)]
    read = sequences.read

    def recording_read(parts: Any, indices: list[int]) -> tuple[np.ndarray, ...]:
        indices_read.extend(indices)
        return read(parts, indices)

    monkeypatch.setattr(sequences, "read", recording_read)
    rows = np.array(host_rows)
    for batch, expected in zip(data.batches(rows=rows), batches, strict=False):
        np.testing.assert_array_equal(batch.inputs_ABS, expected.inputs_ABS[:, rows])
        np.testing.assert_array_equal(batch.targets_ABS, expected.targets_ABS[:, rows])
    assert 0 < len(indices_read) <= A * len(rows) * data.total_steps
    validation = ValidationData.of(configs(), datasets)
    assert validation is not None
    for part, full in zip(validation.batches(rows), validation.batches(), strict=True):
        np.testing.assert_array_equal(part.inputs_BS, full.inputs_BS[rows])
        assert part.real_rows == full.real_rows


def test_closing_the_iterator_stops_the_threads(datasets: dict[str, Dataset]) -> None:
    batches = training_data(datasets, epochs=50).batches(0)
    for _ in itertools.islice(batches, 3):
        pass
    assert _prefetch_threads()
    batches.close()  # type: ignore[attr-defined]
    started = time.monotonic()
    while _prefetch_threads():
        assert time.monotonic() - started < 10
        time.sleep(0.01)


def _prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "grain-prefetch" in thread.name]


# Epochs


@pytest.mark.parametrize("dataset", ["x", {"x": 1.0, "y": 2.0, "z": 0.5}])
@pytest.mark.parametrize("min_train_tokens", [-1, 400])
def test_each_epoch_shuffles_the_same_sequences_differently(
    datasets: dict[str, Dataset], dataset: Any, min_train_tokens: int
) -> None:
    common = {"dataset": dataset, "min_train_tokens": min_train_tokens}
    in_order = first_tokens(training_data(datasets, **common))
    data = training_data(datasets, **common, shuffle=True, epochs=4, seed=1)
    shuffled = np.reshape(first_tokens(data), (4, -1))
    orders = {tuple(row) for row in shuffled} | {tuple(in_order)}
    assert len(orders) == 5
    for row in shuffled:
        assert sorted(row) == sorted(in_order)


def test_seeds_share_no_epoch_order(datasets: dict[str, Dataset]) -> None:
    """They would share some if an epoch's seed were the seed plus the epoch."""
    runs = [
        first_tokens(training_data(datasets, shuffle=True, epochs=3, seed=seed))
        for seed in range(3)
    ]
    orders = [tuple(row) for run in runs for row in np.reshape(run, (3, -1))]
    assert len(set(orders)) == 9


def test_tokens_are_rounded_up_to_whole_steps(datasets: dict[str, Dataset]) -> None:
    for tokens, steps in ((1, 1), (STEP_TOKENS, 1), (STEP_TOKENS + 1, 2), (10 * STEP_TOKENS, 10)):
        data = training_data(datasets, min_train_tokens=tokens)
        assert (data.steps_per_epoch, data.total_tokens) == (steps, steps * STEP_TOKENS)


@pytest.mark.parametrize("dataset", ["x", {"x": 1, "y": 3}])
def test_a_longer_run_starts_with_the_same_batches(
    datasets: dict[str, Dataset], dataset: Any
) -> None:
    short = training_data(datasets, dataset=dataset, min_train_tokens=200)
    long = training_data(datasets, dataset=dataset, min_train_tokens=900)
    for step in range(short.total_steps):
        np.testing.assert_array_equal(short.batch(step)[:2], long.batch(step)[:2])


# Mixtures


@pytest.mark.parametrize(
    "weights",
    [{"x": 1, "y": 1}, {"x": 1, "y": 3}, {"x": 0.2, "y": 0.7, "z": 0.1}, {"z": 5, "y": 3}],
)
def test_a_mixture_keeps_its_proportions_throughout(
    datasets: dict[str, Dataset], weights: dict[str, float]
) -> None:
    data = training_data(
        datasets, dataset=weights, microbatch_size=1, gradient_accumulation_steps=1
    )
    names = {0: "x", 1: "y", 2: "z"}
    firsts = first_tokens(data)
    for name in weights:
        own = [first for first in firsts if names[first // 10_000] == name]
        start = {"x": 0, "y": 10_000, "z": 20_000}[name]
        assert own == list(range(start, start + len(own) * S, S))  # each in its file's order
    seen: Counter[str] = Counter()
    for count, first in enumerate(firsts, 1):
        seen[names[first // 10_000]] += 1
        for name, weight in weights.items():
            expected = count * weight / sum(weights.values())
            assert abs(seen[name] - expected) <= 1 + 0.02 * expected


def test_a_mixture_ends_when_its_first_dataset_runs_out(datasets: dict[str, Dataset]) -> None:
    single = {"microbatch_size": 1, "gradient_accumulation_steps": 1}
    data = training_data(datasets, dataset={"z": 1, "y": 1}, **single)
    in_z = (400 - 1) // S
    assert 2 * in_z - 1 <= data.total_steps <= 2 * in_z + 1
    config = configs(dataset={"z": 1, "y": 1}, **single, min_train_tokens=(2 * in_z + 3) * S)
    with pytest.raises(UserError, match="until the first dataset of the mixture runs out"):
        TrainingData(config, datasets)


@pytest.mark.parametrize(
    "weights", [{"x": 1, "y": 1}, {"x": 5, "y": 2}, {"y": 3, "z": 1}, {"x": 1}]
)
def test_each_validation_sequence_is_of_the_dataset_that_it_says(
    datasets: dict[str, Dataset], weights: dict[str, float]
) -> None:
    validation = ValidationData.of(configs(dataset=weights), datasets)
    assert validation is not None
    assert validation.datasets == [name for name in weights if name != "z"]  # which has no split
    firsts = validation_rows(validation)[:, 0, 0]
    names = ["y" if first >= 10_000 else "x" for first in firsts]
    assert [validation.datasets[number] for number in validation.dataset_numbers] == names


# Validation


@pytest.mark.parametrize("target_offset", [0, 1])
def test_validation_reads_windows_of_the_validation_split(
    datasets: dict[str, Dataset], target_offset: int
) -> None:
    config = configs(start_val_token=3, target_offset=target_offset)
    validation = ValidationData.of(config, datasets)
    expected = np.arange(2003, 2003 + 12 * S).reshape(12, S)
    data = validation_rows(validation)
    np.testing.assert_array_equal(data[:, 0], expected)
    np.testing.assert_array_equal(data[:, 1], expected + target_offset)
    np.testing.assert_array_equal(data, validation_rows(validation))  # the same each time


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (8, 1), (9, 2), (33, 5), (10**6, 12)])
def test_validation_tokens_are_rounded_up_to_whole_sequences(
    datasets: dict[str, Dataset], tokens: int, count: int
) -> None:
    validation = ValidationData.of(configs(validation_tokens=tokens), datasets)
    assert validation is not None
    assert (validation.sequences, validation.tokens) == (count, count * S)
    assert len(validation_rows(validation)) == count


def test_the_last_batch_is_padded_with_its_own_rows(datasets: dict[str, Dataset]) -> None:
    validation = ValidationData.of(configs(microbatch_size=5), datasets)
    assert validation is not None
    batches = list(validation.batches())
    assert [batch.real_rows for batch in batches] == [5, 5, 2]
    assert all(batch.inputs_BS.shape == batch.targets_BS.shape == (5, S) for batch in batches)
    np.testing.assert_array_equal(batches[-1].inputs_BS[2:4], batches[-1].inputs_BS[:2])


def test_validation_skips_datasets_without_a_validation_split(
    datasets: dict[str, Dataset],
) -> None:
    config = configs(dataset={"x": 1, "y": 1, "z": 1})
    firsts = validation_rows(ValidationData.of(config, datasets))[:, 0, 0]
    counts = Counter(int(first) // 10_000 for first in firsts)
    assert set(counts) == {0, 1}
    assert abs(counts[0] - counts[1]) <= 1
    assert ValidationData.of(configs(dataset="z"), datasets) is None
