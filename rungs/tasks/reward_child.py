"""The program of the process that runs a user's verifier, the only file that executes given code;
nothing imports it. The limits keep mistakes in trusted code from harming a run. They are not a
sandbox: malicious code can circumvent them.

Each input line is a JSON value: first the code and the limits, answered with `{}`, then calls,
answered with `{"value": …}`. Other answers are `{"error": "one line"}` and `{"out_of_memory":
true}`."""

import contextlib
import json
import os
import resource
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, BinaryIO

_MOST_CHARACTERS = 500


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = _private_pipes()
    setup = json.loads(requests.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
    module = types.ModuleType("verifier")
    module.__file__ = file = setup["file"]
    sys.modules["verifier"] = module
    _answer(answers, file, _load, module, setup["code"])
    for line in iter(requests.readline, b""):
        call = json.loads(line)
        _answer(answers, file, _value, module, call)


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the process's input and output, replaced by an empty input and a silent output for the
    verifier to read and print to."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    return requests, answers


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


def _answer(
    answers: BinaryIO, file: str, act: Callable[..., dict[str, Any]], *arguments: Any
) -> None:
    """Write the result of `act` with its arguments, or its failure, as a line."""
    try:
        answer = act(*arguments)
    except MemoryError:
        answer = {"out_of_memory": True}
    except BaseException as error:  # including SystemExit
        trace = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in trace if frame.filename == file]
        place = f"line {lines[-1]}: " if lines else ""
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        answer = {"error": place + text[:_MOST_CHARACTERS]}
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
