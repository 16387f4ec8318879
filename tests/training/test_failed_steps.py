"""Failed steps are saved and read back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from rungs.checkpointing.starting_point import Start
from rungs.config.run_config import load_run
from rungs.config.sharding_config import ShardingConfig
from rungs.data.catalog import open_dataset
from rungs.data.tokens.loader import TrainingData
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.failed_steps import MAX_FAILED_STEPS, FailedSteps, open_failed_step
from rungs.training.run_length import RunLength
from tests.support.tiny_run import make_dataset, make_run

BAD = {1: "the loss"}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture
def data(run: RunFolder, datasets_dir: Path) -> TrainingData:
    config = load_run(run.path)
    return TrainingData(config, {"tiny": open_dataset("tiny", datasets_dir, update=False)})


@pytest.fixture
def recorder(run: RunFolder, data: TrainingData) -> FailedSteps:
    def batch(step: int) -> dict[str, np.ndarray]:
        arrays = data.batch(step)._asdict()
        return {name: array for name, array in arrays.items() if array is not None}

    learner: Any = SimpleNamespace(
        model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        optimizer=SimpleNamespace(wrt=nnx.Param),
        batch=batch,
    )
    return FailedSteps(
        Start(run, load_run(run.path), StartOptions(), None, None),
        RunLength(data.total_steps),
        learner,
        SimpleNamespace(wait=lambda: None),  # type: ignore[arg-type]
        ShardingConfig(mode="fsdp", data=2, tensor=1),
        (),
    )


def test_a_saved_step_is_read_back(
    run: RunFolder, data: TrainingData, recorder: FailedSteps
) -> None:
    skipped: Any = SimpleNamespace(loss=9.0, trained_loss=9.0, skipped=True, nonfinite=lambda _: {})
    recorder.note(3, skipped)
    message = recorder.record(7, BAD)
    assert message == f"to replay it: uv run train.py {run.path} --replay step-000007"
    failed = open_failed_step(run, "step-000007")
    assert (failed.meta.global_step, failed.meta.total_steps) == (7, 24)
    assert (failed.meta.bad, failed.meta.skipped_steps) == (BAD, [3])
    assert failed.meta.sharding == ShardingConfig(mode="fsdp", data=2, tensor=1)
    assert failed.config == load_run(run.path)
    assert failed.checkpoint is None
    for name, found in failed.batch.items():
        np.testing.assert_array_equal(found, getattr(data.batch(7), name))
    assert failed.batch.keys() == {"inputs_ABS", "targets_ABS"}
    assert open_failed_step(run, str(failed.folder)).meta == failed.meta


def test_only_the_first_failed_steps_are_saved(run: RunFolder, recorder: FailedSteps) -> None:
    for step in range(MAX_FAILED_STEPS):
        recorder.record(step, BAD)
    refused = recorder.record(MAX_FAILED_STEPS, BAD)
    assert refused == f"not saved for replay: there are {MAX_FAILED_STEPS} failed steps already"
    assert len(list(run.failed_steps.iterdir())) == MAX_FAILED_STEPS
    assert recorder.record(4, BAD).endswith("--replay step-000004")
