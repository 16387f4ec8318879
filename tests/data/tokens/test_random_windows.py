"""Random windows of a text: which ones they are, that all are equally likely, and that a step's
depend on the seed and the step alone."""

import hashlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.config.run_config import load_run, unused_keys
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from rungs.data.tokens.sequences import RandomWindows, TextWindows
from rungs.data.tokens.token_file import Texts
from rungs.objectives.distillation import Teacher
from rungs.planning.forecast import Tokens, _tokens
from tests.support.tiny_run import make_dataset, make_run
from tests.support.token_datasets import (
    A,
    B,
    S,
    configs,
    first_tokens,
    make_text,
    training_data,
    validation_rows,
)

RANDOM: dict[str, Any] = {"windows": "random"}
OFFSETS = 20


def expected_offsets(seed: int, name: str, count: int, tokens: int, offset: int = 1) -> list[int]:
    """Return where the first windows start: a 64-bit hash of seed, dataset and index, scaled to the
    possible starts."""
    digests = (hashlib.sha256(f"{seed} {name} {i}".encode()).digest() for i in range(count))
    hashes = np.array([int(np.frombuffer(digest, ">u8")[0]) for digest in digests], object)
    return (hashes * (tokens - S - offset + 1) // 2**64).tolist()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_windows_are_those_of_the_seed_and_the_index(
    datasets: dict[str, Dataset], seed: int
) -> None:
    data = training_data(datasets, **RANDOM, seed=seed, epochs=3)
    found = first_tokens(data)
    assert found == expected_offsets(seed, "x", len(found), 1000)
    assert len(found) == data.total_steps * A * B == 3 * data.steps_per_epoch * A * B
    batch = data.batch(data.total_steps - 1)
    np.testing.assert_array_equal(
        batch.inputs_ABS, batch.inputs_ABS[..., :1] + np.arange(S, dtype=np.int32)
    )
    np.testing.assert_array_equal(batch.targets_ABS, batch.inputs_ABS + 1)


def test_an_epoch_has_as_many_sequences_as_there_are_consecutive_ones(
    datasets: dict[str, Dataset],
) -> None:
    for keys in ({}, {"epochs": 4}, {"min_train_tokens": 200}, {"max_steps": 3}):
        data, consecutive = (
            training_data(datasets, **RANDOM, **keys),
            training_data(datasets, **keys),
        )
        assert data.total_steps == consecutive.total_steps
        assert data.total_tokens == consecutive.total_tokens
        assert data.dataset_tokens(2) == {}
    with pytest.raises(UserError, match="but one epoch has"):
        training_data(datasets, **RANDOM, min_train_tokens=10**4)


