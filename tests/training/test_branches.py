"""`--from-step`: runs that continue a step of another with other keys."""

import functools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.cli import train as train_command
from rungs.common.errors import UserError
from rungs.config.run_config import load_run
from rungs.optim.schedule import learning_rate_schedule
from rungs.report.run_page import open_runs
from rungs.run import metrics
from rungs.run.derive import BranchPoint, NewRun
from rungs.run.folder import RunFolder, StartOptions
from rungs.training import resume, run_report
from rungs.training.dataset_learner import DatasetLearner, on_datasets
from rungs.training.resume import refuse_changes
from rungs.training.start import launch
from tests.support.configs import train_config
from tests.support.tiny_run import (
    assert_same_outcome,
    change,
    final_arrays,
    losses,
    make_dataset,
    make_run,
)

KEYS: dict[str, Any] = {
    **{"schedule": "constant", "keep_checkpoints": -1, "shuffle": True},
    "warmup_period_percent": 20,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets and a trained run of 24 steps, saved every 5, and watched."""
    place = tmp_path_factory.mktemp("place")
    make_dataset(place / "datasets")
    make_dataset(place / "datasets", "other", seed=1)
    go(make_run(place / "parent", **KEYS, watch_interval=4), place)
    return place


def go(run: RunFolder, place: Path, **start: Any) -> None:
    datasets = on_datasets(place / "datasets")
    assert launch(run, load_run(run.path), StartOptions(**start), datasets) == 0


def branch(
    place: Path, name: Path, step: int, *settings: str, parent: Path | None = None
) -> RunFolder:
    """Run the command that branches a run and trains it; its error is raised."""
    options = ["--like", str(parent or place / "parent"), "--from-step", str(step)]
    options += ["--datasets-dir", str(place / "datasets"), "--quiet"]
    options += [part for setting in settings for part in ("--set", setting)]
    ended = CliRunner().invoke(train_command.main, [str(name), *options])
    if isinstance(ended.exception, UserError):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return RunFolder(name)


def message(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(UserError) as raised:
        branch(*arguments, **keywords)
    text = str(raised.value)
    assert "\n" not in text
    assert not arguments[1].exists()
    return text


@pytest.mark.long
def test_a_branch_that_changes_nothing_is_its_parent_bit_for_bit(
    place: Path, tmp_path: Path
) -> None:
    child, parent = (
        branch(place, tmp_path / "child", 10, "keep_checkpoints=9"),
        RunFolder(place / "parent"),
    )
    assert_same_outcome(child, parent)
    assert child.layers.read_bytes() == parent.layers.read_bytes()
    assert [c.step for c in list_checkpoints(child.checkpoints)] == [10, 15, 20, 23]
    lineage: dict[str, Any] = {"like": str(place / "parent"), "set": {"keep_checkpoints": 9}}
    lineage |= {"from_step": 10, "warmup_of": 24}
    assert list_checkpoints(child.checkpoints)[-1].meta.train["lineage"] == lineage
    (shown,) = open_runs([child.path])
    events = [one["text"] for one in shown.as_json(100, 0)["events"] if one["step"] == 10]
    assert f"branched from {place / 'parent'}" in events
    assert branch(place, child.path, 10, "keep_checkpoints=9") == child  # finished
    go(child, place, rewind_to="step-000010")
    assert_same_outcome(child, RunFolder(place / "parent"))


@pytest.mark.long
def test_a_cooldown_continues_the_state_with_another_schedule_and_length(
    place: Path, tmp_path: Path
) -> None:
    settings = ["schedule=warmup_stable_decay", "decay_period_percent=20"]
    settings += ["max_steps=20", "min_learning_rate_percent=0"]
    child = branch(place, tmp_path / "child", 15, *settings)
    steps, before = metrics.read(child.metrics), metrics.read(place / "parent" / "metrics.jsonl")
    assert [one.global_step for one in steps] == list(range(20))
    assert steps[:16] == before[:16]
    rows, rows_before = (np.load(run / "layers.npy") for run in (child.path, place / "parent"))
    assert rows["step"].tolist() == [0, 4, 8, 12, 16]
    assert rows[:4].tobytes() == rows_before[:4].tobytes()
    # the loss of the first own step is that of the parent's weights, whatever the learning rate
    assert steps[16].train_loss == before[16].train_loss
    assert steps[19].train_loss != before[19].train_loss
    schedule = learning_rate_schedule(load_run(child.path).train, 20)
    assert [one.learning_rate for one in steps[16:]] == [float(schedule(s)) for s in range(16, 20)]
    arrays, parent = final_arrays(child), final_arrays(RunFolder(place / "parent"))
    assert {name: array.shape for name, array in arrays.items()} == {
        name: array.shape for name, array in parent.items()
    }
    (count,) = [array for name, array in arrays.items() if name.endswith("count")]
    assert count == 20
    step = next(array for name, array in arrays.items() if name == "optimizer.step")
    np.testing.assert_array_equal(step, 20)


@pytest.mark.parametrize("timed", [False, True])
def test_the_warmup_of_a_run_whose_length_its_last_checkpoint_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    """If stop_after or the clock decided it. A branch with the clock's length warms up by it."""
    run = make_run(tmp_path / "run", max_minutes=1 if timed else None)
    if timed:
        length = {
            "step": 4,
            "total_steps": 300,
            "max_minutes": 1,
            "time": "2026-11-29T16:00:00+00:00",
        }
        run.length.write_text(json.dumps(length) + "\n")
    config = load_run(run.path)
    saved: list[Any] = [
        SimpleNamespace(
            step=step,
            folder=run.checkpoints / str(step),
            weights=SimpleNamespace(base=None),
            meta=SimpleNamespace(total_steps=total, stopped_after=end, run_config=lambda: config),
        )
        for step, total, end in ((0, 300, None), (40, 41, 2))
    ]
    monkeypatch.setattr(resume.checkpoint_folder, "list_checkpoints", lambda _: saved)
    monkeypatch.setattr(resume, "_undamaged", lambda found: found)
    point = BranchPoint(40, functools.partial(resume.find_branch_point, run, 40))

    def warmup_of(changes: dict[str, Any]) -> int | None:
        new = NewRun.of(tmp_path / "new", run.path, changes, point)
        lineage: dict[str, Any] = json.loads(new.texts["train.json"])["lineage"]
        return lineage.get("warmup_of")

    assert warmup_of({}) == (None if timed else 300)
    assert warmup_of({"max_minutes": 5}) == 300


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        (40, {}, ["rate of step 39: 0.003, but 0.001 with"]),
        (
            400,
            {},
            ["rate of step 39: 0.00293, but 0.001 with", "phases are shares of 400 steps, and"],
        ),
        (400, {"stopped_after": 2}, ["rate of step 39: 0.00293, but 0.001 with"]),
    ],
)
def test_what_another_length_changes_is_said(
    messages: pytest.LogCaptureFixture, steps: int, more: dict[str, Any], said: list[str]
) -> None:
    phases = [{"until": 0.5, "weights": {"a": 1}}, {"until": 1, "weights": {"b": 1}}]
    train = train_config(
        **{"schedule": "constant", "warmup_period_percent": 10, "dataset": phases},
        learning_rate=0.003,
    )
    keys = {"learning_rate": 0.001, "global_step": 39, "total_steps": 40, "stopped_after": None}
    saved: Any = SimpleNamespace(**keys | more)
    run_report.log_other_length(saved, train, steps, is_timed=False)
    assert len(messages.messages) == len(said)
    assert all(line in text for line, text in zip(said, messages.messages, strict=True))


