"""Start programs that give way to training."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

LOWEST = 19
"""The niceness of the lowest priority."""
_TRIES = 5
_AUTOGROUP = "/proc/{}/autogroup"
"""Of a process, in Linux: its session's name and niceness. Empty for a machine's first session."""


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
        _set_group_priority(Path(_AUTOGROUP.format(process.pid)), LOWEST)
    return process


def restore_priority(process: subprocess.Popen[str]) -> None:
    """Give the session of a program that `start_python` started the priority of this one, where
    sessions have one: a process's own niceness may not be lowered again."""
    with contextlib.suppress(OSError):
        niceness = _group_priority(Path(_AUTOGROUP.format("self")))
        _set_group_priority(Path(_AUTOGROUP.format(process.pid)), niceness)


def _group_priority(autogroup: Path) -> int:
    """Return the niceness of a session. A machine's first session has no autogroup, and counts as
    0, the default of the others."""
    words = autogroup.read_text().split()
    return int(words[-1]) if words else 0


def _set_group_priority(autogroup: Path, niceness: int) -> None:
    """Set the priority of a session. Users other than root may change one per 0.1 s."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            autogroup.write_text(f"{niceness}")
            return
        time.sleep(0.05)
    autogroup.write_text(f"{niceness}")
