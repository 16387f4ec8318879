"""The race: in how many minutes the recipe reaches the loss that PyTorch's GPT-2 has in five."""

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import ROOT, Setting
from benchmarks.racing.sides import PYTORCH, RECIPE
from benchmarks.side_process import failure

MINUTES, GOAL_MINUTES = 5.0, 2.0
REHEARSAL = ("--size", "rehearsal", "--minutes", "0.1", "--max-bytes", "2000000")


def figures(setting: Setting) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        into = setting.race or folder
        options = REHEARSAL if setting.rehearse else ("--minutes", f"{MINUTES:g}")
        own = "" if setting.rehearse else f":{GOAL_MINUTES:g}"
        torch = setting.torch or []
        sides = [PYTORCH] if torch else []
        command = [
            *(sys.executable, str(ROOT / "benchmarks/race.py"), "--into", into),
            *("--text", sysconfig.get_path("stdlib"), "--seeds", "1"),
            *("--sides", ",".join([*sides, f"{RECIPE}{own}"]), *options),
            *(["--torch-python", *torch] if len(torch) == 1 else []),
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(failure("race.py", ended.stderr))
        results = json.loads((Path(into) / "race.json").read_text())
    for result in results:
        steps = f"{result['steps'][0]:,} steps"
        yield Figure(f"{result['side']}: at the end", result["final"], "bits per byte", steps)
        times = [time for time in result["minutes_to_goal"] if time is not None]
        note = "" if times else "never"
        if times and not result["side"].startswith(PYTORCH):
            note = f"goal: {GOAL_MINUTES:g}"
        yield Figure(f"{result['side']}: minutes to PyTorch's loss", times, "min", note)
