"""Calls of tools, in the formats of the families that can be imported:

Qwen, Hermes       <tool_call> {"name": …, "arguments": {…}} </tool_call>, after any text
Mistral            [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], after any text
Llama 3.1 to 3.3   {"name": …, "parameters": {…}}, the whole answer"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Self

from rungs.common.errors import UserError, errors_at
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import ASSISTANT, TOOL_CALLS, Message
from rungs.data.text.stop_strings import StopStrings
from rungs.data.text.tokenizer import Tokenizer

_TAGS, _OBJECT = ("<tool_call>", "[TOOL_CALLS]"), "{"
_AROUND = re.compile(r"(?:</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|[\s\[\],;])*")


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Return the call that a JSON value describes, if it does."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters"))
        return cls(value["name"], arguments) if isinstance(arguments, dict) else None

    def json(self) -> dict[str, Any]:
        """Return what clients get; Mistral's template demands ids of nine characters."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def calls_in(text: str) -> tuple[list[Call], str]:
    """Return the calls with which a text begins, and the rest of it."""
    calls, decoder = list[Call](), json.JSONDecoder()
    while True:
        text = _AROUND.sub("", text, count=1)
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return calls, text
        if (call := Call.of(value)) is None:
            return calls, text
        calls.append(call)
        text = text[end:]


def call_beginning(template: ChatTemplate) -> str | None:
    """Return what calls begin with, by how a template renders one; None if it renders no tools, or
    in another format."""
    call = Call("f", {"x": "y"})
    function = {"name": call.name, "arguments": call.arguments}
    asked = [Message("user", "a")]
    called = Message(ASSISTANT, None, {TOOL_CALLS: [{**call.json(), "function": function}]})
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    offered = {"name": "f", "description": "b", "parameters": parameters}
    variables = {"tools": [{"type": "function", "function": offered}]}
    try:
        prompt = template.render(asked, variables, add_generation_prompt=True)
        text = template.render([*asked, called], variables)
    except UserError:
        return None
    for tag in _TAGS:
        if tag in text and calls_in(text[text.rindex(tag) :])[0] == [call]:
            return tag
    answer = text.removeprefix(prompt).lstrip()
    return _OBJECT if answer.startswith(_OBJECT) and calls_in(answer)[0] == [call] else None


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, as templates expect, instead of
    OpenAI's JSON. Raises ValueError."""

    def read(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(arguments, str):
            return call
        with errors_at(f"{TOOL_CALLS}: arguments: ", ValueError):
            return call | {"function": function | {"arguments": json.loads(arguments or "{}")}}

    calls = message.get(TOOL_CALLS)
    return message | {TOOL_CALLS: [*map(read, calls)]} if isinstance(calls, list) else message


class CallReader:
    """Finds calls in an answer as it grows.

    Args:
        beginning: see `call_beginning`.
        names: tools that may be called.

    Attributes:
        calls: those of the finished answer."""

    def __init__(self, tokenizer: Tokenizer, beginning: str, names: Collection[str]) -> None:
        self._tokenizer, self._beginning, self._names = tokenizer, beginning, names
        self._find = StopStrings(tokenizer, [beginning])
        self.calls: list[Call] = []

    def text_before(self, text: str, tokens: Sequence[int], is_last: bool) -> str:
        """Return an answer's text without calls. Until the last time it lacks what may become one;
        then all of it is the text if that isn't calls of known tools and nothing else."""
        at = self._find.first(text, tokens)
        if at < 0 or (self._beginning == _OBJECT and text[:at].strip()):
            return text if is_last else self._find.without_beginning(text, tokens)
        if is_last:
            shown = self._tokenizer.decode(tokens)
            calls, rest = calls_in(shown[shown.index(self._beginning) :])
            if rest or not all(call.name in self._names for call in calls):
                return text
            self.calls = calls
        return text[:at]