@pytest.mark.parametrize(("start", "target_offset"), [(0, 1), (3, 0)])
def test_each_start_is_equally_likely(tmp_path: Path, start: int, target_offset: int) -> None:
    tokens = np.arange(start + S + target_offset + OFFSETS - 1)
    dataset = {"x": make_text(tmp_path, "x", train=tokens)}
    keys = {"target_offset": target_offset, "start_train_token": start, "epochs": 1500, **RANDOM}
    data = training_data(dataset, microbatch_size=1, gradient_accumulation_steps=1, **keys)
    found = np.bincount(first_tokens(data), minlength=len(tokens))
    used = found[start : start + OFFSETS]
    assert used.min() > 0  # the first and the last too
    assert used.sum() == found.sum() == 1500 * ((len(tokens) - start - target_offset) // S)
    expected = used.sum() / OFFSETS
    chi_squared = ((used - expected) ** 2 / expected).sum()
    assert chi_squared < 43.8  # for 19 degrees of freedom, once in a thousand
    successive = Counter(itertools.pairwise(np.array(first_tokens(data)).tolist()))
    assert len(successive) > 0.9 * OFFSETS**2  # what follows does not depend on what was before


@pytest.mark.parametrize(
    "keys",
    [
        {"microbatch_size": 6, "gradient_accumulation_steps": 1},
        {"epochs": 5},
        {"max_steps": 4},
        {"shuffle": True},
    ],
)
def test_a_steps_sequences_do_not_depend_on_what_else_is_configured(
    datasets: dict[str, Dataset], keys: dict[str, Any]
) -> None:
    expected, data = training_data(datasets, **RANDOM), training_data(datasets, **RANDOM | keys)
    for step in (0, 3):
        np.testing.assert_array_equal(
            data.batch(step).inputs_ABS.reshape(-1, S),
            expected.batch(step).inputs_ABS.reshape(-1, S),
        )
    (batch,) = itertools.islice(data.batches(2, rows=np.array([1, 2])), 1)
    np.testing.assert_array_equal(batch.inputs_ABS, data.batch(2).inputs_ABS[:, [1, 2]])


def test_with_batch_growth_sequences_go_on(datasets: dict[str, Dataset]) -> None:
    data = training_data(datasets, **RANDOM, batch_growth={"2": 2, "4": 3})
    found = first_tokens(data)
    assert found == expected_offsets(0, "x", len(found), 1000)


MIXED: list[Any] = [
    {"x": 1, "y": 2},
    [{"until": 0.5, "weights": {"y": 1}}, {"until": 1, "weights": {"x": 1, "y": 1}}],
]


@pytest.mark.parametrize("mixture", MIXED)
def test_each_dataset_of_a_mixture_has_its_own_windows(
    datasets: dict[str, Dataset], mixture: Any
) -> None:
    data = training_data(datasets, **RANDOM, dataset=mixture, epochs=2, seed=3)
    found = np.array(first_tokens(data))
    is_y = found >= 10_000
    of_x, of_y = found[~is_y].tolist(), (found[is_y] - 10_000).tolist()
    assert of_x == expected_offsets(3, "x", len(of_x), 1000)
    assert of_y == expected_offsets(3, "y", len(of_y), 3000)
    half = len(of_y) // 2
    assert of_y[half : half + 20] != of_y[:20]
    assert is_y.mean() == pytest.approx(2 / 3 if mixture is MIXED[0] else 3 / 4, abs=0.03)


def test_validation_has_consecutive_windows(datasets: dict[str, Dataset]) -> None:
    found, expected = (
        validation_rows(ValidationData.of(configs(**keys), datasets)) for keys in (RANDOM, {})
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("separator", [None, 2])
@pytest.mark.parametrize("texts", [None, Texts(begin=[5, 6], end=2)])
def test_a_random_window_is_what_a_consecutive_one_from_there_is(
    tmp_path: Path, separator: int | None, texts: Texts | None
) -> None:
    ids = np.random.default_rng(0).integers(0, 8, 500)
    tokens = make_text(tmp_path, "x", train=ids).tokens("train")
    windows = RandomWindows(tokens, 4, S, 1, separator, texts, key="0 x")
    assert len(windows) == len(TextWindows(tokens, 4, S, 1))
    for index, offset in enumerate(expected_offsets(0, "x", 20, 496)):
        there = TextWindows(tokens, 4 + offset, S, 1, separator, texts)[0]
        for found, expected in zip(windows[index], there, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dataset", ["p", {"x": 1, "p": 2}])
def test_pairs_have_none(datasets: dict[str, Dataset], dataset: Any) -> None:
    with pytest.raises(UserError) as raised:
        training_data(datasets, dataset=dataset, **RANDOM)
    assert str(raised.value) == (
        'train.json: windows: "random" is for text only; the train split of dataset p holds pairs,'
        ' which need "consecutive"'
    )


def test_shuffle_has_no_effect_and_the_seed_has() -> None:
    config = configs(**RANDOM, shuffle=True, start_from="x", seed=1)
    (line,) = [line for line in unused_keys(config) if "shuffle" in line or "seed" in line]
    assert line == 'train.json: shuffle: has no effect with windows "random"; remove it'


def test_predictions_of_a_teacher_are_stored_for_one_seed(datasets: dict[str, Dataset]) -> None:
    phases = {"dataset": MIXED[1], "shuffle": True}
    teacher = Teacher(None, "")  # type: ignore[arg-type]
    for keys in (RANDOM, phases, {"shuffle": True}):
        found = [
            teacher.store(config, TrainingData(config, datasets), Path())[0].folder
            for seed in (0, 1)
            for config in [configs(**keys, seed=seed, teacher_top_k=2)]
        ]
        assert (found[0] == found[1]) == ("windows" not in keys and "dataset" not in keys)
    data = training_data(datasets, **RANDOM, epochs=2)
    assert data.distinct_sequences == 2 * data.steps_per_epoch * A * B
    indices = np.arange(data.distinct_sequences).reshape(1, -1)
    assert data.read_tokens(indices).inputs_ABS[0, :, 0].tolist() == first_tokens(data)


def test_the_plan_counts_their_tokens(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    run = make_run(tmp_path / "planned", **RANDOM, epochs=3, min_train_tokens=-1)
    dataset = Dataset("tiny", tmp_path / "tiny")
    tokens: Tokens = _tokens(run, load_run(run.path), {"tiny": dataset})
    per_epoch = (20_000 - 1) // 16 // 8
    assert tokens.steps == 3 * per_epoch
    assert tokens.planned == 3 * per_epoch * 128
