"""Calls of tools, in the formats of the families that can be imported:

Qwen, Hermes       `<tool_call> {"name": …, "arguments": {…}} </tool_call>`, after any text
Mistral            `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, after any text
Llama 3.1 to 3.3   {"name": …, "parameters": {…}}, the whole answer"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

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

    def json(self) -> dict[str, Any]:
        """Return OpenAI's JSON; Mistral's template demands ids of nine characters."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def calls_in(text: str) -> tuple[list[Call], str]:
    """Return the calls with which a text begins, and the rest of it."""
    calls, decoder = list[Call](), json.JSONDecoder()
    while True:
        text = _AROUND.sub("", text, count=1)
        try:
            value, end = decoder.raw_decode(text)
            call = Call(value["name"], value.get("arguments", value.get("parameters")))
        except (ValueError, RecursionError, TypeError, KeyError):
            return calls, text
        if not isinstance(call.name, str) or not isinstance(call.arguments, dict):
            return calls, text
        calls.append(call)
        text = text[end:]


def call_beginning(template: ChatTemplate) -> str | None:
    """Return what a template begins a call with; None without tools, or in another format."""
    call = Call("f", {"x": "y"})
    function = {"name": call.name, "arguments": call.arguments}
    asked = [Message("user", "a")]
    called = Message(ASSISTANT, None, {TOOL_CALLS: [{**call.json(), "function": function}]})
    offered = {"name": "f", "description": "b", "parameters": {"type": "object", "properties": {}}}
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
    """Return a message whose calls have objects as arguments, not JSON. Raises UserError."""

    def read(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return call | {"function": call["function"] | {"arguments": arguments}}

    with errors_at(f"{TOOL_CALLS}: ", ValueError, KeyError, TypeError, AttributeError):
        return message | {TOOL_CALLS: [*map(read, message[TOOL_CALLS])]}


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
