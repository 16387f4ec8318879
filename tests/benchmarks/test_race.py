"""The sides of a race have valid configs of one size; its table says when a loss was reached."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.racing.chart import race_chart
from benchmarks.racing.results import Curve, Result
from benchmarks.racing.sides import (
    GPT2,
    RECIPE,
    RECIPE_MODEL,
    RECIPE_TRAIN,
    SIZES,
    Entry,
    configs,
)
from rungs.config.run_config import load_run
from rungs.planning.flops import count_parameters
from rungs.step.state import shapes_of
from tests.support.committed_runs import ROOT
from tests.support.recorded_runs import record_run, step


@pytest.mark.parametrize("size", SIZES)
def test_configs_are_valid_and_their_matmuls_of_one_size(size: str, tmp_path: Path) -> None:
    matmuls = []
    for side in (GPT2, RECIPE):
        folder = tmp_path / side
        folder.mkdir()
        found = configs(Entry(side, 5.0, 1, 0.002), SIZES[size])
        for name, keys in zip(("model.json", "train.json"), found, strict=True):
            (folder / name).write_text(json.dumps(keys))
        config = load_run(folder)
        assert (config.train.max_minutes, config.train.seed) == (5.0, 1)
        assert config.train.sequences_per_step == SIZES[size].sequences
        counts = count_parameters(shapes_of(config.model, None))
        matmuls.append((counts.attention, counts.feed_forward, counts.head))
    np.testing.assert_allclose(matmuls[1], matmuls[0], rtol=0.01)


def test_the_recipe_is_that_of_the_committed_run() -> None:
    for file, keys in (("model.json", RECIPE_MODEL), ("train.json", RECIPE_TRAIN)):
        committed = json.loads((ROOT / "runs/recipe" / file).read_text())
        assert {key: committed.get(key) for key in keys} == keys


def test_when_a_loss_was_reached() -> None:
    curve = Curve(np.array([1.0, 2.0, 4.0]), np.array([5.0, 4.0, 3.0]), 30)
    assert curve.minutes_to(3.5) == 3
    assert curve.minutes_to(6.0) == 1
    assert curve.minutes_to(2.9) is None


def test_the_minutes_of_a_run_begin_after_its_first_step(tmp_path: Path) -> None:
    losses = {0: 9.0, 2: 5.0}
    steps = [
        step(
            number, step_seconds=100.0 if number == 0 else 30.0, validation_loss=losses.get(number)
        )
        for number in range(4)
    ]
    curve = Curve.of_run(record_run(tmp_path / "run", steps) / "metrics.jsonl")
    assert curve.minutes.tolist() == [0.0, 1.0]
    assert curve.losses.tolist() == [9.0, 5.0]
    assert curve.steps == 4


def test_a_row_and_the_chart_of_a_side(tmp_path: Path) -> None:
    lines = tmp_path / "pytorch.jsonl"
    rows = [{"seconds": 60.0 * n, "step": 10 * n, "loss": 6.0 - n} for n in range(1, 4)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = Curve.of_lines(lines)
    other = one._replace(losses=one.losses + 0.5)
    result = Result("pytorch", [one, other], bits_per_nat=0.5)
    name, bits, reached, steps = result.row(goal=3.25)
    assert (name, reached, steps) == ("pytorch", "2.75, never", "30, 30")
    assert bits.startswith("1.6250 ± ")
    assert race_chart("A race", [result], goal=1.8).axes[0].get_ylabel().startswith("bits per byte")
