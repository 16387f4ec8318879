"""`--supervise`: training in a child process that is restarted after a crash."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rungs.common import helper_process
from rungs.common.errors import EXIT_BAD_INPUT
from rungs.common.run_log import log
from rungs.common.signals import StopSignal, name_of, stopping_signals
from rungs.integrations.alerts import Alerts
from rungs.run import folder

_FINAL = frozenset({0, EXIT_BAD_INPUT, *(128 + number for number in stopping_signals())})
"""Exit codes that end supervision: the run finished, its input is wrong, or a signal stopped it."""
_ONCE = {"--fresh": 0, "--from": 1}
"""Options that count once, with their number of values."""
_OWN = {"--supervise": 0, "--max-restarts": 1}


def supervise(
    arguments: Sequence[str], run: folder.RunFolder, hooks: Sequence[str], max_restarts: int
) -> int:
    """Run this process's command, `arguments`, in a child process until it ends other than by a
    crash, and return its exit code. A crash is exit code 1 or death by a signal such as SIGKILL or
    SIGSEGV; up to `max_restarts` are tolerated without a new checkpoint in between. `--fresh` and
    `--from` are given again only if a start changed nothing. The hooks are told of a killed child,
    which can't do so itself. The run folder may not exist yet."""
    command = [sys.executable, *_without(arguments, _OWN)]
    restarts, saved, untouched = 0, _checkpoints(run), _state(run)
    with StopSignal() as stop:
        stop.begin()
        while (code := run_child(command, stop)) not in _FINAL and stop.number is None:
            if code < 0:
                _note_death(run, hooks, -code)
            before, saved = saved, saved | _checkpoints(run)
            restarts = 1 if saved != before else restarts + 1
            if restarts > max_restarts:
                log.warning("ended with exit code %d; not started again: see --max-restarts", code)
                return code if code > 0 else 128 - code
            delay = helper_process.delay_after(restarts)
            log.warning(
                "ended with exit code %d; restart %d of %d in %.0f s",
                *(code, restarts, max_restarts, delay),
            )
            end = time.monotonic() + delay
            while time.monotonic() < end and stop.number is None:
                time.sleep(0.1)
            if stop.number is not None:
                return stop.exit_code
            if _state(run) != untouched:
                command = _without(command, _ONCE)
        return code if code >= 0 else 128 - code


def run_child(
    command: Sequence[str], stop: StopSignal, environment: Mapping[str, str] | None = None
) -> int:
    """Run the command to its end, forwarding signals, and return its exit code. Its environment is
    this process's, if None."""
    process = subprocess.Popen(command, env=environment)
    told = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if stop.number is not None and stop.number != told:
            process.send_signal(stop.number)
            told = stop.number


def _note_death(run: folder.RunFolder, hooks: Sequence[str], number: int) -> None:
    step = -1
    with contextlib.suppress(OSError), run.metrics.open("rb") as file:  # no metrics yet
        step = sum(line.endswith(b"\n") for line in file) - 1
    alerts = Alerts(run, hooks, step)
    alerts.note_end("failure", f"killed by {name_of(number)}")
    alerts.finish()


def _checkpoints(run: folder.RunFolder) -> set[str]:
    """Return the names of the checkpoints; none if they can't be read just now."""
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return set()
    return set(filter(folder.is_checkpoint_name, names))


def _state(run: folder.RunFolder) -> object:
    """Return what any start changes that moves something aside, or takes a step."""
    try:
        status = run.metrics.stat()
    except OSError:
        return _checkpoints(run), None
    return _checkpoints(run), (status.st_ino, status.st_size)


def _without(arguments: Sequence[str], options: dict[str, int]) -> list[str]:
    """Return the arguments without some options, given as `--name value` or `--name=value`."""
    kept, skipped = [], 0
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        if skipped:
            skipped -= 1
        elif name in options:
            skipped = 0 if has_value else options[name]
        else:
            kept.append(argument)
    return kept
