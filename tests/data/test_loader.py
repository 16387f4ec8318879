"""Batches: held against plain slices of the token arrays, against pairs laid out token by token,
and against the counts that the weights of a mixture promise."""

import itertools
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data import loader
from rungs.data.dataset import Dataset
from rungs.data.loader import IGNORED, TrainingData, ValidationData, problems
from rungs.data.token_file import PairWriter
from tests.support.configs import model_config, train_config

S, B, A = 8, 3, 2
STEP_TOKENS = S * B * A


def make(place: Path, name: str, **splits: Any) -> Dataset:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, ids in splits.items():
        save_file({"tokens": np.asarray(ids, np.uint16)}, folder / f"{split}.safetensors")
    return Dataset(name, folder)


Pairs = list[tuple[list[int], list[int]]]
"""The tokens of each prompt and of its answer, without the end of text."""
END = 29_999


def make_pairs(place: Path, name: str, **splits: Pairs) -> Dataset:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        with PairWriter(folder / f"{split}.safetensors", "U16") as writer:
            for prompt, answer in pairs:
                writer.append_pair(prompt, [*answer, END])
    return Dataset(name, folder)


def some_pairs(count: int, seed: int) -> Pairs:
    """Pairs of at most 9 tokens with their end, whose tokens tell their number."""
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(0, 5, count), rng.integers(1, 5, count), strict=True)
    return [
        ([9000 + i] * int(prompt), [9000 + i] * int(answer))
        for i, (prompt, answer) in enumerate(lengths)
    ]


def laid_out(prompt: list[int], answer: list[int], length: int) -> tuple[list[int], list[int]]:
    """Inputs and targets of a pair, token by token."""
    tokens = [*prompt, *answer, END]
    inputs, targets = [], []
    for place in range(length):
        inputs.append(tokens[place] if place < len(tokens) else END)
        following = place + 1
        counts = len(prompt) <= following < len(tokens)
        targets.append(tokens[following] if counts else -1)
    return inputs, targets


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """Each token of "x" tells its place; those of "y" and "z" their dataset, too."""
    place = tmp_path_factory.mktemp("datasets")
    return {
        "x": make(place, "x", train=np.arange(1000), validation=np.arange(2000, 2100)),
        "y": make(
            place, "y", train=np.arange(10_000, 13_000), validation=np.arange(17_000, 17_040)
        ),
        "z": make(place, "z", train=np.arange(20_000, 20_400)),
        "p": make_pairs(place, "p", train=some_pairs(100, 0), validation=some_pairs(20, 1)),
    }


def configs(**changes: Any) -> RunConfig:
    """Configs whose keys `vocab_size` and `context_length` go to the model."""
    model = {"vocab_size": 30_000, "context_length": S}
    model |= {key: changes.pop(key) for key in tuple(changes) if key in model}
    train = {"dataset": "x", "microbatch_size": B, "gradient_accumulation_steps": A, **changes}
    return RunConfig(model_config(**model), train_config(**train))


def training(datasets: dict[str, Dataset], **changes: Any) -> TrainingData:
    return TrainingData(configs(**changes), datasets)


def first_tokens(found: TrainingData) -> list[int]:
    """First token of every sequence of a run, in order."""
    steps = map(found.batch, range(found.total_steps))
    return [int(token) for batch in steps for token in batch.inputs_ABS[..., 0].flat]


# Windows


@pytest.mark.parametrize("target_offset", [0, 1])
@pytest.mark.parametrize("start", [0, 5])
def test_steps_are_consecutive_windows_of_the_file(
    datasets: dict[str, Dataset], target_offset: int, start: int
) -> None:
    found = training(datasets, target_offset=target_offset, start_train_token=start)
    tokens = np.arange(1000)
    assert found.total_steps == (1000 - start - target_offset) // S // (A * B)
    for step in range(found.total_steps):
        first = start + step * STEP_TOKENS
        expected = tokens[first : first + STEP_TOKENS].reshape(A, B, S)
        inputs_ABS, targets_ABS = found.batch(step)
        np.testing.assert_array_equal(inputs_ABS, expected)
        np.testing.assert_array_equal(targets_ABS, expected + target_offset)
        assert inputs_ABS.dtype == targets_ABS.dtype == np.int32


