"""The program of the processes that run a user's code: a verifier, an environment or tools. It is
the only file that executes given code; nothing imports it. The limits keep mistakes in trusted code
from harming a run. They are not a sandbox: malicious code can circumvent them.

The input is a socket. Each line is a JSON value: first the code and the limits, then calls,
`{"name": …, "arguments": {…}}`. They are answered with `{"value": …}`, `{"error": "one line"}` or
`{"out_of_memory": true}`. Calls of an environment or tools go to forks of the process, each through
a socket of its own: a message with a socket makes a fork, and is answered with its process id, and
a message of a process id ends that fork."""

import contextlib
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

_MOST_CHARACTERS, _MOST_TEXT = 500, 1 << 20
_EPISODE: list[Any] = []
"""The `Environment` of a fork."""
_KINDS = {
    "reward": "function reward(prompt, completion, answer, info)",
    "Environment": "class Environment with reset(item, seed) and step(text)",
    "TOOLS": "TOOLS, a list of {name, description, parameters}, and a function of each name",
}


def main() -> None:
    """Answer requests until the input ends."""
    requests = _private_socket()
    setup = json.loads(requests.makefile("rb").readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
    module = types.ModuleType("verifier")
    module.__file__ = setup["file"]
    sys.modules["verifier"] = module
    _answer(requests, module, _load, setup["code"], setup["kind"])
    seconds = min(math.ceil(2 * setup["seconds"]), 1 << 30)
    serve = _serve if setup["kind"] == "reward" else _fork
    serve(requests, module, seconds)


def _private_socket() -> socket.socket:
    """Return the process's input; the code has an empty one, and a silent output."""
    requests = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    return requests


def _serve(requests: socket.socket, module: types.ModuleType, seconds: int) -> None:
    """Answer calls until there are no more. After so many seconds, nobody waits for an answer."""
    for line in requests.makefile("rb"):
        signal.alarm(seconds)
        _answer(requests, module, _value, json.loads(line))
        signal.alarm(0)


def _fork(requests: socket.socket, module: types.ModuleType, seconds: int) -> None:
    """Make and end forks until the input ends."""
    while True:
        message, sockets, *_ = socket.recv_fds(requests, 32, 1)
        if not message:
            return
        pid = os.fork() if sockets else int(message)
        if pid == 0:
            os.setsid()  # so that what it starts ends with it
            requests.close()
            _serve(socket.socket(fileno=sockets[0]), module, seconds)
            os._exit(0)
        if sockets:
            os.close(sockets[0])
        else:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        requests.sendall(b"%d\n" % pid)


def _load(module: types.ModuleType, code: str, kind: str) -> Any:
    exec(compile(code, str(module.__file__), "exec"), module.__dict__)
    found = getattr(module, kind, None)
    names = [one["name"] for one in found or ()] if kind == "TOOLS" else [kind]
    if not names or not all(callable(getattr(module, name, None)) for name in names):
        raise TypeError(f"has no {_KINDS[kind]}")
    return found if kind == "TOOLS" else None


def _value(module: types.ModuleType, call: dict[str, Any]) -> Any:
    name, arguments = call["name"], call["arguments"]
    if name == "reward":
        return _reward(module.reward(**arguments))
    if name == "reset":
        _EPISODE[:] = [module.Environment()]
        if _EPISODE[0].reset(**arguments) is not None:
            raise TypeError("reset() must return nothing: the prompt is the item's")
        return None
    if name == "step":
        return _reply(_EPISODE[0].step(**arguments))
    return _text(getattr(module, arguments["name"])(**arguments["arguments"]))


def _reply(value: Any) -> Any:
    """Return a reply, its rewards and whether the episode is over; the reader checks rewards."""
    if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[2], bool):
        needed = "(reply, reward, over), such as ('lower', 0, False)"
        raise TypeError(f"step() must return {needed}, not {value!r:.80}")
    text, reward, over = value
    return [_text(text), _reward(reward), over]


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:_MOST_TEXT]


def _reward(value: Any) -> Any:
    """Return a number or named numbers as floats; the reader checks if they make a reward."""
    if type(value).__module__ == "numpy":
        value = value.item()
    if isinstance(value, dict):
        return {str(name): _reward(part) for name, part in value.items()}
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"returned {type(value).__name__}, not a number or {{name: number}}")


def _answer(
    answers: socket.socket, module: types.ModuleType, act: Callable[..., Any], *arguments: Any
) -> None:
    """Send the result of `act` with the module and arguments, or its failure, as a line."""
    try:
        answer = json.dumps({"value": act(module, *arguments)})
    except MemoryError:
        answer = '{"out_of_memory": true}'
    except BaseException as error:  # including SystemExit
        trace = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in trace if frame.filename == module.__file__]
        place = f"line {lines[-1]}: " if lines else ""
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        answer = json.dumps({"error": place + text[:_MOST_CHARACTERS]})
    answers.sendall(answer.encode() + b"\n")


if __name__ == "__main__":
    main()
