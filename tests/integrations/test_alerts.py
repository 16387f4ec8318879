"""Events and the watchdog."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rungs.config.run_config import load_run
from rungs.integrations.alerts import Alerts, Watchdog
from rungs.run import records
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.records import Event
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.tiny_run import change, make_dataset, make_run, train


@pytest.fixture
def datasets_dir(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "datasets")
    return tmp_path / "datasets"


def recording_hook(folder: Path) -> tuple[str, Path]:
    """Return a command that appends what it is told to a file, and the file."""
    program, told = folder / "hook.py", folder / "told.jsonl"
    program.write_text(
        f"import sys\nopen({str(told)!r}, 'a', encoding='utf-8').write(sys.stdin.read())\n"
    )
    return f"{sys.executable} {program}", told


def messages(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()]


@pytest.mark.long
def test_a_run_tells_its_hook_how_it_goes(datasets_dir: Path, tmp_path: Path) -> None:
    hook, told = recording_hook(tmp_path)
    run = make_run(tmp_path / "run")
    config, start_options = load_run(run.path), StartOptions(on_event=(hook,))
    assert launch(run, config, start_options, on_datasets(datasets_dir)) == 0
    start, finish = messages(told)
    assert (start["event"], start["step"]) == ("start", -1)
    assert (finish["event"], finish["step"]) == ("finish", 23)
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    for name in ("train_loss", "validation_loss", "tokens_seen", "learning_rate"):
        assert finish["figures"][name] == last[name]
    assert finish["run"] == str(run.path)
    assert [event.event for event in records.read(run, Event)] == ["start", "finish"]
    # of a finished run, another start is no event
    assert launch(run, config, start_options, on_datasets(datasets_dir)) == 0
    assert len(messages(told)) == 2


@pytest.mark.long
def test_a_failure_is_told_with_its_reason(datasets_dir: Path, tmp_path: Path) -> None:
    hook, told = recording_hook(tmp_path)
    run = make_run(tmp_path / "run", learning_rate=1e30, max_non_finite_steps=1)
    change(run, clipping_max_norm=None, warmup_period_percent=0)
    result = train(run, datasets_dir, "--on-event", hook)
    assert result.returncode == 1
    failure = messages(told)[-1]
    assert failure["event"] == "failure"
    assert failure["text"] in result.stderr


def test_a_stall_is_told_once_until_the_next_step() -> None:
    stalls: list[float] = []
    watchdog = Watchdog(stalls.append, seconds=0.2)
    watchdog.start()
    deadline = time.monotonic() + 30
    while not stalls and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    assert len(stalls) == 1
    watchdog.step_taken()
    watchdog.finish()
    assert stalls[0] > 0.2


def test_hooks_are_told_and_what_a_run_waits_for_at_its_end_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watchdog.__init__, "__defaults__", (0.2,))
    hook, told = recording_hook(tmp_path)
    alerts = Alerts(RunFolder(tmp_path), [hook], 3)
    alerts.start()
    alerts.note_end("finish", "finished")
    time.sleep(0.5)
    alerts.finish()
    kinds = [event.event for event in records.read(RunFolder(tmp_path), Event)]
    assert kinds == [message["event"] for message in messages(told)] == ["start", "finish"]
