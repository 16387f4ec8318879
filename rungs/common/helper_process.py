"""Child processes: low-priority modules of Rungs beside training, and functions that take long or
crash; when something that failed is tried again."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context, parent_process
from queue import SimpleQueue
from typing import Any

from rungs.common.run_log import log
from rungs.common.signals import StopSignal

NICENESS = 10
"""Of modules beside training: on a busy machine they get a tenth of what training gets."""
_SECONDS_UNTIL_MESSAGE = 2.0
"""A longer wait is explained to the user."""
FIRST_DELAY, LONGEST_DELAY = 10.0, 600.0
"""Seconds before something that failed is tried again; doubled after each further failure, up to
the second number."""
ENDED, KILLED = "\n", ""
"""Last item of the queue that `receive` returns."""


def delay_after(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row, at least one."""
    return min(FIRST_DELAY * 2.0 ** min(failures - 1, 99), LONGEST_DELAY)


@contextlib.contextmanager
def process_executor() -> Iterator[ProcessPoolExecutor]:
    """Yield an executor that calls functions in one new process, which ends at Ctrl-C, if the block
    raises, and with this process. Its futures raise BrokenProcessPool if it crashes."""
    others, context = set(active_children()), get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent) as executor:
        try:
            yield executor
        except BaseException:
            for process in set(active_children()) - others:
                process.kill()
            raise


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def wait() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class HelperProcess:
    """A module, run as by `python -m` with its arguments, that reads lines from this process. Its
    stderr is logged as warnings that begin with `name`. `environment` adds to this process's.

    If its input ends without an empty line, this process was killed; see `receive`."""

    def __init__(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._environment = name, environment or {}
        self._command = ["-m", module, *arguments]
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it was started and not killed from here; it may have exited by itself."""
        return self._process is not None

    @property
    def has_exited(self) -> bool:
        """Whether it was started and has exited by itself, or was killed from elsewhere."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start the process; raises OSError."""
        process = self._process = start_python(self._command, self._environment)
        self._listener = threading.Thread(target=self._log_errors, args=(process,), daemon=True)
        self._listener.start()

    def send(self, line: str) -> None:
        """Send a line, starting the process first if needed. Raises OSError if it has exited."""
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def finish(self, stop: StopSignal, what: str, patience: float = math.inf) -> bool:
        """Wait until the process has finished its work, another signal arrives, or `patience`
        seconds pass. `what` names the work in the message about a long wait. Return whether it has
        finished or was never started."""
        if self._process is None:
            return True
        with contextlib.suppress(OSError):
            self.send("")
        started, has_said, number = time.monotonic(), False, stop.number
        while self._process.poll() is None and stop.number == number:
            time.sleep(0.02)
            seconds = time.monotonic() - started
            if seconds > patience:
                return False
            if not has_said and seconds > _SECONDS_UNTIL_MESSAGE:
                has_said = True
                log.info("%s; Ctrl-C leaves it to the next start", what)
        if code := self._process.returncode:
            log.warning("%s: its process ended with exit code %d", self._name, code)
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # unsent lines are lost
            self._process.stdin.close()
        self._listener.join()
        self._process = None

    def _log_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                if line.strip():
                    log.warning("%s: %s", self._name, line.strip())


def start_python(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start Python with low priority and pipes to its stdin and from its stderr. It gets a session
    of its own, so that Ctrl-C stops the training alone. Raises OSError if it can't be started.
    `environment` is added to that of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        ["nice", "-n", str(NICENESS), sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=os.environ | environment | {"PYTHONPATH": path, "PYTHONUTF8": "1"},
        start_new_session=True,
    )


def kill_session(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that was started in a session of its own, and all that it started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the other one
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def receive(lines: Iterable[str], *, exit_if_killed: bool = False) -> SimpleQueue[str]:
    """Return a queue of the lines that a helper process is sent, with line ends, as they arrive.
    The last item is `ENDED`, or `KILLED` if the sender was killed; `exit_if_killed` ends this
    process at once instead."""
    received: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in lines:
            received.put(line)
            if line == ENDED:
                return
        if exit_if_killed:
            os._exit(0)
        received.put(KILLED)

    threading.Thread(target=listen, daemon=True).start()
    return received
