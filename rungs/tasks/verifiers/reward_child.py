"""The program of the process in which a user's verifier runs. Nothing imports this file: it is the
only one that runs code that it was given.

Each line that it reads and writes is one JSON value. The first has the code and the limits, and is
answered with `{}`; each of the others is a call, answered with `{"value": …}`. Instead of these an
answer can be `{"error": "one line"}` or `{"out_of_memory": true}`.

The limits keep mistakes in trusted code from harming a run. They are not a sandbox: code that means
harm can get around them.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import types
from typing import Any, BinaryIO

OUT_OF_MEMORY = b'{"out_of_memory": true}\n'
_REFUSED = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "pty.spawn",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.sendto",
    "subprocess.Popen",
)
"""Audit events of Python that stand for another process or the network. Unlike a limit on the
number of processes, refusing these works for root as well, and leaves threads."""


def main() -> None:
    """Answer requests until their end."""
    requests, answers = _private_pipes()
    setup = json.loads(requests.readline())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(setup["start_seconds"])
    _limit(setup["memory_bytes"])
    module = types.ModuleType("verifier")
    module.__file__ = setup["file"]
    sys.modules["verifier"] = module
    _answer(answers, setup["file"], _load, module, setup["code"])
    for line in iter(requests.readline, b""):
        signal.alarm(setup["call_seconds"])
        _answer(answers, setup["file"], _value, module, json.loads(line))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the process's input and output; leave an empty input and a silent output behind, for
    whatever the verifier reads and prints."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    return requests, answers


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # what multiprocessing calls, without an audit event
    vars(importlib.import_module("_posixsubprocess"))["fork_exec"] = _refuse_process
    sys.addaudithook(_audit)


def _refuse_process(*_: object) -> None:
    raise PermissionError("a verifier may not start processes or use the network")


def _audit(event: str, _: object) -> None:
    if event in _REFUSED:
        _refuse_process()


def _load(module: types.ModuleType, code: str) -> dict[str, Any]:
    exec(compile(code, str(module.__file__), "exec"), module.__dict__)
    if not callable(getattr(module, "reward", None)):
        raise TypeError("has no function reward(prompt, completion, answer, info)")
    return {}


def _value(module: types.ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    return {"value": _checked(module.reward(**call))}


def _checked(value: Any) -> Any:
    """Return a number or named numbers as floats; whether they make a reward, the reader checks."""
    if type(value).__module__ == "numpy":
        value = value.item()
    if isinstance(value, dict):
        return {str(name): _checked(part) for name, part in value.items()}
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"returned {type(value).__name__}, not a number or {{name: number}}")


def _answer(answers: BinaryIO, file: str, act: Any, *arguments: Any) -> None:
    """Write the result of `act`, or how it failed."""
    try:
        answer = (json.dumps(act(*arguments)) + "\n").encode()
    except MemoryError:
        answer = OUT_OF_MEMORY
    except BaseException as error:  # SystemExit, too
        answer = _error(error, file)
    signal.alarm(0)
    answers.write(answer)
    answers.flush()


def _error(error: BaseException, file: str) -> bytes:
    lines, trace = [], error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(f"line {trace.tb_lineno}: ")
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    message = "".join(lines[-1:]) + " ".join(text.split())[:500]
    return (json.dumps({"error": message}) + "\n").encode()


if __name__ == "__main__":
    main()
