"""`evaluate_every`: checkpoints are measured on benchmarks while a run trains."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import UserError
from rungs.common.signals import Interrupted
from rungs.config.run_config import load_run
from rungs.data.build.task_dataset import character_tokenizer
from rungs.evaluation.checkpoint_scores import Measured
from rungs.evaluation.scoring import Scorer
from rungs.run import records
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.records import Evaluation
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.tiny_run import assert_same_outcome, make_dataset, make_run

LETTERS = string.ascii_letters + string.digits
SHORT = {"min_train_tokens": 9 * 128, "checkpoint_interval": 2}
MEASURED = SHORT | {"evaluate_every": 4, "benchmarks": ["quiz.jsonl"]}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    character_tokenizer(LETTERS).save(folder / "tiny" / "tokenizer.json")
    return folder


def make_measured_run(folder: Path, **keys: Any) -> RunFolder:
    """Write a run folder with a file of items: which letter is next?"""
    run = make_run(folder, **(MEASURED | keys))
    items = [
        {"prompt": LETTERS[n : n + 4], "choices": [LETTERS[n + 4], LETTERS[n]], "answer": 0}
        for n in range(30)
    ]
    (run.path / "quiz.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return run


def go(run: RunFolder, datasets_dir: Path) -> int:
    return launch(run, load_run(run.path), StartOptions(), on_datasets(datasets_dir))


def scores(run: RunFolder) -> dict[tuple[int, str], float]:
    return {
        (int(one.checkpoint.rpartition("-")[2]), one.metric): one.value
        for one in records.read(run, Evaluation)
    }


@pytest.mark.long
def test_checkpoints_are_measured_and_nothing_else_changes(
    tmp_path: Path, datasets_dir: Path
) -> None:
    plain, run = make_run(tmp_path / "plain", **SHORT), make_measured_run(tmp_path / "run")
    assert go(plain, datasets_dir) == go(run, datasets_dir) == 0
    assert_same_outcome(run, plain)
    found = scores(run)
    assert {step for step, _ in found} == {4, 8}
    assert {metric for _, metric in found} == {"accuracy", "accuracy per character"}
    last = list_checkpoints(run.checkpoints)[-1]
    again = Measured.find(str(last.folder), 16, datasets_dir)
    for one in again.on_choices(run.path / "quiz.jsonl", None):
        assert found[8, one.metric] == one.value


@pytest.mark.long
def test_an_interrupted_measurement_is_repeated_by_the_next_start(
    tmp_path: Path, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_measured_run(tmp_path / "run")

    def interrupted(*_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "scores", interrupted)
        assert go(run, datasets_dir) == 143
    assert list_checkpoints(run.checkpoints)[-1].step == 4
    assert scores(run) == {}
    assert go(run, datasets_dir) == 0
    assert {step for step, _ in scores(run)} == {4, 8}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"evaluate_every": 3}, "evaluate_every: 3 is not a multiple of checkpoint_interval (2)"),
        ({"evaluate_every": None}, "evaluate_every: needed by benchmarks"),
        ({"benchmarks": []}, "benchmarks: evaluate_every needs at least one"),
        ({"benchmarks": ["lost.jsonl"]}, "lost.jsonl: no such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, datasets_dir: Path
) -> None:
    run = make_measured_run(tmp_path / "run", **keys)
    with pytest.raises(UserError) as error:
        go(run, datasets_dir)
    assert message in str(error.value)
    assert {p.name for p in run.path.iterdir()} == {"model.json", "train.json", "quiz.jsonl"}
