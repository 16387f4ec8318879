"""`batch_growth`: what each step sees, what it learns from it, and what is said about it."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.checks.resume import shorten_training
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import open_dataset
from rungs.data.tokens.loader import TrainingData
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import place_batch
from rungs.planning import report
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import StepResult
from rungs.training.resume import edit_to_extend
from rungs.training.run_length import RunLength
from tests.cli.test_plan import planned
from tests.support.configs import mesh_of, train_config
from tests.support.starting import go
from tests.support.tiny_run import (
    assert_same_outcome,
    change,
    change_model,
    last_checkpoint,
    make_run,
)

LENGTH, SEQUENCES, DATA = 16, 8, 20_000
GROWTH = {"3": 3}
FACTORS = [1, 1, 1, 3, 3, 3]
TOKENS = sum(FACTORS) * SEQUENCES * LENGTH
KEYS: dict[str, Any] = {
    "microbatch_size": SEQUENCES,
    "gradient_accumulation_steps": 1,
    "batch_growth": GROWTH,
    "min_train_tokens": TOKENS,
    "checkpoint_interval": 2,
    "drop_rate": 0.0,
    "shuffle": True,
    "keep_checkpoints": -1,
}


def data_of(run: RunFolder, datasets_dir: Path) -> TrainingData:
    datasets = {"tiny": open_dataset("tiny", datasets_dir, update=False)}
    return TrainingData(load_run(run.path), datasets)


def factor(step: int, growth: dict[str, int]) -> int:
    return [1, *(larger for first, larger in growth.items() if step >= int(first))][-1]


@pytest.mark.parametrize("growth", [{}, {"1": 3}, {"100": 2, "300": 4, "301": 9}])
def test_sequences_and_steps_are_counted(growth: dict[str, int]) -> None:
    train = train_config(batch_growth=growth, microbatch_size=3, gradient_accumulation_steps=2)
    ends = [0, *itertools.accumulate(6 * factor(step, growth) for step in range(400))]
    assert [train.sequences_before(step) for step in range(401)] == ends
    for count in range(0, ends[320], 5):
        assert train.steps_of(count) == np.searchsorted(ends, count, side="right") - 1


@pytest.mark.parametrize(
    ("growth", "line"),
    [
        ({"0": 2}, '.0: "0" is not allowed; must match'),
        ({"1.5": 2}, '.1.5: "1.5" is not allowed; must match'),
        ({"5": 1}, ".5: 1 is not allowed; must be at least 2"),
        ({"5": 2.5}, ".5: 2.5 is not allowed; must be of type integer"),
        ({"9": 2, "5": 4}, ": 9: 2, 5: 4: steps and factors must rise, as in 100: 2, 300: 4"),
        ({"5": 2, "9": 2}, ": 5: 2, 9: 2: steps and factors must rise, as in 100: 2, 300: 4"),
        ([[5, 2]], ": [[5, 2]] is not allowed; must be an object {…}"),
    ],
)
def test_what_does_not_grow_is_refused_in_one_line(growth: Any, line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", batch_growth=growth)
    with pytest.raises(UserError) as raised:
        load_run(run.path)
    (message,) = str(raised.value).splitlines()
    assert message.startswith(f"{run.path}/train.json: batch_growth{line}")


@pytest.mark.parametrize(
    ("shuffle", "epochs", "min_train_tokens"),
    [(False, 1, -1), (False, 3, TOKENS - 1), (True, 1, TOKENS - 1), (True, 3, -1)],
)
def test_each_step_sees_the_next_sequences_of_the_order(
    shuffle: bool, epochs: int, min_train_tokens: int, datasets_dir: Path, tmp_path: Path
) -> None:
    growth = {"2": 2, "5": 5, "30": 7}
    keys = {**KEYS, "shuffle": shuffle, "epochs": epochs, "min_train_tokens": min_train_tokens}
    keys |= {"batch_growth": growth, "microbatch_size": 4, "gradient_accumulation_steps": 2}
    data = data_of(make_run(tmp_path / "run", **keys), datasets_dir)

    sizes = [SEQUENCES * factor(step, growth) for step in range(1000)]
    ends = np.cumsum(sizes)
    available = (DATA - 1) // LENGTH
    in_epoch = (
        ends[ends * LENGTH >= TOKENS - 1][0]
        if min_train_tokens > 0
        else ends[ends <= available][-1]
    )
    ends = ends[ends <= epochs * in_epoch]
    one_by_one = {"batch_growth": {}, "microbatch_size": 1, "gradient_accumulation_steps": 1}
    one_by_one["min_train_tokens"] = int(in_epoch) * LENGTH
    single = data_of(make_run(tmp_path / "single", **keys | one_by_one), datasets_dir)
    order = [single.batch(index).inputs_ABS for index in range(single.total_steps)]
    text = open_dataset("tiny", datasets_dir, update=False).tokens("train")
    if not shuffle:
        order = [np.asarray(text[i % in_epoch * LENGTH :][:LENGTH]) for i in range(ends[-1])]

    assert (data.total_steps, data.total_tokens) == (len(ends), ends[-1] * LENGTH)
    for step, batch in enumerate(data.batches()):
        expected = np.reshape(order[ends[step] - sizes[step] : ends[step]], (-1, 4, LENGTH))
        np.testing.assert_array_equal(batch.inputs_ABS, expected)
        np.testing.assert_array_equal(data.batch(step).inputs_ABS, expected)
    with pytest.raises(IndexError):
        data.batch(len(ends))


def make(folder: Path, **changes: Any) -> RunFolder:
    return change_model(make_run(folder, **KEYS | changes), n_layers=1)


@pytest.fixture(scope="module")
def grown(datasets_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = make(tmp_path_factory.mktemp("grown") / "run")
    assert go(run, datasets_dir) == 0
    return run


def losses(run: RunFolder) -> list[float | None]:
    return [step.train_loss for step in metrics.read(run.metrics)]


def test_its_losses_are_those_of_the_same_steps_by_hand(
    grown: RunFolder, datasets_dir: Path
) -> None:
    """By hand: a step of a run that doesn't grow, on as many of the next sequences."""
    config = last_checkpoint(grown).meta.run_config()
    assert isinstance(config.train, TrainConfig)
    train = config.train.model_copy(update={"batch_growth": {}})
    data, mesh = data_of(grown, datasets_dir), mesh_of(8)
    same = RunConfig(config.model, train)
    model, optimizer = create_model_and_optimizer(same, len(FACTORS), mesh)
    step = make_train_step(train, mesh)
    found = metrics.read(grown.metrics)
    assert len(found) == data.total_steps == len(FACTORS)
    seen = 0
    for record, times in zip(found, FACTORS, strict=True):
        inputs_ABS, targets_ABS, _ = data.batch(record.global_step)
        assert inputs_ABS.shape == (times, SEQUENCES, LENGTH)
        result = StepResult(*step(model, optimizer, *place_batch(mesh, inputs_ABS, targets_ABS)))
        assert record.train_loss == result.loss
        assert record.gradient_norm == float(result.gradient_norm)
        seen += inputs_ABS.size
        assert record.tokens_seen == seen
        own = record.tokens_per_second * record.step_seconds
        assert own == pytest.approx(inputs_ABS.size)
    assert seen == TOKENS


