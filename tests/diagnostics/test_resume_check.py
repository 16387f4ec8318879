"""The smoke test of resuming without its processes: what is trained, what counts as the same."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.config import run_config
from rungs.config.train_config import TrainConfig
from rungs.diagnostics.resume_check.compare import (
    Account,
    TrainedRun,
    compare,
    open_datasets,
    shortened,
)
from rungs.diagnostics.resume_check.kill import EARLY, Killer, Sight, StepPlan
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepMetrics
from rungs.training import trainer
from smoke_tests.recording_train import watch_steps
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
    return shortened(run, configs, open_datasets(configs, datasets_dir), tokens).train


def test_a_run_is_cut_in_length_only(datasets_dir: Path, tmp_path: Path) -> None:
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


def test_pairs_are_not_cut_nor_more_steps_taken_than_there_are(
    datasets_dir: Path, tmp_path: Path
) -> None:
    train = short(datasets_dir, tmp_path, tokens=2, dataset="pairs", min_train_tokens=-1)
    assert train.sequence_length == 16
    assert train.min_train_tokens == 40 // 8 * 8 * 16
    assert train.checkpoint_interval == 1


def test_imported_weights_are_taken_from_where_they_are(datasets_dir: Path, tmp_path: Path) -> None:
    train = short(datasets_dir, tmp_path, start_from="imported")
    assert train.start_from == str(tmp_path / "run" / "checkpoints" / "imported")


STEP = StepMetrics(0, 8, 2.0, 0.1, 1.0, False, 0, 0.5, 16.0)
ARRAYS = {"b": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), "count": np.array(3)}
STRAIGHT = TrainedRun(
    step=2,
    parameters=ARRAYS,
    optimizer=ARRAYS,
    lines=3,
    metrics=[dataclasses.replace(STEP, global_step=step) for step in range(3)],
    accounts=[],
)


def account(folder: Path, text: str) -> Account:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text(text)
    return Account(path)


@pytest.fixture
def straight(tmp_path: Path) -> TrainedRun:
    return STRAIGHT._replace(accounts=[account(tmp_path, '"cpu"\n[0, "a"]\n[1, "b"]\n[2, "c"]\n')])


def differences(straight: TrainedRun, **changes: Any) -> dict[str, str]:
    found = compare(straight, straight._replace(**changes))
    return {finding.what: finding.difference for finding in found if finding.difference}


def test_what_is_the_same_is(straight: TrainedRun, tmp_path: Path) -> None:
    torn = account(tmp_path, '"cpu"\n[0, "a"]\n[1, "b"]\n[2, "')
    rest = account(tmp_path, '"cpu"\n[1, "b"]\n[2, "c"]\n')
    never = account(tmp_path, "")
    other_times = [dataclasses.replace(step, step_seconds=9.0) for step in straight.metrics]
    assert differences(straight, accounts=[torn, never, rest], metrics=other_times) == {}


def test_an_array_is_compared_by_its_bits(straight: TrainedRun) -> None:
    other = ARRAYS["b"].copy()
    other[1, 0] = np.nextafter(np.float32(3), np.float32(4))
    assert differences(straight, parameters=ARRAYS | {"b": other}) == {
        "parameters": "b[1, 0]: 3.0 straight, 3.0000002 killed; 1 of 4 elements differ"
    }
    assert differences(straight, optimizer=ARRAYS | {"count": np.array(4)}) == {
        "optimizer state": "count[]: 3 straight, 4 killed; 1 of 1 elements differ"
    }
    zeros = {"zero": np.array([0.0])}
    negative = {"zero": -zeros["zero"]}
    found = next(
        compare(straight._replace(parameters=zeros), straight._replace(parameters=negative))
    )
    assert found.difference == "zero[0]: 0.0 straight, -0.0 killed; 1 of 1 elements differ"
    assert differences(straight, parameters={"b": ARRAYS["b"]}) == {
        "parameters": "count: in one of the two only"
    }


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ('[1, "c"]\n', "step 1: process 1 of the killed run had another: that of step 2"),
        ('[1, "x"]\n', "step 1: process 1 of the killed run had another: one of no step"),
        ('[1, "b"]\n', "step 2: not taken in the killed run"),
    ],
)
def test_the_order_of_the_data_is_that_of_the_batches_taken(
    text: str, difference: str, straight: TrainedRun, tmp_path: Path
) -> None:
    assert differences(straight, accounts=[account(tmp_path, '"cpu"\n[0, "a"]\n' + text)]) == {
        "data order": difference
    }


def test_metrics_are_compared_step_by_step(straight: TrainedRun) -> None:
    one, two, three = straight.metrics
    cases = {
        "step 1 stands where step 2 should": [one, two, two, three],
        "step 2 stands where step 1 should": [one, three],
        "3 steps straight, 2 killed": [one, two],
        "step 1: train_loss: 2.0 straight, 2.5 killed": [
            one,
            dataclasses.replace(two, train_loss=2.5),
            three,
        ],
    }
    for difference, steps in cases.items():
        found = differences(straight, metrics=steps, lines=len(steps))
        assert found == {"metrics": difference}
    torn = differences(straight, lines=4)
    assert torn == {"metrics": "a line of the killed run cannot be read"}


def test_kills_are_spread_over_what_a_process_does(tmp_path: Path) -> None:
    killer = Killer(RunFolder(tmp_path), tmp_path, StepPlan(steps=14, interval=3), {}, [])
    phases = killer._phases(5)
    assert len(set(phases)) == 5
    assert [phase in EARLY for phase in phases] == [False, True] * 2 + [False]
    assert {str(Sight(phase, 6)) for phase in phases} == {
        "start, before anything was compiled",
        "compilation, before step 6",
        "step 6",
        "step 6 or its validation",
        "save of step 6",
    }


def test_what_spikes_are_skipped_by_is_no_part_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by losses, which need not be the same on an accelerator."""
    given = []
    monkeypatch.setattr(trainer, "make_train_step", lambda *_: lambda *args: given.append(args))
    watch_steps(tmp_path / "account")
    optimizer = nnx.Dict(step=nnx.Variable(jnp.asarray(7)))
    batch = jnp.zeros((1, 2, 3), int), jnp.ones((1, 2, 3), int)
    train_step = trainer.make_train_step(TrainConfig.model_construct())
    for limit in ((), (jnp.asarray(3.0),), (jnp.asarray(4.0),)):
        train_step(None, optimizer, *batch, *limit)
        assert len(given.pop()) == 4 + len(limit)
    account = Account(tmp_path / "account")
    assert account.batches[0][0] == 7
    assert len(account.batches) == 3
    assert len(set(account.batches)) == 1
