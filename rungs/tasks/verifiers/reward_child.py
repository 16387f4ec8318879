"""The program of the process that runs a user's verifier, the only file that executes given code;
nothing imports it. The limits keep mistakes in trusted code from harming a run. They are not a
sandbox: malicious code can circumvent them.

Each input line is a JSON value: first the code and the limits, answered with `{}`, then calls,
answered with `{"value": …}`. Other answers are `{"error": "one line"}` and `{"out_of_memory":
true}`. An answer line begins with the `id` of its request; other output is ignored."""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import types
from typing import Any, BinaryIO

OUT_OF_MEMORY = b'{"out_of_memory": true}'
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF, _NO_NEW_PRIVILEGES = 444, 446, 38
_LANDLOCKS = ((1 << 6, 3, 3), (1 << 6, 3), (1 << 6,))
"""Refused operations: making devices; TCP; signals and abstract sockets to outside processes. Older
kernels know only the first one or two."""
_CAPABILITIES_VERSION = 0x20080522
_SYS_PTRACE, _SYS_ADMIN, _PERFMON = 19, 21, 38
"""Capabilities of root to read other processes even in a Landlock domain."""
_REFUSED = (
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"),
    *("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen"),
)
"""Python's audit events for other processes or the network. Unlike a limit on the number of
processes, refusing them also works for root, and permits threads."""


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = _private_pipes()
    setup = json.loads(requests.readline())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(setup["start_seconds"])
    _keep_apart()
    _limit(setup["memory_bytes"])
    module = types.ModuleType("verifier")
    module.__file__ = file = setup["file"]
    sys.modules["verifier"] = module
    _answer(answers, setup.pop("id"), file, _load, module, setup["code"])
    for line in iter(requests.readline, b""):
        signal.alarm(setup["call_seconds"])
        call = json.loads(line)
        _answer(answers, call.pop("id", ""), file, _value, module, call)


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the process's input and output, replaced by an empty input and a silent output for the
    verifier to read and print to."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    return requests, answers


def _keep_apart() -> None:
    """Isolate this process from the memory, environment and open files of outside processes, as any
    Landlock domain does (Linux 5.13), regardless of what it refuses. Do nothing elsewhere."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for refused in _LANDLOCKS:
        rules = (ctypes.c_uint64 * len(refused))(*refused)
        made = system.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
        if made >= 0:
            system.syscall(_LANDLOCK_RESTRICT_SELF, made, 0)
            os.close(made)
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: first 32 bits, the rest
    system.capget(header, sets)
    for capability in (_SYS_PTRACE, _SYS_ADMIN, _PERFMON):
        word, bit = divmod(capability, 32)
        for position in range(3 * word, 3 * word + 3):
            sets[position] &= ~(1 << bit)
    system.capset(header, sets)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # used by multiprocessing without an audit event
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
    """Return a number or named numbers as floats; the reader checks if they make a reward."""
    if type(value).__module__ == "numpy":
        value = value.item()
    if isinstance(value, dict):
        return {str(name): _checked(part) for name, part in value.items()}
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"returned {type(value).__name__}, not a number or {{name: number}}")


def _answer(answers: BinaryIO, request: str, file: str, act: Any, *arguments: Any) -> None:
    """Write the result of `act`, or its failure, as the answer to a request with an id."""
    try:
        answer = json.dumps(act(*arguments)).encode()
    except MemoryError:
        answer = OUT_OF_MEMORY
    except BaseException as error:  # including SystemExit
        answer = _error(error, file)
    signal.alarm(0)
    answers.write(b"\n%b %b\n" % (request.encode(), answer))
    answers.flush()


def _error(error: BaseException, file: str) -> bytes:
    lines, trace = [], error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(f"line {trace.tb_lineno}: ")
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    message = "".join(lines[-1:]) + " ".join(text.split())[:500]
    return json.dumps({"error": message}).encode()


if __name__ == "__main__":
    main()
