"""The resume check without its processes: the short run, and the comparison."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.checks.check import failures
from rungs.checks.resume import BatchLog, TrainedRun, compare, shorten_training
from rungs.config import run_config
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import open_datasets
from rungs.run.metrics import StepMetrics
from rungs.training import dataset_learner
from smoke_tests.train_with_batch_log import log_batches
from tests.support.tiny_run import make_dataset, make_pairs, make_run

SHARDING = {"mode": "fsdp", "data": 2}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    make_dataset(folder, "other", seed=1)
    make_pairs(folder)
    return folder


def short(datasets_dir: Path, folder: Path, tokens: int = 8, **train: Any) -> TrainConfig:
    run = make_run(folder / "run", **train)
    configs = run_config.load_run(run.path)
    datasets = open_datasets(configs.train.datasets, datasets_dir)
    short = shorten_training(run, configs, datasets, tokens)
    assert isinstance(short.config.train, TrainConfig)
    return short.config.train


def test_only_the_length_of_a_run_is_changed(datasets_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "dataset": {"tiny": 2, "other": 1},
        "shuffle": True,
        "sharding": SHARDING,
    }
    train = short(datasets_dir, tmp_path, gradient_accumulation_steps=8, epochs=5, **settings)
    assert (train.epochs, train.min_train_tokens) == (2, 7 * 4 * 2 * 8)
    assert (train.sequence_length, train.gradient_accumulation_steps) == (8, 2)
    assert (train.checkpoint_interval, train.validation_tokens) == (3, 4 * 4 * 8)
    assert (train.microbatch_size, train.drop_rate) == (4, 0.1)
    kept = {key: value for key, value in train.as_json().items() if key in settings}
    assert kept["dataset"] == settings["dataset"]
    assert kept["sharding"]["mode"] == "fsdp"


def test_pairs_are_not_cut_and_steps_not_invented(datasets_dir: Path, tmp_path: Path) -> None:
    train = short(datasets_dir, tmp_path, tokens=2, dataset="pairs", min_train_tokens=-1)
    assert train.sequence_length == 16
    assert train.min_train_tokens == 40 // 8 * 8 * 16
    assert train.checkpoint_interval == 1


def test_imported_weights_are_read_from_the_original_run(
    datasets_dir: Path, tmp_path: Path
) -> None:
    train = short(datasets_dir, tmp_path, start_from="imported")
    assert train.start_from == str(tmp_path / "run" / "checkpoints" / "imported")


STEP = StepMetrics(0, 8, 2.0, 0.1, 1.0, False, 0, 0.5, 16.0)
ARRAYS = {"b": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), "count": np.array(3)}
UNINTERRUPTED = TrainedRun(
    step=2,
    parameters=ARRAYS,
    optimizer=ARRAYS,
    lines=3,
    metrics=[dataclasses.replace(STEP, global_step=step) for step in range(3)],
    texts={},
    batch_logs=[],
)


def batch_log(folder: Path, text: str) -> BatchLog:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text(text)
    return BatchLog(path)


@pytest.fixture
def uninterrupted(tmp_path: Path) -> TrainedRun:
    return UNINTERRUPTED._replace(
        batch_logs=[batch_log(tmp_path, '"cpu"\n[0, "a"]\n[1, "b"]\n[2, "c"]\n')]
    )


def differences(uninterrupted: TrainedRun, **changes: Any) -> dict[str, str]:
    found = compare(uninterrupted, uninterrupted._replace(**changes))
    return {check.name: check.notes[0] for check in failures(found)}


def test_identical_runs_have_no_differences(uninterrupted: TrainedRun, tmp_path: Path) -> None:
    torn = batch_log(tmp_path, '"cpu"\n[0, "a"]\n[1, "b"]\n[2, "')
    rest = batch_log(tmp_path, '"cpu"\n[1, "b"]\n[2, "c"]\n')
    never = batch_log(tmp_path, "")
    other_times = [dataclasses.replace(step, step_seconds=9.0) for step in uninterrupted.metrics]
    assert differences(uninterrupted, batch_logs=[torn, never, rest], metrics=other_times) == {}


def test_arrays_are_compared_bit_by_bit(uninterrupted: TrainedRun) -> None:
    other = ARRAYS["b"].copy()
    other[1, 0] = np.nextafter(np.float32(3), np.float32(4))
    assert differences(uninterrupted, parameters=ARRAYS | {"b": other}) == {
        "parameters": "b[1, 0]: 3.0 uninterrupted, 3.0000002 killed; 1 of 4 elements differ"
    }
    assert differences(uninterrupted, optimizer=ARRAYS | {"count": np.array(4)}) == {
        "optimizer state": "count[]: 3 uninterrupted, 4 killed; 1 of 1 elements differ"
    }
    zeros = {"zero": np.array([0.0])}
    negative = {"zero": -zeros["zero"]}
    assert differences(uninterrupted._replace(parameters=zeros), parameters=negative) == {
        "parameters": "zero[0]: 0.0 uninterrupted, -0.0 killed; 1 of 1 elements differ"
    }
    assert differences(uninterrupted, parameters={"b": ARRAYS["b"]}) == {
        "parameters": "count: in only one of the two"
    }


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ('[1, "c"]\n', "step 1: process 1 of the killed run took the batch of step 2"),
        ('[1, "x"]\n', "step 1: process 1 of the killed run took an unknown batch"),
        ('[1, "b"]\n', "step 2: missing in the killed run"),
    ],
)
def test_data_order_is_compared_by_batch(
    text: str, difference: str, uninterrupted: TrainedRun, tmp_path: Path
) -> None:
    assert differences(
        uninterrupted, batch_logs=[batch_log(tmp_path, '"cpu"\n[0, "a"]\n' + text)]
    ) == {"data order": difference}


def test_metrics_are_compared_step_by_step(uninterrupted: TrainedRun) -> None:
    one, two, three = uninterrupted.metrics
    cases = {
        "step 1 in the place of step 2": [one, two, two, three],
        "step 2 in the place of step 1": [one, three],
        "3 steps uninterrupted, 2 killed": [one, two],
        "step 1: train_loss: 2.0 uninterrupted, 2.5 killed": [
            one,
            dataclasses.replace(two, train_loss=2.5),
            three,
        ],
    }
    for difference, steps in cases.items():
        found = differences(uninterrupted, metrics=steps, lines=len(steps))
        assert found == {"metrics": difference}
    torn = differences(uninterrupted, lines=4)
    assert torn == {"metrics": "the killed run has an unreadable line"}


def test_the_loss_limit_is_not_part_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit depends on losses, which can differ on an accelerator."""
    given = []
    monkeypatch.setattr(
        dataset_learner, "make_step", lambda: lambda *args, **limit: given.append((*args, *limit))
    )
    log_batches(tmp_path / "batches", dataset_learner)
    optimizer = nnx.Dict(step=nnx.Variable(jnp.asarray(7)))
    batch = jnp.zeros((1, 2, 3), int), jnp.ones((1, 2, 3), int)
    step = cast(Any, dataset_learner.make_step)()
    for limit in ({}, {"loss_limit": jnp.asarray(3.0)}, {"loss_limit": jnp.asarray(4.0)}):
        step(None, optimizer, *batch, **limit)
        assert len(given.pop()) == 4 + len(limit)
    log = BatchLog(tmp_path / "batches")
    assert log.batches[0][0] == 7
    assert len(log.batches) == 3
    assert len(set(log.batches)) == 1
