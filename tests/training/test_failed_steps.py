"""Loss spikes; failed steps are saved and read back."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from rungs.checkpointing.load import Start
from rungs.config.run_config import load_run
from rungs.config.sharding_config import ShardingConfig
from rungs.data.catalog import open_dataset
from rungs.data.tokens.loader import TrainingData
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepMetrics
from rungs.training.failed_steps import (
    MAX_FAILED_STEPS,
    MIN_STEPS,
    WINDOW_STEPS,
    FailedSteps,
    LossSpikeDetector,
    open_failed_step,
)
from rungs.training.run_length import RunLength
from tests.support.tiny_run import make_run

BAD = {1: "the loss"}


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


def taken(number: int, loss: float | None) -> StepMetrics:
    return StepMetrics(number, 0, loss, 1e-3, 1.0, False, 0, 1.0, 1.0)


def after(losses: Sequence[float | None]) -> LossSpikeDetector:
    return LossSpikeDetector((taken(step, loss) for step, loss in enumerate(losses)))


def noisy(count: int) -> list[float]:
    return list(np.random.default_rng(0).normal(2.0, 0.01, count) + np.linspace(1, 0, count))


def test_the_limit_is_six_deviations_above_the_median_of_the_window() -> None:
    losses = noisy(300)
    deviating = [*losses[:200], *(np.random.default_rng(1).normal(2.0, 0.5, 100))]
    # the limit does not use the step just before
    window = np.array(deviating[299 - 1 - WINDOW_STEPS : 299 - 1])
    median = np.sort(window)[WINDOW_STEPS // 2 - 1 : WINDOW_STEPS // 2 + 1].mean()
    distances = np.sort(np.abs(window - median))
    mad = distances[WINDOW_STEPS // 2 - 1 : WINDOW_STEPS // 2 + 1].mean()
    assert 6 * 1.4826 * mad > 0.5 * median
    limit = after(deviating[:299]).loss_limit(299)
    assert limit == pytest.approx(median + 6 * 1.4826 * mad, rel=1e-12)
    # if losses hardly differ, the limit is one and a half times their median
    assert after(losses).loss_limit(300) == pytest.approx(1.5 * np.median(losses[171:299]))


def test_near_zero_the_limit_is_a_tenth_of_a_nat_above_the_median() -> None:
    losses = list(np.abs(np.random.default_rng(0).normal(0.002, 0.0002, 200)))
    median = float(np.median(losses[200 - 2 - WINDOW_STEPS + 1 : 199]))
    assert after(losses).loss_limit(200) == pytest.approx(0.1 + median)


def test_the_limit_does_not_depend_on_the_unread_step_before() -> None:
    losses = noisy(200)
    for step in (40, 150, 199):
        assert after(losses[:step]).loss_limit(step) == after(losses[: step - 1]).loss_limit(step)
    assert after(losses[:150]).loss_limit(150) != after(losses[:150]).loss_limit(149)


def test_early_steps_have_no_limit_and_a_spike_does_not_hide_the_next() -> None:
    losses: list[float | None] = list(noisy(MIN_STEPS))
    assert after(losses).loss_limit(MIN_STEPS) == math.inf
    assert after([*losses, None, 2.0]).loss_limit(MIN_STEPS + 2) < 6
    spiked: list[float | None] = [*noisy(100), 300.0, 2.0, 2.0]
    assert after(spiked).loss_limit(103) < 6
