"""A part of a GPU session that does what the environment says: yields figures, waits, fails."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting


def figures(setting: Setting) -> Iterator[Figure]:
    assert setting.rehearse
    print("not a figure")
    value = os.environ.get("PART_VALUE")
    yield Figure("first", [1.0, float(value)] if value else [1.0, 3.0, 2.0], "s", "a note")
    if os.environ.get("PART_FAILS"):
        raise RuntimeError("out of order")
    if pid_file := os.environ.get("PART_WAITS"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(pid_file, "w") as file:  # noqa: PTH123
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    yield Figure("second", [5.0], "ms")
