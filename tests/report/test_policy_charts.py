"""Charts of reinforcement learning."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rungs.report import run_charts
from rungs.report.run_charts import (
    POLICY_CHARTS,
    STEP_CHARTS,
    groups_chart,
    log_prob_chart,
    reward_chart,
)
from rungs.run.metrics import PolicyMetrics
from rungs.run.recorded_run import RecordedPolicyRun
from tests.support.policy_steps import step, validation
from tests.support.tiny_reinforcement import MODEL, REINFORCE


def recorded(folder: Path, steps: list[PolicyMetrics]) -> RecordedPolicyRun:
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "reinforce.json").write_text(json.dumps(REINFORCE | {"start_from": "x"}))
    (folder / "metrics.jsonl").write_text("".join(one.as_line() for one in steps))
    return RecordedPolicyRun.load(folder)


def labels(figure: Figure) -> set[str]:
    return {text.get_text().strip() for text in figure.legends[0].get_texts()}


def test_all_charts_are_drawn(tmp_path: Path) -> None:
    recorded(tmp_path / "run", [step(number) for number in range(30)])
    written = run_charts.draw_run(tmp_path / "run")
    assert {path.name for path in written} == {*POLICY_CHARTS, *STEP_CHARTS}
    assert "loss-chart.png" not in {path.name for path in written}


def test_a_single_step_can_be_drawn(tmp_path: Path) -> None:
    recorded(tmp_path / "run", [step(0, start_validation=validation(0.4))])
    assert len(run_charts.draw_run(tmp_path / "run")) == len(POLICY_CHARTS) + len(STEP_CHARTS)


def test_the_reward_chart_shows_held_out_items_beside_the_start(tmp_path: Path) -> None:
    steps = [step(number) for number in range(30)]
    steps[0] = step(0, start_validation=validation(0.3), validation=validation(0.35))
    steps[20] = step(20, validation=validation(0.8))
    figure = reward_chart(recorded(tmp_path / "run", steps))
    wanted = {"pass@1 on held-out items", "its 95% interval", "pass@2", "pass@1 of the start"}
    assert wanted < labels(figure)
    lines = {tuple(np.asarray(line.get_ydata()).tolist()) for line in figure.axes[0].get_lines()}
    assert (0.3, 0.35, 0.8) in lines
    assert (0.3, 0.3) in lines


def test_parts_of_the_reward_have_a_line_each(tmp_path: Path) -> None:
    parts = {"correct": 0.5, "brief": 0.1}
    figure = reward_chart(recorded(tmp_path / "run", [step(n, rewards=parts) for n in range(9)]))
    assert {"reward correct", "reward brief"} < labels(figure)


def test_groups_fill_the_chart(tmp_path: Path) -> None:
    figure = groups_chart(recorded(tmp_path / "run", [step(number) for number in range(30)]))
    patches: list[Any] = list(figure.axes[0].patches)
    tops = [float(patch.get_data().values.max()) for patch in patches]
    assert tops == [0.5, 0.75, 1.0]


def test_a_divergence_from_the_reference_is_shown_if_there_is_one(tmp_path: Path) -> None:
    name = "KL divergence from the reference"
    assert name not in labels(log_prob_chart(recorded(tmp_path / "a", [step(0), step(1)])))
    with_kl = recorded(tmp_path / "b", [step(0, kl=0.1), step(1, kl=0.2)])
    assert name in labels(log_prob_chart(with_kl))


def test_metrics_survive_a_round_trip(tmp_path: Path) -> None:
    written = [step(0, start_validation=validation(0.25)), step(1, kl=0.5, clipped_ratios=0.0)]
    run = recorded(tmp_path / "run", written)
    assert run.validations == [(0, validation(0.25))]
    assert run.column("kl").tolist()[1] == 0.5
    assert np.isnan(run.column("kl")[0])
