"""Copies of committed runs, trained by the project's own commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.setting import ROOT
from benchmarks.side_process import failure
from rungs.config.run_config import REINFORCE_FILE, TRAIN_FILE


def copy(
    name: str, folder: Path, train: dict[str, Any], model: dict[str, Any] | None = None
) -> Path:
    """Copy a committed run with some keys of its two files changed; return its folder."""
    committed, run = ROOT / "runs" / name, folder / name
    run.mkdir()
    train_file = REINFORCE_FILE if (committed / REINFORCE_FILE).exists() else TRAIN_FILE
    for file, changes in (("model.json", model or {}), (train_file, train)):
        (run / file).write_text(json.dumps(json.loads((committed / file).read_text()) | changes))
    return run


def train(run: Path) -> None:
    """Run the command that trains a run, whose datasets lie beside it.

    Raises:
        RuntimeError: it failed.
    """
    if (run / REINFORCE_FILE).exists():
        command = ["reinforce.py", str(run)]
    else:
        command = ["train.py", str(run), "--datasets-dir", str(run.parent / "datasets")]
    ended = subprocess.run(
        [sys.executable, *command, "--quiet"], cwd=ROOT, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(failure(f"{command[0]} {run.name}", ended.stderr))
