"""Right answers by minute: read from the steps of finished runs, and drawn."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks import answers
from benchmarks.gpu_parts import committed_run
from tests.support.policy_steps import step, validation


def finish(run: Path) -> None:
    """Write the metrics of a run of reinforcement learning instead of training it."""
    seed = json.loads((run / "reinforce.json").read_text())["seed"]
    steps = [
        step(0, start_validation=validation(0.25)),
        step(1, validation=validation(0.5 + seed / 4)),
    ]
    (run / "metrics.jsonl").write_text("".join(one.as_line() for one in steps))


def test_minutes_and_answers_of_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        committed_run, "train", lambda run: finish(run) if "-rl-" in run.name else None
    )
    curves = answers.trained("parity", seeds=2, into=tmp_path)
    expected = np.asarray([[[0, 1 / 60], [25, 50]], [[0, 1 / 60], [25, 75]]])
    np.testing.assert_allclose(curves, expected)
    start = json.loads((tmp_path / "parity-rl-seed-1" / "reinforce.json").read_text())["start_from"]
    assert Path(start) == tmp_path / "parity-pretrain"
    answers.chart({"parity": curves}).savefig(tmp_path / "answers.png")
    assert imread(tmp_path / "answers.png").std() > 0
