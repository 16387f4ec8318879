"""Short runs to put faults into, in this process or in one of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import RunFailure
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.starting import go as train_here
from tests.support.tiny_run import command, make_run

FAULTY_TRAIN = Path(__file__).with_name("faulty_train.py")
STEPS = 8
SHORT = {
    "microbatch_size": 11,  # which of one to eight devices only one divides
    "min_train_tokens": STEPS * 11 * 2 * 16,
    "checkpoint_interval": 3,
    "keep_checkpoints": -1,
}


def short_run(folder: Path, **train: Any) -> RunFolder:
    """Make a run of 8 steps that saves after steps 0, 3, 6 and 7."""
    return make_run(folder, **{**SHORT, **train})


def failure_message(run: RunFolder, datasets_dir: Path, **start: Any) -> str:
    """Train in this process, which must fail; return the one line of its message."""
    with pytest.raises(RunFailure) as raised:
        train_here(run, datasets_dir, **start)
    message = str(raised.value)
    assert "\n" not in message
    return message


def train_with_fault(
    fault: str, run: RunFolder, datasets_dir: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own with a fault of `injected_faults.py`."""
    _, _, *arguments = command(run, datasets_dir, *options)
    return subprocess.run(
        [sys.executable, str(FAULTY_TRAIN), fault, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=900,
    )


def error_line(ended: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """Return the one line of error with which a process failed."""
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "Error:" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def checkpoint_steps(run: RunFolder) -> list[int]:
    """Return the steps of its checkpoints; all must be valid, and nothing else may be there."""
    checkpoints = list_checkpoints(run.checkpoints)
    assert [c.damage() for c in checkpoints] == [[] for _ in checkpoints]
    names = {path.name for path in run.checkpoints.iterdir()} - {"best", "latest"}
    assert names == {c.folder.name for c in checkpoints}
    return [c.step for c in checkpoints]


def assert_metrics_are_complete_lines(run: RunFolder) -> None:
    text = run.metrics.read_text()
    assert text == "" or text.endswith("\n")
    for number, line in enumerate(text.splitlines()):
        assert json.loads(line)["global_step"] == number
