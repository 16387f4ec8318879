"""`train.py` with a clock on what its loop does for a checkpoint.

    timed_train.py CALLS CHARTS RUN …

CALLS gets a line of JSON for each call of a function named here: its name, and its seconds. CHARTS
is `charts` or `no-charts`. `checkpoint_stall.py` reads the lines.
"""

import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rungs.common import signals

TIMED = (
    "trainer.Trainer._validate",
    "trainer.Trainer._meta",
    "saver.Saver.save",
    "saver.Saver.wait",
    "saver.host_copies",
    "saver.Saver._finish",
)
"""The last runs behind the loop; the two before it are parts of `save`."""


def put_clock_on(name: str, file: TextIO) -> None:
    """Have each call of a function written down, by its dotted name."""
    module, *classes, function = name.split(".")
    owner: Any = functools.reduce(getattr, classes, importlib.import_module(module))
    untimed = getattr(owner, function)

    @functools.wraps(untimed)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return untimed(*args, **kwargs)
        finally:
            file.write(json.dumps([name, time.perf_counter() - begin]) + "\n")

    setattr(owner, function, timed)


def draw_no_charts() -> None:
    chart_drawer: Any = importlib.import_module("chart_drawer")
    chart_drawer.ChartDrawer.request = lambda _: None


if __name__ == "__main__":
    calls, charts, *arguments = sys.argv[1:]
    sys.argv = ["train.py", *arguments]
    signals.end_at_once()
    with Path(calls).open("w", buffering=1) as file:
        for name in TIMED:
            put_clock_on(name, file)
        if charts == "no-charts":
            draw_no_charts()

        import train
        from rungs.common.errors import run_command

        run_command(train.main)
