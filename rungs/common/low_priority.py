"""Start programs that give way to training."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

LOWEST = 19
"""The niceness of the lowest priority."""


def start_python(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdin: int | IO[str] | None = None,
) -> subprocess.Popen[str]:
    """Start Python with the lowest priority; what the program prints to stderr can be read.

    It gets a session of its own, so that Ctrl-C stops the training alone. Where Linux shares its
    processors between sessions (autogroups, sched(7)), a process's niceness counts only within its
    session, so the session gets it, too.

    Args:
        arguments: of Python.
        environment: added to that of this process.

    Raises:
        OSError: it can't be started.
    """
    nice = ["nice", "-n", f"{LOWEST}"] if shutil.which("nice") else []
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [*nice, sys.executable, *arguments],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment | {"PYTHONPATH": path},
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # not Linux, or no autogroups
        Path(f"/proc/{process.pid}/autogroup").write_text(f"{LOWEST}")
    return process
