"""A `reward` function in another process, which is killed if it takes too long. The process has a
clean environment, an empty working directory and little memory (`reward_child.py`). Requests and
answers are lines of JSON: answers are never executed."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from rungs.common.errors import readable_line
from rungs.common.signals import name_of
from rungs.tasks.task import Verdict

CHILD = Path(__file__).with_name("reward_child.py")
START_SECONDS = 120
"""Time limit for loading the code, which may import from a slow disk."""
MOST_REWARD = 1e12
"""Squares of larger ones would overflow in sums of float32."""
_ALARM_AFTER_SECONDS = 2
"""The process ends itself this long after its time limit, in case its parent is gone."""


class RewardProcess:
    """Calls a `reward` function in another process, one completion per call, for at most `seconds`.
    `code` is its source, and `file` the name for messages. The process starts at the first call,
    and again after a call that ended it or exceeded its time or memory. An exception in the
    function doesn't affect it."""

    def __init__(self, file: str, code: str, seconds: float, memory_bytes: int) -> None:
        self._file, self._seconds = file, seconds
        self._setup = {
            "file": file,
            "code": code,
            "memory_bytes": memory_bytes,
            "alarm_seconds": math.ceil(seconds) + _ALARM_AFTER_SECONDS,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="rungs-verifier-")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the process and load the code; return its problem in one line, or an empty text."""
        return self._started().message

    def reward(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> Verdict:
        """Return the verdict on a completion, in time whatever the function does."""
        if self._process is None and (failed := self._started()).status != "ok":
            return failed
        call = {"prompt": prompt, "completion": completion, "answer": answer, "info": info}
        return self._exchange(call, self._seconds)

    def close(self) -> None:
        """Kill the process and remove its folder."""
        self._end()
        self._folder.cleanup()

    def _started(self) -> Verdict:
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
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        verdict = self._exchange(self._setup, START_SECONDS)
        if verdict.status != "ok":
            self._end()
        return verdict

    def _exchange(self, request: dict[str, Any], seconds: float) -> Verdict:
        """Send a request and return the verdict in its answer; kill an unusable process."""
        process, is_late = self._process, threading.Event()
        assert process is not None

        def stop() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            answer = _answer_of(process, json.dumps(request).encode() + b"\n")
            verdict = _verdict(answer) if answer else _ended(process)
        except BaseException:  # Ctrl-C: a late answer must not be taken for the next one
            self._end()
            raise
        finally:
            timer.cancel()
        if is_late.is_set():
            verdict = Verdict(status="timeout", message=f"took longer than {seconds:g} s")
        if not answer or verdict.status in ("timeout", "out_of_memory"):
            self._end()
        message = verdict.message and readable_line(f"{self._file}: {verdict.message}")
        return Verdict(verdict.rewards, verdict.status, message)

    def _end(self) -> None:
        """Kill the process, if it runs, with those that it started."""
        if process := self._process:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # as it may hold unwritten bytes
                    pipe and pipe.close()
            self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _answer_of(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Return the answer, a line; empty if the process ended or closed its pipes."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    answer = process.stdout.readline()
    return answer if answer.endswith(b"\n") else b""


def _verdict(line: bytes) -> Verdict:
    """Return the verdict in an answer."""
    try:
        answer = json.loads(line)
    except ValueError:
        return Verdict(status="error", message="wrote to the pipe to Rungs")
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
        if not isinstance(reward, float) or not abs(reward) <= MOST_REWARD:
            allowed = f"a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}"
            problem = f"returned {reward} for {name}; a reward must be {allowed}"
            return Verdict(status="error", message=problem)
    return Verdict(rewards)


def _ended(process: subprocess.Popen[bytes]) -> Verdict:
    """Return the verdict of a process that ended or closed its pipes."""
    try:
        code = process.wait(1)
        ended = f"by {name_of(-code)}" if code < 0 else f"with exit code {code}"
        message = f"its process ended {ended}"
    except subprocess.TimeoutExpired:
        message = "closed the pipe to Rungs"
    return Verdict(status="error", message=message)
