"""Runs for faults: short ones, on one device, started in this process or in one of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import RunFailure
from rungs.config import run_config
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.start import launch
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import command, make_run

FAULTY_TRAIN = Path(__file__).with_name("faulty_train.py")
STEPS = 8
SHORT = {
    "microbatch_size": 7,  # which no usual number of devices divides, so that one is taken
    "min_train_tokens": STEPS * 7 * 2 * 16,
    "checkpoint_interval": 3,
    "keep_checkpoints": -1,
}


class NoDrawer:
    """Draws nothing."""

    def __init__(self, run_folder: Path) -> None: ...

    def request(self) -> None: ...

    def finish(self) -> None: ...


def short_run(folder: Path, **train: Any) -> RunFolder:
    """A run of 8 steps that saves after steps 0, 3, 6 and 7."""
    return make_run(folder, **{**SHORT, **train})


def go(run: RunFolder, datasets_dir: Path, **start: Any) -> int:
    """Start it in this process."""
    return launch(run, run_config.load_run(run.path), StartOptions(**start), datasets_dir)


def failure(run: RunFolder, datasets_dir: Path, **start: Any) -> str:
    """The one line with which a start in this process fails."""
    with pytest.raises(RunFailure) as raised:
        go(run, datasets_dir, **start)
    message = str(raised.value)
    assert "\n" not in message
    return message


def faulty(fault: str, run: RunFolder, datasets_dir: Path) -> subprocess.CompletedProcess[str]:
    """Start it in a process of its own, with a fault."""
    _, _, *arguments = command(run, datasets_dir)
    return subprocess.run(
        [sys.executable, str(FAULTY_TRAIN), fault, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )


def error_line(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The one line with which a process failed."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Error:" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def whole_steps(run: RunFolder) -> list[int]:
    """The steps of its checkpoints, each of which must be whole, with nothing beside them."""
    checkpoints = list_checkpoints(run.checkpoints)
    assert [c.damage() for c in checkpoints] == [[] for _ in checkpoints]
    there = {path.name for path in run.checkpoints.iterdir()} - {"best", "latest"}
    assert there == {c.folder.name for c in checkpoints}
    return [c.step for c in checkpoints]


def assert_no_torn_line(run: RunFolder) -> None:
    text = run.metrics.read_text()
    assert text == "" or text.endswith("\n")
    for number, line in enumerate(text.splitlines()):
        assert json.loads(line)["global_step"] == number