@pytest.mark.long
def test_a_branch_of_a_killed_parent_is_itself_killed_and_resumed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = DatasetLearner.take

    def stopped_at(number: int) -> Any:
        def taken(self: Any, step: int, *rest: Any) -> Any:
            if step == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return take(self, step, *rest)

        return taken

    def stop(run: RunFolder, number: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DatasetLearner, "take", stopped_at(number))
            launch(run, load_run(run.path), StartOptions(), on_datasets(place / "datasets"))

    parent = make_run(tmp_path / "parent", **KEYS)
    stop(parent, 7)
    go(parent, place)
    assert losses(parent) == losses(RunFolder(place / "parent"))
    settings = 'dataset={"tiny": 1, "other": 3}', "schedule=linear"
    child = branch(place, tmp_path / "child", 10, *settings, parent=parent.path)
    again = branch(place, tmp_path / "again", 10, *settings, parent=parent.path)
    for checkpoint in list_checkpoints(again.checkpoints)[1:]:
        checkpoint.folder.rename(tmp_path / checkpoint.folder.name)
    stop(again, 17)
    assert list_checkpoints(again.checkpoints)[-1].step in (16, 17)
    go(again, place)
    assert_same_outcome(again, child)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"optimizer": "lion"}, 'optimizer: was "adamw" when step 10 was saved, is now "lion"; a'),
        ({"lora": None, "matmul_dtype": "float8"}, "matmul_dtype: was null when step 10 was"),
        ({"microbatch_size": 8}, "change it back; for a larger batch from there on, set batch_gr"),
        ({"batch_growth": {"10": 2}}, "from there on, set batch_growth"),
        ({"compute_dtype": "float16"}, "a branch continues the same model and optimizer"),
        ({"start_from": "b"}, "a branch continues the same model and optimizer; change it back"),
        ({"batch_growth": {"11": 2}, "schedule": "linear", "dataset": "b", "epochs": 9}, None),
    ],
)
def test_keys_that_the_optimizer_state_or_the_position_depend_on_stay(
    keys: dict[str, Any], line: str | None, tmp_path: Path
) -> None:
    compute = {"compute_dtype": "bfloat16"}
    run = make_run(tmp_path / "run", **compute)
    before = load_run(run.path)
    change(run, lineage={"like": "a", "set": {}, "from_step": 10}, **keys)
    saved: Any = SimpleNamespace(run_config=lambda: before, global_step=10)
    if line is None:
        refuse_changes(saved, load_run(run.path), run, extend=False)
        return
    with pytest.raises(UserError) as raised:
        refuse_changes(saved, load_run(run.path), run, extend=False)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_what_a_branch_cannot_do_is_said_in_a_line(place: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert "has no checkpoint of that step; there are 0, 5, 10, 15, 20, 23" in message(
        place, new, 11
    )
    told = message(place, new, 10, "optimizer=lion")
    assert 'train.json: optimizer: was "adamw" when step 10 was saved, is now "lion"; a' in told
    assert "model.json: n_layers: was 2 when step 10 was saved, is now 1; a branch" in message(
        place, new, 10, "n_layers=1"
    )
    told = message(place, new, 10, "max_steps=8")
    assert "it has 8 steps, so none is left after step 10; set more max_steps" in told
    told = message(place, new, 10, parent=make_run(tmp_path / "untrained").path)
    assert "there are none" in told


def test_a_branch_does_not_start_over_from_random_weights(tmp_path: Path) -> None:
    lineage = {"like": "parent", "set": {}, "from_step": 10}
    run = make_run(tmp_path / "run", lineage=lineage)
    with pytest.raises(UserError, match="begins with a checkpoint of step 10, and can't start"):
        go(run, tmp_path)
    change(run, lineage=lineage | {"from_step": -1})
    with pytest.raises(UserError, match=r"lineage\.from_step: -1 is not allowed"):
        go(run, tmp_path)


def test_it_needs_a_run_to_branch_from(tmp_path: Path) -> None:
    ended = CliRunner().invoke(train_command.main, [str(tmp_path), "--from-step", "3"])
    assert "--from-step: needs --like RUN" in str(ended.exception)
