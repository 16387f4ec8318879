"""Trackers that don't exist, aren't installed, or fail."""

from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.integrations import trackers
from rungs.integrations.trackers import check_trackers
from tests.support.starting import refusal
from tests.support.tiny_run import make_dataset, make_run, train


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("wandbb", "no tracker is called 'wandbb'; did you mean wandb?"),
        ("?", "there are mlflow, tensorboard, trackio, wandb"),
    ],
)
def test_unknown_trackers(name: str, line: str) -> None:
    with pytest.raises(UserError) as raised:
        check_trackers([name], "train.json: trackers")
    assert str(raised.value).startswith("train.json: trackers: no tracker")
    assert str(raised.value).endswith(line)


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.BUILT_IN, "wandb", ("no_such_module", trackers.WandbTracker))
    with pytest.raises(UserError, match="wandb is not installed; install it with the extra"):
        check_trackers(["wandb"], "train.json: trackers")


def test_bad_trackers_are_refused_before_anything_changes(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    run = make_run(tmp_path / "run", trackers=["wandbb"])
    assert "no tracker is called 'wandbb'" in refusal(run, tmp_path)


def test_a_tracker_that_fails_costs_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="needs `uv run --extra tensorboard`")
    make_dataset(tmp_path)
    run = make_run(tmp_path / "run", trackers=["tensorboard"], min_train_tokens=128)
    run.trackers.write_text("in the way")
    result = train(run, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "WARNING tracker tensorboard: " in run.log.read_text()
