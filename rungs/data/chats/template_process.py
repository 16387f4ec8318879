"""The process that renders chat templates, which this process starts with the first one."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rungs.common.errors import UserError

_PROGRAM = Path(__file__).with_name("template_sandbox.py")


class TemplateProcess:
    """Renders templates in another process, which starts again after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def render(self, source: str, mark: str, variables: dict[str, Any] | None) -> str:
        """Return the text of a template.

        Args:
            source: the template.
            mark: to put around the text of each {% generation %} … {% endgeneration %}.
            variables: of the template; None to only compile it.

        Raises:
            UserError: it is not valid, refuses these variables, or needs too much time or memory.
        """
        try:
            line = json.dumps([source, mark, variables]).encode()
        except RecursionError:
            raise UserError("the chat is nested too deeply") from None
        with self._lock:
            answer = json.loads(self._exchange(line + b"\n"))
        if problem := answer.get("error"):
            raise UserError(f"the chat template {problem}")
        return str(answer["text"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _exchange(self, line: bytes) -> bytes:
        """Send a line to the process and return the line that it answers."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _started()
        assert self._process.stdin and self._process.stdout  # noqa: PT018
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # Ctrl-C: its answer must not be taken for the next one
            self.close()
            raise
        if not answer.endswith(b"\n"):
            raise UserError(f"the chat template {_end_text(self._process.wait())}")
        return answer


def _started() -> "subprocess.Popen[bytes]":
    kept = {name: os.environ[name] for name in ("TZ", "SYSTEMROOT") if name in os.environ}
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError as error:
        raise UserError(f"chat templates: their process did not start: {error.strerror}") from None


def _end_text(status: int) -> str:
    if status == -getattr(signal, "SIGPROF", 0):
        return "takes too long: it was stopped"
    return f"ended its process with status {status}"


PROCESS = TemplateProcess()
"""The one of this process, for all of its templates."""