def test_the_last_token_is_a_target(datasets: dict[str, Dataset]) -> None:
    single = {"dataset": "z", "microbatch_size": 1, "gradient_accumulation_steps": 1}
    found = training(datasets, **single, context_length=399)  # of 400 tokens
    assert found.batch(0).targets_ABS[0, 0, -1] == 20_399
    assert training(datasets, **single, context_length=200).total_steps == 1
    assert training(datasets, **single, context_length=200, target_offset=0).total_steps == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tokens=st.integers(1, 90),
    length=st.integers(1, 9),
    batch=st.integers(1, 3),
    start=st.integers(0, 30),
    target_offset=st.integers(0, 1),
    min_train_tokens=st.just(-1) | st.integers(1, 60),
)
def test_any_sizes_give_the_windows_or_a_reason(
    tmp_path: Path,
    tokens: int,
    length: int,
    batch: int,
    start: int,
    target_offset: int,
    min_train_tokens: int,
) -> None:
    dataset = make(tmp_path, str(tokens), train=np.arange(tokens))
    config = configs(
        dataset="d",
        context_length=length,
        microbatch_size=batch,
        gradient_accumulation_steps=1,
        start_train_token=start,
        target_offset=target_offset,
        min_train_tokens=min_train_tokens,
    )
    places = range(start, tokens - length - target_offset + 1, length)
    steps = len(places) // batch
    wanted = steps if min_train_tokens == -1 else -(-min_train_tokens // (batch * length))
    if not 0 < wanted <= steps:
        with pytest.raises(UserError, match="at most"):
            TrainingData(config, {"d": dataset})
        return
    found = TrainingData(config, {"d": dataset})
    assert found.total_steps == wanted
    assert first_tokens(found) == list(places)[: wanted * batch]


def test_sequences_are_as_long_as_the_training_says(datasets: dict[str, Dataset]) -> None:
    short = {"sequence_length": S, "context_length": 64, "validation_tokens": 33}
    config = configs(**short)
    found, expected = training(datasets, **short), training(datasets)
    assert (found.total_steps, found.tokens_per_step) == (expected.total_steps, STEP_TOKENS)
    for step in range(found.total_steps):
        np.testing.assert_array_equal(found.batch(step), expected.batch(step))
    validation = rows(ValidationData.of(config, datasets))
    assert len(validation) == 5
    np.testing.assert_array_equal(
        validation, rows(ValidationData.of(configs(validation_tokens=33), datasets))
    )


# Pairs


tokens_of_a_pair = st.lists(st.integers(0, 20), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    pairs=st.lists(
        st.tuples(tokens_of_a_pair, tokens_of_a_pair.filter(len)), min_size=1, max_size=12
    ),
    room=st.integers(0, 5),
    microbatch_size=st.integers(1, 3),
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
)
def test_of_pairs_only_the_answers_count(
    tmp_path: Path, pairs: Pairs, room: int, microbatch_size: int, shuffle: bool, epochs: int
) -> None:
    length = max(len(prompt) + len(answer) for prompt, answer in pairs) + room
    dataset = make_pairs(tmp_path, "p", train=pairs, validation=pairs)
    batch_size = min(microbatch_size, len(pairs))
    config = configs(
        dataset="p",
        sequence_length=length,
        context_length=length + 3,
        microbatch_size=batch_size,
        gradient_accumulation_steps=1,
        shuffle=shuffle,
        epochs=epochs,
    )
    found = TrainingData(config, {"p": dataset})
    in_order = [laid_out(*pair, length) for pair in pairs]
    assert found.steps_per_epoch == len(pairs) // batch_size
    seen = []
    for step in range(found.total_steps):
        inputs_ABS, targets_ABS = found.batch(step)
        assert inputs_ABS.dtype == targets_ABS.dtype == np.int32
        assert inputs_ABS.shape == targets_ABS.shape == (1, batch_size, length)
        seen += list(zip(inputs_ABS[0].tolist(), targets_ABS[0].tolist(), strict=True))
    used = found.steps_per_epoch * batch_size
    for epoch in range(epochs):
        of_epoch = seen[epoch * used : (epoch + 1) * used]
        assert sorted(of_epoch) == sorted(in_order[:used])
        assert shuffle or of_epoch == in_order[:used]
    validation = rows(ValidationData.of(config, {"p": dataset}))
    assert [(inputs, targets) for inputs, targets in validation.tolist()] == in_order


def test_a_batch_of_pairs_as_written_out(tmp_path: Path) -> None:
    pairs: Pairs = [([1, 2, 3], [4, 5]), ([], [6, 7]), ([8, 9, 10, 11, 12, 13, 14], [15])]
    found = training(
        {"p": make_pairs(tmp_path, "p", train=pairs)}, dataset="p", gradient_accumulation_steps=1
    )
    inputs_ABS, targets_ABS = found.batch(0)
    no = IGNORED
    assert inputs_ABS[0].tolist() == [
        [1, 2, 3, 4, 5, END, END, END],
        [6, 7, END, END, END, END, END, END],
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]
    assert targets_ABS[0].tolist() == [
        [no, no, 4, 5, END, no, no, no],
        [7, END, no, no, no, no, no, no],
        [no, no, no, no, no, no, 15, END],
    ]
    assert found.total_steps == 1


def test_a_mixture_of_text_and_pairs_has_both_as_they_are(datasets: dict[str, Dataset]) -> None:
    found = training(datasets, dataset={"x": 1, "p": 2}, shuffle=True)
    pairs = {tuple(map(tuple, laid_out(*pair, S))) for pair in some_pairs(100, 0)}
    counts: Counter[str] = Counter()
    for inputs_ABS, targets_ABS in found.batches():
        for row, targets in zip(inputs_ABS.reshape(-1, S), targets_ABS.reshape(-1, S), strict=True):
            if row[0] < 1000:
                np.testing.assert_array_equal(targets, row + 1)
                counts["x"] += 1
            else:
                assert (tuple(row.tolist()), tuple(targets.tolist())) in pairs
                counts["p"] += 1
    assert counts["p"] == pytest.approx(2 * counts["x"], abs=2)


def too_long(place: Path, *prompts: int) -> dict[str, Dataset]:
    """A dataset of prompts so many tokens long, with answers of one and the end of text."""
    pairs: Pairs = [([1] * prompt, [2]) for prompt in prompts]
    return {"p": make_pairs(place, "p", train=pairs)}


SINGLE = {"dataset": "p", "microbatch_size": 1, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("key", ["sequence_length", "context_length"])
def test_pairs_too_long_are_counted_and_the_length_told_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(loader, "_BLOCK_PAIRS", 3)
    datasets = too_long(tmp_path, *[3] * 1990, 20, 7, 8, *[5] * 7, 19, 6)
    lengths = {"context_length": 100, key: 8}
    (line,) = reasons(datasets, **SINGLE, **lengths)
    file = {"sequence_length": "train.json", "context_length": "model.json"}[key]
    assert line == (
        f"{file}: {key}: 8 is too short for 3 of the 2,002 pairs in the train split of dataset p"
        " (the longest has 22 tokens); raise it to 21 or remove them"
    )
    assert reasons(datasets, **SINGLE, **{**lengths, key: 20})
    assert training(datasets, **SINGLE, **{**lengths, key: 21}).total_steps == 2002


def test_pairs_that_the_model_has_no_room_for_can_only_be_removed(tmp_path: Path) -> None:
    datasets = too_long(tmp_path, 20)
    (line,) = reasons(datasets, **SINGLE, sequence_length=8, context_length=20)
    assert line.endswith("(the longest has 22 tokens); remove them")


def test_pairs_too_long_for_validation_are_refused_too(tmp_path: Path) -> None:
    datasets = {"p": make_pairs(tmp_path, "p", train=[([1], [2])], validation=[([1] * 9, [2])])}
    assert "in the validation split of dataset p" in reasons(datasets, **SINGLE)[0]
    with pytest.raises(UserError, match="1 of the 1 pairs in the validation split"):
        ValidationData.of(configs(**SINGLE), datasets)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target_offset": 0}, "target_offset: 0 is for text only; the train split .* need 1"),
        ({"start_train_token": 3}, "start_train_token: 3 is for text only; the train .* need 0"),
        ({"vocab_size": 29_999}, "too small for the token id 29999 in the train .* least 30000"),
        ({"microbatch_size": 4}, "there are 3 sequences of 8 tokens; at most 3 in a step"),
    ],
)
def test_what_does_not_go_with_pairs(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    datasets = too_long(tmp_path, 1, 2, 3)
    (found,) = reasons(datasets, **{**SINGLE, **changes})
    assert re.search(line, found), found


# Any step by its number


VARIANTS: list[dict[str, Any]] = [
    {},
    {"epochs": 3},
    {"shuffle": True, "epochs": 3, "seed": 4},
    {"dataset": {"x": 1, "y": 2}},
    {"dataset": {"x": 1, "y": 2.5}, "shuffle": True, "epochs": 2, "min_train_tokens": 500},
    {"dataset": "p"},
    {"dataset": "p", "shuffle": True, "epochs": 3, "seed": 4},
    {"dataset": {"x": 1, "p": 2}, "shuffle": True, "epochs": 2},
    {"sequence_length": 5, "shuffle": True, "epochs": 2},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_reading_ahead_gives_the_batches_by_number(
    datasets: dict[str, Dataset], changes: dict[str, Any]
) -> None:
    found = training(datasets, **changes)
    by_number = [training(datasets, **changes).batch(step) for step in range(found.total_steps)]
    for first in (0, 1, found.steps_per_epoch - 1, found.total_steps - 1, found.total_steps):
        ahead = list(found.batches(first))
        assert len(ahead) == found.total_steps - first
        for expected, batch in zip(by_number[first:], ahead, strict=True):
            np.testing.assert_array_equal(batch, expected)
    with pytest.raises(IndexError):
        found.batch(found.total_steps)
    with pytest.raises(IndexError):
        found.batch(-1)


@pytest.mark.parametrize("own", [[1], [0, 2]])
def test_a_host_reads_its_part_of_each_batch_and_no_more(
    own: list[int], datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"dataset": {"x": 1, "y": 2}, "shuffle": True}
    whole, read = training(datasets, **config), list[int]()
    batches = [whole.batch(step) for step in range(3)]
    gather = loader._gather

    def noted(sequences: Any, indices: list[int]) -> tuple[np.ndarray, np.ndarray]:
        read.extend(indices)
        return gather(sequences, indices)

    monkeypatch.setattr(loader, "_gather", noted)
    part = training(datasets, **config)
    for batch, expected in zip(part.batches(rows=np.array(own)), batches, strict=False):
        np.testing.assert_array_equal(batch.inputs_ABS, expected.inputs_ABS[:, own])
        np.testing.assert_array_equal(batch.targets_ABS, expected.targets_ABS[:, own])
    assert 0 < len(read) <= A * len(own) * part.total_steps
    validation = ValidationData.of(configs(), datasets)
    assert validation is not None
    for found, other in zip(validation.batches(np.array(own)), validation.batches(), strict=True):
        np.testing.assert_array_equal(found.inputs_BS, other.inputs_BS[own])
        assert found.real_rows == other.real_rows


def test_leaving_early_stops_the_threads(datasets: dict[str, Dataset]) -> None:
    batches = training(datasets, epochs=50).batches(0)
    for _ in itertools.islice(batches, 3):
        pass
    assert _reading_threads()
    batches.close()  # type: ignore[attr-defined]
    started = time.monotonic()
    while _reading_threads():
        assert time.monotonic() - started < 10
        time.sleep(0.01)


def _reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "grain-prefetch" in thread.name]


# Epochs


def test_epochs_repeat(datasets: dict[str, Dataset]) -> None:
    found = training(datasets, epochs=3)
    assert found.total_steps == 3 * found.steps_per_epoch
    np.testing.assert_array_equal(found.batch(0), found.batch(2 * found.steps_per_epoch))


@pytest.mark.parametrize("dataset", ["x", {"x": 1.0, "y": 2.0, "z": 0.5}])
@pytest.mark.parametrize("min_train_tokens", [-1, 400])
def test_each_epoch_is_another_permutation_of_the_same_sequences(
    datasets: dict[str, Dataset], dataset: Any, min_train_tokens: int
) -> None:
    common = {"dataset": dataset, "min_train_tokens": min_train_tokens}
    in_order = first_tokens(training(datasets, **common))
    found = training(datasets, **common, shuffle=True, epochs=4, seed=1)
    shuffled = np.reshape(first_tokens(found), (4, -1))
    orders = {tuple(row) for row in shuffled} | {tuple(in_order)}
    assert len(orders) == 5
    for row in shuffled:
        assert sorted(row) == sorted(in_order)


def test_seeds_share_no_epoch(datasets: dict[str, Dataset]) -> None:
    """As they would if an epoch's seed were the seed plus the epoch."""
    runs = [
        first_tokens(training(datasets, shuffle=True, epochs=4, seed=seed)) for seed in range(4)
    ]
    orders = [tuple(row) for run in runs for row in np.reshape(run, (4, -1))]
    assert len(set(orders)) == 16


def test_a_shuffled_order_looks_random(datasets: dict[str, Dataset]) -> None:
    order = np.array(first_tokens(training(datasets, shuffle=True))) // S
    places = np.arange(len(order))
    correlation = np.corrcoef(order, places)[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(order))
    assert np.mean(np.diff(order) == 1) < 0.1


# Lengths


def test_tokens_are_rounded_up_to_whole_steps(datasets: dict[str, Dataset]) -> None:
    for tokens, steps in ((1, 1), (STEP_TOKENS, 1), (STEP_TOKENS + 1, 2), (10 * STEP_TOKENS, 10)):
        found = training(datasets, min_train_tokens=tokens)
        assert (found.steps_per_epoch, found.tokens_per_step) == (steps, STEP_TOKENS)


@pytest.mark.parametrize("dataset", ["x", {"x": 1, "y": 3}])
def test_a_longer_run_starts_with_the_same_batches(
    datasets: dict[str, Dataset], dataset: Any
) -> None:
    short = training(datasets, dataset=dataset, min_train_tokens=200)
    long = training(datasets, dataset=dataset, min_train_tokens=900)
    for step in range(short.total_steps):
        np.testing.assert_array_equal(short.batch(step), long.batch(step))


# Mixtures


@pytest.mark.parametrize(
    "weights",
    [{"x": 1, "y": 1}, {"x": 1, "y": 3}, {"x": 0.2, "y": 0.7, "z": 0.1}, {"z": 5, "y": 3}],
)
def test_a_mixture_has_its_proportions_throughout(
    datasets: dict[str, Dataset], weights: dict[str, float]
) -> None:
    found = training(datasets, dataset=weights, microbatch_size=1, gradient_accumulation_steps=1)
    names = {0: "x", 1: "y", 2: "z"}
    firsts = first_tokens(found)
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


def test_a_mixture_lasts_until_the_first_part_runs_out(datasets: dict[str, Dataset]) -> None:
    single = {"microbatch_size": 1, "gradient_accumulation_steps": 1}
    found = training(datasets, dataset={"z": 1, "y": 1}, **single)
    there = (400 - 1) // S
    assert 2 * there - 1 <= found.total_steps <= 2 * there + 1
    config = configs(dataset={"z": 1, "y": 1}, **single, min_train_tokens=(2 * there + 3) * S)
    with pytest.raises(UserError, match="until the first dataset of the mixture runs out"):
        TrainingData(config, datasets)


# Validation


def rows(validation: ValidationData | None) -> np.ndarray:
    """The rows that count, inputs beside targets."""
    assert validation is not None
    parts = [np.stack(batch[:2], 1)[: batch.real_rows] for batch in validation.batches()]
    assert len(parts) == len(validation)
    return np.concatenate(parts)


@pytest.mark.parametrize("target_offset", [0, 1])
def test_validation_is_windows_of_the_validation_split(
    datasets: dict[str, Dataset], target_offset: int
) -> None:
    config = configs(start_val_token=3, target_offset=target_offset)
    validation = ValidationData.of(config, datasets)
    expected = np.arange(2003, 2003 + 12 * S).reshape(12, S)
    found = rows(validation)
    np.testing.assert_array_equal(found[:, 0], expected)
    np.testing.assert_array_equal(found[:, 1], expected + target_offset)
    np.testing.assert_array_equal(found, rows(validation))  # the same each time


@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (8, 1), (9, 2), (33, 5), (10**6, 12)])
def test_validation_tokens_are_rounded_up_to_whole_sequences(
    datasets: dict[str, Dataset], tokens: int, sequences: int
) -> None:
    validation = ValidationData.of(configs(validation_tokens=tokens), datasets)
    assert validation is not None
    assert (validation.sequences, validation.tokens) == (sequences, sequences * S)
    assert len(rows(validation)) == sequences


