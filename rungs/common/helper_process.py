"""Programs of Rungs that run beside training, with low priority, in processes of their own."""

import contextlib
import logging
import math
import subprocess
import threading
import time
from collections.abc import Mapping

from rungs.common.low_priority import restore_priority, start_python
from rungs.common.signals import StopSignal

_SECONDS_UNTIL_MESSAGE = 2.0
"""From which a wait is explained."""

log = logging.getLogger("rungs")


class HelperProcess:
    """A module that reads lines from this process. What it prints to stderr is logged as warnings.

    The end of its input without an empty line before it tells the module that this process was
    killed.

    Args:
        name: for messages.
        module: what to run, as `python -m` does.
        arguments: of the module.
        environment: added to that of this process.
    """

    def __init__(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._process = start_python(["-m", module, *arguments], environment or {}, subprocess.PIPE)
        self._listener = threading.Thread(target=self._log_errors, daemon=True)
        self._listener.start()

    def send(self, line: str) -> None:
        """Send a line; raises OSError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def finish(self, stop: StopSignal, what: str, patience: float = math.inf) -> bool:
        """Let the process finish what it was sent, unless another signal arrives. It no longer
        gives way: this process only waits for it.

        Args:
            stop: knows of signals.
            what: it does, for the message of a long wait.
            patience: how many seconds to wait at most.

        Returns:
            Whether it has finished.
        """
        with contextlib.suppress(OSError):
            self.send("")
        restore_priority(self._process)
        started, has_said, signal = time.monotonic(), False, stop.number
        while self._process.poll() is None and stop.number == signal:
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
        """End the process at once, if it has not ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was not sent is lost
            self._process.stdin.close()
        self._listener.join()

    def _log_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                log.warning("%s: %s", self._name, line.strip())
