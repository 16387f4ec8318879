"""The sandbox in which chat templates run: Jinja with the names and filters of transformers.

Jinja takes a moment to import, so this is imported once there is a template.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from rungs.common.errors import UserError, reason


def compile_template(source: str, mark: str) -> jinja2.Template:
    """Return a template that puts a mark before and after the text of each {% generation %} …
    {% endgeneration %}.

    Raises:
        UserError: it is not a valid template.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMarks, jinja2.ext.loopcontrols],
    )
    environment.extend(generation_mark=mark)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template is not valid: {reason(error)}") from None


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


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON without HTML's escapes, which Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
