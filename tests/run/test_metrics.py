"""`metrics.jsonl`: each step exactly once, also if a crash has torn the last line."""

import json
import math
from pathlib import Path

import pytest

from rungs.run import metrics
from rungs.run.metrics import MetricsLog, StepMetrics


def step(number: int, loss: float | None = 1.5, validation: float | None = None) -> StepMetrics:
    return StepMetrics(
        number, 100 * number, loss, 1e-3, 0.25, False, 0, 0.5, 200.0, validation_loss=validation
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_appended_steps_are_read_back_bit_for_bit(path: Path) -> None:
    steps = [step(0, loss=0.1 + 0.2), step(1, validation=1 / 3), step(2, loss=None)]
    with MetricsLog(path, -1, StepMetrics) as log:
        for one in steps:
            log.append(one)
        assert metrics.read(path) == steps
    assert "validation_loss" not in json.loads(path.read_text().splitlines()[0])


def test_numbers_that_are_not_finite_are_written_as_null(path: Path) -> None:
    with MetricsLog(path, -1, StepMetrics) as log:
        log.append(step(0, loss=math.nan))
    assert json.loads(path.read_text())["train_loss"] is None


@pytest.mark.parametrize("torn", ['{"global_step": 2, "tok', "\0\0\0", "[1]", "7"])
def test_a_torn_last_line_is_not_read_and_is_removed_on_reopening(path: Path, torn: str) -> None:
    with MetricsLog(path, -1, StepMetrics) as log:
        log.append(step(0))
        log.append(step(1))
    path.write_text(path.read_text() + torn)
    assert metrics.read(path) == [step(0), step(1)]
    with MetricsLog(path, 1, StepMetrics) as log:
        log.append(step(2))
    assert metrics.read(path) == [step(0), step(1), step(2)]


def test_reopening_drops_steps_after_the_checkpoint(path: Path) -> None:
    with MetricsLog(path, -1, StepMetrics) as log:
        for number in range(5):
            log.append(step(number))
    with MetricsLog(path, 2, StepMetrics) as log:
        log.append(step(3, loss=9.0))
    assert metrics.read(path) == [step(0), step(1), step(2), step(3, loss=9.0)]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_keys_of_another_version_are_ignored(path: Path) -> None:
    path.write_text(json.dumps(json.loads(step(0).as_line()) | {"of_a_later_version": [1]}) + "\n")
    assert metrics.read(path) == [step(0)]
