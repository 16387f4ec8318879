"""Mixtures whose weights change during training."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from rungs.planning import forecast
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.resume import refuse_changes
from rungs.training.start import launch
from tests.support.tiny_run import (
    assert_same_outcome,
    change,
    last_checkpoint,
    make_dataset,
    make_run,
)
from tests.support.token_datasets import A, B, S, configs, first_tokens, training_data

TWO = [
    {"until": 0.75, "weights": {"x": 1}},
    {"until": 1, "weights": {"x": 1, "y": 2, "z": 1}},
]
THREE = [
    {"until": 0.3, "weights": {"y": 3, "x": 1}},
    {"until": 0.5, "weights": {"z": 1, "y": 0.5}},
    {"until": 1.0, "weights": {"x": 1, "y": 1}},
]
NAMES = "xyz"


def sources(data: TrainingData) -> list[str]:
    """Return the dataset of each sequence, in order."""
    return [NAMES[token // 10_000] for token in first_tokens(data)]


def indices(data: TrainingData, name: str) -> list[int]:
    """Return the index in its dataset of each sequence of one, in order."""
    start = 10_000 * NAMES.index(name)
    tokens = first_tokens(data)
    return [(token - start) // S for token in tokens if token // 10_000 == NAMES.index(name)]


@pytest.mark.parametrize("steps", [7, 16])
@pytest.mark.parametrize("phases", [TWO, THREE])
def test_each_phase_has_its_weights(
    datasets: dict[str, Dataset], phases: list[Any], steps: int
) -> None:
    data = training_data(datasets, dataset=phases, max_steps=steps)
    found, begin = sources(data), 0
    assert len(found) == steps * A * B
    for phase in phases:
        end = int(phase["until"] * steps + 1e-9) * A * B
        part, total = found[begin:end], sum(phase["weights"].values())
        for length in range(1, len(part) + 1):
            counts = Counter(part[:length])
            for name in NAMES:
                expected = length * phase["weights"].get(name, 0) / total
                assert abs(counts[name] - expected) < 2
        begin = end
    for name in {name for phase in phases for name in phase["weights"]}:
        assert indices(data, name) == list(range(found.count(name)))  # each goes on where it was
    for step in (0, 1, steps // 2, steps):
        counts = Counter(found[: step * A * B])
        assert data.dataset_tokens(step) == {
            name: S * counts[name] for name in data.datasets if name in "".join(found)
        }


def test_a_run_is_as_long_as_its_first_dataset_lasts_in_each_epoch(
    datasets: dict[str, Dataset],
) -> None:
    once = training_data(datasets, dataset=TWO)
    counts = Counter(sources(once))
    lengths = {"x": 124, "y": 374, "z": 49}
    assert all(counts[name] <= lengths[name] for name in NAMES)
    per_step = A * B
    longer = once.total_steps + 1
    share = longer * per_step * (0.75 + 0.25 / 4)
    assert share > lengths["x"]
    tiny = [{"until": 0.9, "weights": {"y": 1}}, {"until": 1, "weights": {"p": 1}}]
    data = training_data(datasets, dataset=tiny, microbatch_size=100, gradient_accumulation_steps=1)
    assert data.total_steps == 4  # the last of which is "p"
    with pytest.raises(UserError, match="there are 0 sequences of 8 tokens until the first"):
        training_data(datasets, dataset=tiny, microbatch_size=101, gradient_accumulation_steps=1)
    thrice = training_data(datasets, dataset=TWO, epochs=3)
    assert thrice.total_steps == 3 * once.total_steps
    assert max(Counter(indices(thrice, "x")).values()) == 3
    with pytest.raises(UserError, match="but one epoch has"):
        training_data(datasets, dataset=TWO, min_train_tokens=10**5)


def test_a_dataset_is_shuffled_anew_each_time(datasets: dict[str, Dataset]) -> None:
    data = training_data(datasets, dataset=TWO, shuffle=True, epochs=2)
    found = indices(data, "x")
    first, second = found[:124], found[124:]
    assert sorted(first) == list(range(124))
    assert first != list(range(124))
    assert second != first[: len(second)]
    assert len(set(second)) == len(second)
    assert sources(data) == sources(training_data(datasets, dataset=TWO, epochs=2))


def test_a_batch_depends_on_its_step_only(datasets: dict[str, Dataset]) -> None:
    keys = {"dataset": THREE, "shuffle": True, "epochs": 2, "batch_growth": {"3": 2}}
    data = training_data(datasets, **keys)
    steps = [data.batch(step).inputs_ABS for step in range(data.total_steps)]
    for first in (2, data.total_steps - 1):
        again = training_data(datasets, **keys).batches(first)
        for expected, batch in zip(steps[first:], again, strict=True):
            np.testing.assert_array_equal(batch.inputs_ABS, expected)


def test_validation_mixes_the_shares_of_the_run(datasets: dict[str, Dataset]) -> None:
    config = configs(dataset=TWO)
    assert config.train.datasets == pytest.approx({"x": 0.8125, "y": 0.125, "z": 0.0625})
    validation = ValidationData.of(config, datasets)
    assert validation is not None
    assert validation.datasets == ["x", "y"]


@pytest.mark.parametrize(
    ("dataset", "more", "line"),
    [
        ([], {}, r"dataset: \[\] is not allowed"),
        ([{"until": 0.5, "weights": {"x": 1}}], {}, "dataset: until: 0.5: must rise to 1, as in"),
        (TWO[::-1], {}, "dataset: until: 1, 0.75: must rise"),
        ([{"until": 1, "weights": {}}], {}, r"dataset\.0\.weights"),
        ([{"until": 1.5, "weights": {"x": 1}}], {}, r"dataset\.0\.until: 1.5 is not allowed"),
        ([{"til": 1, "weights": {"x": 1}}], {}, "until"),
        (TWO, {"max_minutes": 3}, "max_minutes: dataset has phases, which need a known length"),
    ],
)
def test_what_phases_cannot_be_is_said(dataset: Any, more: Any, line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", dataset=dataset, **more)
    with pytest.raises(UserError, match=line):
        run_config.load_run(run.path)


def phases_of(*names: str) -> list[dict[str, Any]]:
    first, second = names
    late = {"until": 1, "weights": {first: 1, second: 3}}
    return [{"until": 0.5, "weights": {first: 1}}, late]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("datasets")
    make_dataset(place)
    make_dataset(place, "good", seed=1)
    return place


def test_the_plan_says_what_is_read(tmp_path: Path, place: Path) -> None:
    run = make_run(tmp_path / "run", dataset=phases_of("tiny", "good"), max_steps=16)
    config = run_config.load_run(run.path)
    datasets = {name: Dataset(name, place / name) for name in ("tiny", "good")}
    tokens = forecast._tokens(run, config, datasets)
    assert tokens.of_datasets == {"tiny": 10 * 128, "good": 6 * 128}


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_and_counts_its_tokens(tmp_path: Path, place: Path) -> None:
    def go(run: RunFolder) -> None:
        assert launch(run, run_config.load_run(run.path), StartOptions(), on_datasets(place)) == 0

    keys = {"dataset": phases_of("tiny", "good"), "max_steps": 12, "shuffle": True}
    whole = make_run(tmp_path / "whole", **keys, keep_checkpoints=-1)
    go(whole)
    resumed = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "resumed", symlinks=True)))
    shutil.rmtree(last_checkpoint(resumed).folder)
    go(resumed)
    assert_same_outcome(resumed, whole)
    steps = metrics.read(whole.metrics)
    assert [step.dataset_tokens for step in steps][5:7] == [
        {"tiny": 768, "good": 0},
        {"tiny": 768 + 32, "good": 96},
    ]
    saved = last_checkpoint(whole).meta
    assert saved.train["dataset"] == json.loads(json.dumps(keys["dataset"]))
    change(whole, max_steps=20)
    with pytest.raises(UserError, match=r"max_steps: was 12 .*; change it back, start another"):
        refuse_changes(saved, run_config.load_run(whole.path), whole, extend=True)
