"""The program that renders chat templates in a sandbox with limits on time and memory, as templates
from the hub can't be trusted to end.

Each input line is a JSON list: the template, the mark to put before and after the text of each
{% generation %} … {% endgeneration %}, and the variables, null to only compile the template. Each
answer is an object with a `text`, or with an `error` of one line."""

import contextlib
import datetime
import faulthandler
import functools
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MOST_SECONDS = 3
"""Processor time for one chat; templates take milliseconds."""
MOST_BYTES = 1 << 30
"""Address space, on systems that can limit it."""


def main() -> None:
    """Answer requests until the input ends."""
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(OSError, ValueError):  # macOS can't limit it
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for line in sys.stdin.buffer:
        _limit_seconds(MOST_SECONDS)
        answer = _answer(line)
        _limit_seconds(0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _limit_seconds(seconds: float) -> None:
    """Kill the process after this much more processor time, on Windows after this time; 0 for no
    limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _answer(line: bytes) -> str:
    problem = "is not valid"
    try:
        source, mark, variables = json.loads(line)
        template = _compiled(source, mark)
        problem = "refuses this chat"
        return json.dumps({"text": "" if variables is None else template.render(variables)})
    except MemoryError:
        return json.dumps({"error": f"needs more than {MOST_BYTES >> 20} MiB of memory"})
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        return json.dumps({"error": f"{problem}: {reason}"})


@functools.lru_cache
def _compiled(source: str, mark: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, jinja2.ext.loopcontrols]
    )
    environment.extend(generation_mark=mark)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(source)


class _GenerationMarks(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012 — as Jinja declares it

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        mark: str = self.environment.generation_mark  # type: ignore[attr-defined]
        return f"{mark}{caller()}{mark}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