def test_the_last_batch_is_filled_up_with_its_own_rows(datasets: dict[str, Dataset]) -> None:
    validation = ValidationData.of(configs(microbatch_size=5), datasets)
    assert validation is not None
    batches = list(validation.batches())
    assert [batch.real_rows for batch in batches] == [5, 5, 2]
    assert all(batch.inputs_BS.shape == batch.targets_BS.shape == (5, S) for batch in batches)
    np.testing.assert_array_equal(batches[-1].inputs_BS[2:4], batches[-1].inputs_BS[:2])


def test_validation_of_a_mixture_leaves_out_parts_without_a_split(
    datasets: dict[str, Dataset],
) -> None:
    config = configs(dataset={"x": 1, "y": 1, "z": 1})
    firsts = rows(ValidationData.of(config, datasets))[:, 0, 0]
    counts = Counter(int(first) // 10_000 for first in firsts)
    assert set(counts) == {0, 1}
    assert abs(counts[0] - counts[1]) <= 1
    assert ValidationData.of(configs(dataset="z"), datasets) is None


# What the user can mend


def reasons(datasets: dict[str, Dataset], **changes: Any) -> list[str]:
    config = configs(**changes)
    lines = problems(config, datasets)
    with pytest.raises(UserError) as caught:
        TrainingData(config, datasets)
    assert str(caught.value).splitlines() == lines
    return lines


MENDED = [
    ({"min_train_tokens": 1000}, "min_train_tokens", r"1000 are 21 steps of 48.* at most (\d+)"),
    ({"vocab_size": 900}, "vocab_size", r"token id 999 in the train split .* at least (\d+)"),
    ({"start_train_token": 10**6}, "start_train_token", r"of 1000 tokens; at most (\d+)"),
    ({"start_val_token": 100}, "start_val_token", r"of 100 tokens; at most (\d+)"),
    ({"context_length": 1000}, "context_length", r"of 1000 tokens; at most (\d+)"),
    (
        {"context_length": 2000, "sequence_length": 1000},
        "sequence_length",
        r"of 1000 tokens; at most (\d+)",
    ),
    ({"microbatch_size": 125}, "microbatch_size", r"at most (\d+) in a step"),
]


@pytest.mark.parametrize(("changes", "key", "pattern"), MENDED)
def test_the_number_given_as_advice_works_and_is_the_limit(
    tmp_path: Path, changes: dict[str, Any], key: str, pattern: str
) -> None:
    parts = {"train": np.arange(1000), "validation": np.arange(100)}
    if 1000 in (changes.get("context_length"), changes.get("sequence_length")):
        del parts["validation"]
    small = {"microbatch_size": 1, "gradient_accumulation_steps": 1}
    changes = changes if key == "min_train_tokens" else {**small, **changes}
    datasets = {"x": make(tmp_path, "x", **parts)}
    (line,) = reasons(datasets, **changes)
    assert key in line
    match = re.search(pattern, line)
    assert match, line
    advised = int(match[1])
    assert training(datasets, **{**changes, key: advised}).total_steps
    beyond = advised - 1 if key == "vocab_size" else advised + 1
    assert reasons(datasets, **{**changes, key: beyond})


def test_all_reasons_come_at_once(datasets: dict[str, Dataset]) -> None:
    lines = reasons(
        datasets,
        dataset={"x": 1, "y": 1e9},
        vocab_size=500,
        start_val_token=60,
        min_train_tokens=10**6,
    )
    for reason in ("differ by more than a million", "id 999 in the train", "id 12999 in the train"):
        assert sum(reason in line for line in lines) == 1
    for reason in ("id 2099 in the validation", "start_val_token: 60"):
        assert sum(reason in line for line in lines) == 1
    assert len(lines) == 6
    single = reasons(datasets, vocab_size=500, min_train_tokens=10**6)
    assert [line.split(":")[1].strip() for line in single] == [
        "vocab_size",
        "min_train_tokens",
        "vocab_size",
    ]


def test_validation_alone_asks_nothing_of_the_training_split(datasets: dict[str, Dataset]) -> None:
    assert ValidationData.of(configs(min_train_tokens=10**6), datasets) is not None
    with pytest.raises(UserError, match="start_val_token"):
        ValidationData.of(configs(start_val_token=10**6), datasets)
