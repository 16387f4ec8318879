"""Opens the verifier of a task: a built-in one, reasoning-gym's, or the user's Python file, whose
`reward` function runs in another process, which is killed if it takes too long. The process has a
clean environment, an empty working directory and little memory (`reward_child.py`). Requests and
answers are lines of JSON: answers are never executed."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rungs.common import strict_json
from rungs.common.errors import UserError, readable_line
from rungs.common.signals import name_of
from rungs.config.reinforce_config import TaskConfig
from rungs.tasks import math_verifier, reasoning_gym
from rungs.tasks.built_in_verifiers import BUILT_IN
from rungs.tasks.task import Item, Task, Verdict

TRUST_FLAG = "--trust-verifier"
CHILD = Path(__file__).with_name("reward_child.py")
START_SECONDS = 120
"""Time limit for loading the code, which may import from a slow disk."""
MOST_REWARD = 1e12
"""Squares of larger ones would overflow in sums of float32."""


class Verifier(AbstractContextManager["Verifier"]):
    """Rewards completions. A context manager, as it may have a process."""

    def __init__(
        self, name: str, process: "RewardProcess | None" = None, sha256: str | None = None
    ) -> None:
        self.name = name
        """Name of the user's file, or of the built-in verifiers."""
        self.sha256 = sha256
        """Checksum of the user's file, or None."""
        self._process = process

    def __call__(self, item: Item, completion: str) -> Verdict:
        """Return the verdict on a completion of an item's prompt, whose status says if the verifier
        failed."""
        if self._process and (item.verifier or self.name) not in BUILT_IN:
            return self._process.reward(item.prompt, completion, item.answer, item.info)
        return Verdict.of(BUILT_IN[item.verifier or self.name].is_correct(item, completion))

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.close()


def open_verifier(
    config: TaskConfig, task: Task, run_folder: Path, *, trust_verifier: bool
) -> Verifier:
    """Return the verifier of a config, or the task's own. Raises UserError if it is an untrusted
    Python file of the run folder, cannot be read or loaded, or the items lack its inputs."""
    name = config.verifier or task.verifier
    named = _named_by_items(task)
    if math_verifier.NAME in {name, *named}:
        return _started(" and ".join(named) or name, math_verifier.REWARD, config, None)
    if name in BUILT_IN:
        item = task.train[0]  # stands for generated ones
        if item.verifier is None and (problem := BUILT_IN[name].problem(item)):
            raise UserError(f"verifier: {name} does not fit the items of {task.name}: {problem}")
        return Verifier(" and ".join(named) or name)
    if name == reasoning_gym.VERIFIER:
        return _started(name, reasoning_gym.REWARD, config, None)
    path = run_folder / name
    text = strict_json.read_text(path)
    if not trust_verifier:
        raise UserError(
            f"{path}: is a program that rewards completions; read it, and if you trust it, give"
            f" {TRUST_FLAG}"
        )
    return _started(name, text, config, hashlib.sha256(text.encode()).hexdigest())


def _named_by_items(task: Task) -> list[str]:
    """Return the verifiers that the items of a file name."""
    items = task.train if isinstance(task.train, list) else []
    return sorted({item.verifier for item in [*items, *task.validation] if item.verifier})


def _started(name: str, text: str, config: TaskConfig, sha256: str | None) -> Verifier:
    limits = config.verifier_timeout_seconds, config.verifier_memory_bytes
    process = RewardProcess(name, text, *limits)
    if problem := process.start():
        process.close()
        raise UserError(f"{problem}; correct the file, so that it defines reward()")
    return Verifier(name, process, sha256)


class RewardProcess:
    """Calls a `reward` function in another process, one completion per call, for at most `seconds`.
    `code` is its source, and `file` the name for messages. The process starts at the first call,
    and again after a call that ended it or exceeded its time or memory. An exception in the
    function doesn't affect it."""

    def __init__(self, file: str, code: str, seconds: float, memory_bytes: int) -> None:
        self._file, self._seconds = file, seconds
        self._setup = {"file": file, "code": code, "memory_bytes": memory_bytes}
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
    answer = json.loads(line)
    if answer.get("out_of_memory"):
        return Verdict(status="out_of_memory", message="needs more than verifier_memory_bytes")
    value, error = answer.get("value"), answer.get("error")
    rewards = value if isinstance(value, dict) else {} if value is None else {"reward": value}
    if value == {}:
        error = "returned {}, without any reward"
    for name, reward in rewards.items():
        if not isinstance(reward, float) or not abs(reward) <= MOST_REWARD:
            allowed = f"a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}"
            error = f"returned {reward} for {name}; a reward must be {allowed}"
    return Verdict(status="error", message=error) if error else Verdict(rewards)


def _ended(process: subprocess.Popen[bytes]) -> Verdict:
    """Return the verdict of a process that ended or closed its pipes."""
    try:
        code = process.wait(1)
        ended = f"by {name_of(-code)}" if code < 0 else f"with exit code {code}"
        message = f"its process ended {ended}"
    except subprocess.TimeoutExpired:
        message = "closed the pipe to Rungs"
    return Verdict(status="error", message=message)
