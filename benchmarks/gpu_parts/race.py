"""The race: is the recipe after 2.2 minutes below the loss that PyTorch's GPT-2 has after five? An
experiment, whose seeds that are there already are not trained again."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import ROOT, Setting
from benchmarks.side_process import failure
from rungs.run.step_table import StepTable

NAME = "race-h200"
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "context_length": 64,
    "emb_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "dataset": "python-stdlib",
    "microbatch_size": 4,
    "validation_tokens": 1024,
    "validation_minutes": 0.02,
}
REHEARSAL: dict[str, Any] = {"budget": {"minutes": 0.1}, "target": 8.0}


def figures(setting: Setting) -> Iterator[Figure]:
    keys = json.loads((ROOT / "experiments" / NAME / "experiment.json").read_text())
    if setting.rehearse:
        keys |= {**REHEARSAL, "changes": keys["changes"] | SMALL}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(setting.race or temporary) / NAME
        folder.mkdir(exist_ok=True)
        (folder / "experiment.json").write_text(json.dumps(keys))
        datasets = ["--datasets-dir", setting.race] if setting.race else []
        command = [sys.executable, "experiment.py", str(folder), *datasets]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(failure("experiment.py", done.stderr))
        entries = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
        ended = {one["run"]: one["value"] or math.nan for one in entries if one["entry"] == "run"}
        runs = [folder / "runs" / name for name in ended]
        times = [minutes for run in runs if (minutes := _minutes_to(run, keys["target"]))]
    said = done.stdout.strip().splitlines()[-2]
    yield Figure("the recipe's loss at the end", [*ended.values()], "nats", said)
    yield Figure("minutes to PyTorch's loss", times, "min", "" if times else "never")


def _minutes_to(run: Path, loss: float) -> float | None:
    """Return the minutes of training until a validation with this loss or a lower one."""
    steps = StepTable.read(run / "metrics.jsonl")
    is_there = steps.column("validation_loss") <= loss
    return float(steps.seconds[is_there][0]) / 60 if is_there.any() else None
