"""A `reward` function in another process, which is killed if it takes too long. The process has a
clean environment, an empty working directory, little memory and cannot start others
(`reward_child.py`). Requests and answers are lines of JSON: answers are never executed, and only a
line with the random id of a request is its answer."""

import json
import math
import os
import secrets
import selectors
import tempfile
import time
from pathlib import Path
from typing import Any

from rungs.common.errors import readable_line
from rungs.common.helper_process import AnsweringProcess
from rungs.common.signals import name_of
from rungs.tasks.verifiers.verdict import Verdict

CHILD = Path(__file__).with_name("reward_child.py")
START_SECONDS = 120
"""Time limit for loading the code, which may import from a slow disk."""
MOST_REWARD = 1e12
"""Squares of larger ones would overflow in sums of float32."""
_ALARM_AFTER_SECONDS = 2
"""The process ends itself this long after its time limit, in case its parent is gone."""
_MOST_ANSWER_BYTES = 1 << 20


class RewardProcess:
    """Calls a `reward` function in another process, one completion per call, for at most `seconds`.
    `code` is its source, and `file` the name for messages. The process starts at the first call,
    and again after a call that ended it or exceeded its time or memory. An exception in the
    function doesn't affect it."""

    def __init__(self, file: str, code: str, seconds: float, memory_bytes: int) -> None:
        self._file, self._code, self._seconds, self._bytes = file, code, seconds, memory_bytes
        self._folder = tempfile.TemporaryDirectory(prefix="rungs-verifier-")
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
        self._process = AnsweringProcess(CHILD, environment, folder, ("-s",))

    def start(self) -> str:
        """Start the process and load the code; return its problem in one line, or an empty text."""
        return self._started().message

    def reward(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> Verdict:
        """Return the verdict on a completion, in time whatever the function does."""
        if not self._process.is_started and (failed := self._started()).status != "ok":
            return failed
        call = {"prompt": prompt, "completion": completion, "answer": answer, "info": info}
        return self._exchange(call, self._seconds)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._process.end()
        self._folder.cleanup()

    def _started(self) -> Verdict:
        try:
            self._process.start()
        except OSError as error:
            message = f"{self._file}: its process did not start: {error.strerror}"
            return Verdict(status="error", message=message)
        for pipe in self._process.pipes:
            os.set_blocking(pipe.fileno(), False)
        setup = {
            "file": self._file,
            "code": self._code,
            "memory_bytes": self._bytes,
            "start_seconds": START_SECONDS + _ALARM_AFTER_SECONDS,
            "call_seconds": math.ceil(self._seconds) + _ALARM_AFTER_SECONDS,
        }
        verdict = self._exchange(setup, START_SECONDS)
        if verdict.status != "ok":
            self._process.end()
        return verdict

    def _exchange(self, request: dict[str, Any], seconds: float) -> Verdict:
        """Send a request and return the verdict in its answer; kill an unusable process."""
        name = secrets.token_hex(16)
        line = (json.dumps(request | {"id": name}) + "\n").encode()
        try:
            verdict = _verdict(_exchanged(self._process, line, f"{name} ".encode(), seconds))
        except (TimeoutError, EOFError, ValueError) as error:
            is_late = isinstance(error, TimeoutError)
            verdict = Verdict(status="timeout" if is_late else "error", message=str(error))
            self._process.end()
        if verdict.status == "out_of_memory":
            self._process.end()
        message = verdict.message and readable_line(f"{self._file}: {verdict.message}")
        return Verdict(verdict.rewards, verdict.status, message)


def _exchanged(process: AnsweringProcess, line: bytes, prefix: bytes, seconds: float) -> bytes:
    """Write a line to a process and return the answer line with this prefix, without it. Raises
    TimeoutError if there is none in time, EOFError if the process ended or closed its pipes,
    ValueError if the answer is too long."""
    received, deadline = b"", time.monotonic() + seconds
    requests, answers = process.pipes
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_WRITE)
        selector.register(answers, selectors.EVENT_READ)
        while (answer := _answer(received, prefix)) is None:
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready or time.monotonic() > deadline:
                raise TimeoutError(f"took longer than {seconds:g} s")
            for key, _ in ready:
                try:
                    if key.fileobj is answers:
                        data = os.read(key.fd, 1 << 16)
                        received += data
                    else:
                        data = line[: os.write(key.fd, line)]
                        line = line[len(data) :]
                except BrokenPipeError:
                    data = b""
                if not data:
                    raise EOFError(_exit_text(process))
                if not line and key.fileobj is requests:
                    selector.unregister(requests)
            if len(received) > _MOST_ANSWER_BYTES:
                raise ValueError(f"answered more than {_MOST_ANSWER_BYTES:,} bytes")
    return answer


def _answer(received: bytes, prefix: bytes) -> bytes | None:
    lines = received.split(b"\n")[:-1]
    return next((line.removeprefix(prefix) for line in lines if line.startswith(prefix)), None)


def _verdict(line: bytes) -> Verdict:
    """Return the verdict in an answer. Raises ValueError if it is malformed."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ValueError("wrote to the pipe to Rungs")
    if answer.get("out_of_memory"):
        return Verdict(status="out_of_memory", message="needs more than verifier_memory_bytes")
    if error := answer.get("error"):
        return Verdict(status="error", message=str(error))
    return _rewarded(answer["value"]) if "value" in answer else Verdict()


def _rewarded(value: Any) -> Verdict:
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards:
        return Verdict(status="error", message="returned {}, without any reward")
    for name, reward in rewards.items():
        if not name.isprintable():
            problem = f"returned a reward whose name can't be shown: {ascii(name)[:80]}"
            return Verdict(status="error", message=problem)
        if not isinstance(reward, float) or not abs(reward) <= MOST_REWARD:
            allowed = f"a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}"
            problem = f"returned {reward} for {name}; a reward must be {allowed}"
            return Verdict(status="error", message=problem)
    return Verdict(rewards)


def _exit_text(process: AnsweringProcess) -> str:
    """Describe how a process ended that closed its pipes."""
    code = process.exit_code(1)
    if code is None:
        return "closed the pipe to Rungs"
    if code < 0:
        return f"its process was ended by {name_of(-code)}"
    return f"ended its process with exit code {code}"