def test_it_resumes_bit_for_bit_across_a_growth(
    grown: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    resumed = RunFolder(tmp_path / "resumed")
    shutil.copytree(grown.path, resumed.path, symlinks=True)
    assert go(resumed, datasets_dir, rewind_to="2") == 0
    assert_same_outcome(resumed, grown)


@pytest.mark.long
def test_the_growth_of_a_run_may_not_change_but_its_microbatches_may(
    grown: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    resumed = RunFolder(tmp_path / "resumed")
    shutil.copytree(grown.path, resumed.path, symlinks=True)
    change(resumed, batch_growth={"3": 2})
    with pytest.raises(UserError, match=r"batch_growth: was .* change it back"):
        go(resumed, datasets_dir)
    change(resumed, batch_growth=GROWTH, microbatch_size=4, gradient_accumulation_steps=2)
    assert go(resumed, datasets_dir, rewind_to="4") == 0
    before, after = (metrics.read(run.metrics) for run in (grown, resumed))
    assert [step.tokens_seen for step in after] == [step.tokens_seen for step in before]
    assert losses(resumed) == pytest.approx(losses(grown), rel=1e-4)


@pytest.mark.long
def test_in_fsdp_it_has_the_losses_of_dp(
    grown: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = make(tmp_path / "run", sharding={"mode": "fsdp", "data": 8})
    assert go(run, datasets_dir) == 0
    assert losses(run) == pytest.approx(losses(grown), rel=1e-4)


def test_more_tokens_or_epochs_only_add_steps(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **KEYS | {"shuffle": False})
    short = data_of(run, datasets_dir)
    edit = edit_to_extend(load_run(run.path), short, short.total_steps)
    assert edit == f"set min_train_tokens to {TOKENS + 6 * 3 * SEQUENCES * LENGTH} in train.json"
    for keys in ({"min_train_tokens": int(edit.split()[3])}, {"epochs": 3}):
        change(run, **{"min_train_tokens": TOKENS, **keys})
        longer = data_of(run, datasets_dir)
        assert longer.total_steps > short.total_steps
        for step in range(short.total_steps):
            found, expected = (data.batch(step).inputs_ABS for data in (longer, short))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("shared_traces")
def test_a_plan_counts_its_tokens_and_has_memory_for_the_largest_step(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **KEYS)
    found = planned(run, sharding="fsdp:2", datasets_dir=datasets_dir)
    assert (found.tokens.steps, found.tokens.planned) == (6, TOKENS)
    assert found.seconds_left == TOKENS / found.throughput.tokens_per_second  # type: ignore[union-attr]
    text = report.as_text(run, found)
    assert "× 1 to 3 microbatches × 16 tokens = 128 to 384 tokens\n" in text
    assert f"run       6 steps = {TOKENS:,} tokens\n" in text
    change(run, batch_growth={}, gradient_accumulation_steps=3)
    largest = planned(run, sharding="fsdp:2", datasets_dir=datasets_dir)
    assert found.memory == largest.memory
    assert found.step_flops == largest.step_flops


def test_the_time_left_and_the_resume_check_know_that_steps_grow(
    datasets_dir: Path, tmp_path: Path
) -> None:
    config = load_run(make_run(tmp_path / "run", **KEYS).path)
    length = RunLength(6, config.train)
    assert length.work(2, 6) == SEQUENCES * (1 + 3 * 3)
    assert length.end(2, SEQUENCES * 10) == 6
    assert length.end(2, SEQUENCES * 9.9) == 5
    datasets = {"tiny": open_dataset("tiny", datasets_dir, update=False)}
    short = shorten_training(RunFolder(tmp_path / "run"), config, datasets, LENGTH)
    assert isinstance(short.config.train, type(config.train))
    assert short.steps > int(min(short.config.train.batch_growth, key=int)) + 4
