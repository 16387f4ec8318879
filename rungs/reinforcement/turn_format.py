"""How the turns of a completion are tokens. Without turns, and for models without a chat template,
the text of the item is the prompt, and replies follow as they are. With a template, the prompt is a
user's message, and replies are messages of the user or of tools."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import ASSISTANT, TOOL_CALLS, Message
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tool_calls import Call, call_beginning, calls_in
from rungs.tasks.task import Item

_CALL_END = "/>"
"""Of a call without a template, `<calculator 2+3/>`; the reply is `<reply 5/>`."""
_CHARACTERS_PER_TOKEN = 16
"""Of longer replies not even the rest is tokenized."""
_ANSWER, _REPLY = "RungsAnswer", "RungsReply"
"""Placeholders, of which the template makes a chat."""


class ReplyTokens(NamedTuple):
    """A reply as the model sees it."""

    tokens: list[int]
    text: str
    warning: str
    """What is odd about it, such as that it was cut; empty if nothing is."""


class TurnFormat:
    """The format of a task. Raises UserError if the template can't express it.

    Args:
        template: the model's; None for tasks without turns.
        stop_tokens: those that end texts and answers.
        tools: descriptions of what the model may call.

    Attributes:
        turn_ends: further tokens after which a turn may have ended."""

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        stop_tokens: Sequence[int],
        tools: Sequence[dict[str, Any]],
    ) -> None:
        self._config, self._tokenizer, self._template = config, tokenizer, template
        self._stops = [tokenizer.special_names.get(token, "") for token in stop_tokens]
        taken = {one["name"]: one.get("parameters", {}).get("properties", {}) for one in tools}
        self._parameters = {
            name: next(iter(parameters), None) for name, parameters in taken.items()
        }
        self._variables = {"tools": [{"type": "function", "function": one} for one in tools]}
        self._beginning = call_beginning(template) if template and tools else None
        names = "|".join(map(re.escape, self._parameters))
        self._call = re.compile(rf"(?s).*<({names}) (.*){_CALL_END}\Z") if tools else None
        self._end = config.turn_end
        if tools and self._beginning is None:
            self._end = _CALL_END
        self.turn_ends = self._tokens_ending(self._end) if self._end else ()
        if template and config.turn_end:
            raise UserError("turn_end: the model's chat template ends turns; remove it")
        self._around(1)

    def prompt(self, item: Item) -> list[int]:
        """Return the token ids of an item's prompt. Raises UserError."""
        if self._template is None:
            return self._tokenizer.encode_prompt(item.prompt)
        variables = self._variables if self._beginning else {}
        chat = [Message("user", item.prompt)]
        text = self._template.render(chat, variables, add_generation_prompt=True)
        return self._tokenizer.encode(text)

    def text(self, tokens: Sequence[int]) -> str:
        """Return what the tokens of a turn say, without the one that ended it."""
        return self._tokenizer.decode(tokens, skip_special_tokens=self._beginning is None)

    def ends(self, text: str) -> bool:
        """Return whether a turn ends after a text whose last token is one of `turn_ends`."""
        if self._call and self._beginning is None:
            return bool(self.calls(text))
        return self._end is not None and text.endswith(self._end)

    def calls(self, text: str) -> list[Call]:
        """Return the calls of known tools with which a turn ends."""
        if self._beginning is not None:
            found, rest = calls_in(text[text.find(self._beginning) :])
            is_known = all(call.name in self._parameters for call in found)
            return found if is_known and not rest and self._beginning in text else []
        match = self._call and self._call.match(text)
        if not match:
            return []
        name, given = match.groups()
        return [Call(name, _arguments(given.strip(), self._parameters[name]))]

    def reply(self, texts: Sequence[str]) -> ReplyTokens:
        """Return a reply's tokens. Raises UserError if the tokenizer has none for it."""
        most, literal = self._config.max_reply_tokens, self._tokenizer.literal
        warnings, around = list[str](), self._around(len(texts))
        tokens, shown = [*around[0]], list[str]()
        for text, after in zip(texts, around[1:], strict=True):
            ids = literal.encode(text[: most * _CHARACTERS_PER_TOKEN])
            if len(ids) > most or len(text) > most * _CHARACTERS_PER_TOKEN:
                warnings.append(f"a reply is cut to {most} tokens (max_reply_tokens)")
            names = [name for name in self._tokenizer.special_names.values() if name in text]
            if names:
                warnings.append(f"a reply has {' '.join(names)}, read as text, not as tokens")
            if any(not c.isprintable() and not c.isspace() for c in text):
                warnings.append("a reply has control characters")
            tokens += ids[:most] + after
            shown.append(text if len(ids) <= most else literal.decode(ids[:most]))
        return ReplyTokens(tokens, "\n".join(shown), "; ".join(dict.fromkeys(warnings)))

    @functools.lru_cache  # noqa: B019 — as long as the run
    def _around(self, count: int) -> list[list[int]]:
        """Return the tokens before, between and after so many replies to a turn."""
        if self._template is None:
            plain = ("<reply ", _CALL_END) if self._call else ("", "")
            before, after = map(self._tokenizer.continuing.encode, plain)
            return [before, *[after + before] * (count - 1), after]
        pieces = self._rendered(count)
        return [self._tokenizer.continuing.encode(piece) for piece in pieces]

    def _rendered(self, count: int) -> list[str]:
        """Return the template's text before, between and after replies, from the end of the turn
        that they answer, whose last token the model has written."""
        assert self._template is not None
        answer, replies = Message(ASSISTANT, _ANSWER), [Message("user", _REPLY)] * count
        if self._beginning is not None:
            name = next(iter(self._parameters))
            call = Call(name, {"x": _ANSWER})
            jsons = [
                call.json() | {"function": {"name": name, "arguments": call.arguments}}
                for _ in range(count)
            ]
            answer = Message(ASSISTANT, None, {TOOL_CALLS: jsons})
            replies = [
                Message("tool", _REPLY, {"name": name, "tool_call_id": one["id"]}) for one in jsons
            ]
        elif self._call:
            replies = [Message("user", f"<reply {_REPLY}{_CALL_END}")] * count
        chat = [Message("user", "a"), answer, *replies]
        variables = self._variables if self._beginning else {}
        text = self._template.render(chat, variables, add_generation_prompt=True)
        said, *pieces = text[text.rfind(_ANSWER) :].split(_REPLY)
        ends = [said.find(name) + len(name) for name in self._stops if name and name in said]
        if not ends or len(pieces) != count:
            raise UserError(
                "the chat template has no place for a reply after an answer that ends with"
                f" {' or '.join(filter(None, self._stops))}; give the model one that has"
            )
        return [said[min(ends) :], *pieces]

    def _tokens_ending(self, text: str) -> tuple[int, ...]:
        """Return the tokens with which a text may end. Raises UserError if there are none."""
        numbers, last = range(self._tokenizer.vocab_size), text.encode()[-1:]
        found = tuple(n for n in numbers if self._tokenizer.bytes_of(n).endswith(last))
        if not found:
            raise UserError(f"the model's tokenizer has no token with which {text!r} ends")
        return found


def _arguments(text: str, parameter: str | None) -> dict[str, Any]:
    """Return the arguments in a call without a template: JSON, or the text of the first one."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {parameter: text} if parameter else {}
