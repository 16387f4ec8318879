"""Calls a user's code in another process, which is killed if it takes too long. The process has a
clean environment, an empty working directory and little memory (`code_child.py`). Requests and
answers are lines of JSON: answers are never executed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rungs.common.errors import readable_line
from rungs.common.signals import name_of
from rungs.tasks.task import Status

CHILD = Path(__file__).with_name("code_child.py")
START_SECONDS = 120
"""Time limit for loading the code, which may import from a slow disk."""
_MOST_BYTES = 1 << 24
"""Of an answer; the child cuts texts to far less."""


class Answer(NamedTuple):
    """What a call returned, or how it failed."""

    value: Any = None
    status: Status = "ok"
    message: str = ""
    """What went wrong, in one line; empty if nothing did."""
    ended: bool = False
    """Whether the process is of no more use, not only the call."""


class Code(NamedTuple):
    """A user's code, and its limits."""

    file: str
    """Name for messages."""
    text: str
    kind: Literal["reward", "Environment", "TOOLS"]
    """What it defines."""
    seconds: float
    """Of a call."""
    memory_bytes: int


class _Connection:
    """A socket to a process."""

    def __init__(self, to_process: socket.socket) -> None:
        self.socket, self._lines = to_process, to_process.makefile("rb")

    def line(self) -> bytes:
        """Return the next line, empty if the process has ended."""
        line = self._lines.readline(_MOST_BYTES)
        return line if line.endswith(b"\n") else b""

    def ask(self, request: dict[str, Any], seconds: float, file: str) -> Answer:
        """Return the answer to a request, in time whatever the process does."""
        self.socket.settimeout(seconds)
        try:
            self.socket.sendall(json.dumps(request).encode() + b"\n")
            answer = _parsed(self.line())
        except TimeoutError:
            answer = Answer(None, "timeout", f"took longer than {seconds:g} s", ended=True)
        except OSError:
            answer = _parsed(b"")
        return _of_file(file, answer)

    def close(self) -> None:
        """Close both directions."""
        self._lines.close()
        self.socket.close()


class CodeProcess:
    """Calls functions of a user's code in another process, one at a time, whatever thread asks. The
    process starts at the first call, and again after a call that ended it or exceeded its time or
    memory. An exception in a function doesn't affect it."""

    def __init__(self, code: Code) -> None:
        self._code, self._lock = code, threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="rungs-code-")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Answer:
        """Start the process and load the code; return what it offers, or its problem."""
        folder = self._folder.name
        environment = {  # excludes the user's secrets
            "PATH": os.defpath,
            "HOME": folder,
            "TMPDIR": folder,
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the same order of sets in every process
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        ours, theirs = socket.socketpair()
        self._connection = _Connection(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", str(CHILD)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        code = self._code
        setup = {"file": code.file, "code": code.text, "kind": code.kind}
        limits = {"seconds": code.seconds, "memory_bytes": code.memory_bytes}
        answer = self._ask(setup | limits, START_SECONDS)
        if answer.status != "ok":
            self._end()
        return answer

    def call(self, name: str, arguments: dict[str, Any]) -> Answer:
        """Return what a function returned, in time whatever it does."""
        with self._lock:
            if self._process is None and (failed := self.start()).status != "ok":
                return failed
            return self._ask({"name": name, "arguments": arguments}, self._code.seconds)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._end()
        self._folder.cleanup()

    def _ask(self, request: dict[str, Any], seconds: float) -> Answer:
        """Return the answer to a request; kill an unusable process."""
        try:
            answer = self._connection.ask(request, seconds, self._code.file)
            if answer.ended and answer.status == "error":
                assert self._process is not None
                answer = _of_file(self._code.file, _ended(self._process))
        except BaseException:  # Ctrl-C: a late answer must not be taken for the next one
            self._end()
            raise
        if answer.ended:
            self._end()
        return answer

    def _end(self) -> None:
        """Kill the process, if it runs, with those that it started."""
        if process := self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._connection.close()
            self._process = None


class ForkingProcess(CodeProcess):
    """Loads a user's code once, for forks that each have a state of their own. What ends one
    doesn't affect the others."""

    def fork(self) -> "Fork | Answer":
        """Return a new fork, or why there is none."""
        with self._lock:
            if self._process is None and (failed := self.start()).status != "ok":
                return failed
            ours, theirs = socket.socketpair()
            with theirs:
                pid = self.told(b"\n", theirs.fileno())
            if pid:
                return Fork(self, _Connection(ours), pid, self._code)
            ours.close()
            self._end()
        return _of_file(self._code.file, _parsed(b""))

    def told(self, message: bytes, *sockets: int) -> int:
        """Return the process id that the process answers a message with; 0 if it has ended."""
        with self._lock:
            if self._process is None:
                return 0
            try:
                socket.send_fds(self._connection.socket, [message], sockets)
                return int(self._connection.line() or 0)
            except OSError:
                return 0


class Fork:
    """A fork of a process."""

    def __init__(
        self, parent: ForkingProcess, connection: _Connection, pid: int, code: Code
    ) -> None:
        self._parent, self._connection, self._pid, self._code = parent, connection, pid, code

    def call(self, name: str, arguments: dict[str, Any]) -> Answer:
        """Return what a function returned, in time whatever it does."""
        request = {"name": name, "arguments": arguments}
        return self._connection.ask(request, self._code.seconds, self._code.file)

    def close(self) -> None:
        """Kill the fork with what it started."""
        self._connection.close()
        self._parent.told(b"%d\n" % self._pid)


def _of_file(file: str, answer: Answer) -> Answer:
    """Return an answer whose message, if any, begins with the file's name."""
    message = answer.message and readable_line(f"{file}: {answer.message}")
    return answer._replace(message=message)


def _parsed(line: bytes) -> Answer:
    """Return the answer in a line; an empty one is that of a process that has ended."""
    if not line:
        return Answer(None, "error", "its process ended", ended=True)
    found = json.loads(line)
    if found.get("out_of_memory"):
        message = "needs more than verifier_memory_bytes"
        return Answer(None, "out_of_memory", message, ended=True)
    error = found.get("error")
    return Answer(None, "error", error) if error else Answer(found["value"])


def _ended(process: subprocess.Popen[bytes]) -> Answer:
    """Return the answer of a process that ended or closed its socket."""
    try:
        code = process.wait(1)
        ended = f"by {name_of(-code)}" if code < 0 else f"with exit code {code}"
        message = f"its process ended {ended}"
    except subprocess.TimeoutExpired:
        message = "closed the pipe to Rungs"
    return Answer(None, "error", message, ended=True)
