"""Jinja's sandbox with what transformers gives chat templates. Imported when a template is first
rendered, as few commands need Jinja."""

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from rungs.common.errors import UserError, reason
from rungs.data.text.chat_template import MARK


@functools.lru_cache
def compiled(source: str) -> jinja2.Template:
    """Return a template that puts `MARK` around the text of {% generation %} …
    {% endgeneration %}. Raises UserError if it is not valid."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
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
        return f"{MARK}{caller()}{MARK}"


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
