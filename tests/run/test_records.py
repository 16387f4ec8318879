"""`evaluations.jsonl`: what is added can be read and compared."""

import re
from pathlib import Path

import pytest

from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.records import Evaluation


def evaluation(step: int, value: float, **others: object) -> Evaluation:
    values = {
        "time": records.now(),
        "checkpoint": f"20260101Z000000-step-{step:06d}",
        "task": "quiz",
        "metric": "accuracy",
        "value": value,
        "items": 10,
    }
    return Evaluation.model_validate(values | others)


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert records.read(run, Evaluation) == []
    one, other = evaluation(3, 0.5), evaluation(4, 0.25, standard_error=0.1)
    records.append(run, [one])
    with run.evaluations.open("a") as file:
        file.write('{"time": 3}\n{"ta\n')
    records.append(run, [other])
    assert records.read(run, Evaluation) == [one, other]


def test_the_table_has_the_scores_of_the_last_checkpoints(tmp_path: Path) -> None:
    runs = {name: RunFolder(tmp_path / name) for name in ("a", "b", "empty")}
    for run in runs.values():
        run.path.mkdir()
    assert records.scores_table(runs) is None
    records.append(runs["a"], [evaluation(40, 0.75, low=0.5, high=0.9), evaluation(5, 0.1)])
    records.append(runs["b"], [evaluation(9, 0.3), evaluation(9, 0.4, standard_error=0.02)])
    records.append(runs["b"], [evaluation(9, 2.0, metric="perplexity")])
    lines = (records.scores_table(runs) or "").splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["benchmark", "metric", "a", "b", "empty"],
        [
            *("quiz", "accuracy", "0.7500 (0.5000 to 0.9000) at step 40"),
            *("0.4000 ± 0.0200 at step 9", "-"),
        ],
        ["quiz", "perplexity", "-", "2.0000 at step 9", "-"],
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("checkpoint", "step"), [("x-step-000012", 12), ("imported", -1)])
def test_the_step_of_an_evaluation(checkpoint: str, step: int) -> None:
    assert evaluation(0, 1.0, checkpoint=checkpoint).step == step
