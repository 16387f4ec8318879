"""Tools that a model may call: a calculator, Python, and functions of the user's files, which say
in `TOOLS` what they are called and take, in the format of OpenAI's API. What a tool returns or
raises is what the model is told."""

from typing import Any, NamedTuple

from rungs.tasks.built_in_verifiers import ExpressionError, evaluate
from rungs.tasks.code_process import Answer, Fork, ForkingProcess


def _schema(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    """Return the description of a tool that takes a text."""
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"name": name, "description": description, "parameters": parameters}


CALCULATOR = _schema(
    "calculator",
    "Returns the value of an arithmetic expression.",
    "expression",
    "integers, + - * / and brackets",
)
PYTHON = f"""
import contextlib, io
TOOLS = [{_schema("python", "Runs Python and returns what it prints.", "code", "the program")!r}]
_names = {{"__name__": "__main__"}}
def python(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "python", "exec"), _names)
    return out.getvalue()
"""
"""Code of the tool that runs code."""


class Result(NamedTuple):
    """What the model is told about a call."""

    text: str
    warning: str = ""
    """What the user is told: a tool took too long, or ended."""


class Tools:
    """The tools of one completion. Those in other processes keep their state from call to call, and
    begin anew after one that took too long."""

    def __init__(self, processes: dict[str, ForkingProcess]) -> None:
        self._processes = processes
        self._forks: dict[ForkingProcess, Fork] = {}

    def result(self, name: str, arguments: dict[str, Any]) -> Result:
        """Return the result of a call, in time whatever the tool does."""
        if name not in self._processes:
            return Result(_calculated(arguments))
        process = self._processes[name]
        fork = self._forks.get(process) or process.fork()
        if isinstance(fork, Answer):
            return Result(f"error: {fork.message}", fork.message)
        self._forks[process] = fork
        answer = fork.call("tool", {"name": name, "arguments": arguments})
        if answer.status == "ok":
            return Result(answer.value)
        if answer.ended:
            self._forks.pop(process).close()
        return Result(f"error: {answer.message}", answer.message if answer.ended else "")

    def close(self) -> None:
        """End what the tools have started."""
        while self._forks:
            self._forks.popitem()[1].close()


def _calculated(arguments: dict[str, Any]) -> str:
    """Return the value of an expression, such as `2/3`, or what is wrong with it."""
    try:
        return str(evaluate(str(arguments["expression"]))[0])
    except (ExpressionError, KeyError):
        return "error"
