"""Read chats: JSON lines with `messages`, or ShareGPT's `conversations`.

{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

Other keys of a line, such as `id` or `source`, are ignored.
"""

from typing import Any, NamedTuple

from rungs.common.strict_json import format_value
from rungs.data.json_lines import parse_json

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bard": ASSISTANT,
    "bing": ASSISTANT,
    "assistant": ASSISTANT,
    "tool": "tool",
    "observation": "tool",
}


class Message(NamedTuple):
    """A turn of a chat."""

    role: str
    content: str


class _Format(NamedTuple):
    """The keys of a kind of file."""

    chat: str
    role: str
    content: str
    roles: dict[str, str]


_FORMATS = (
    _Format("messages", "role", "content", {role: role for role in ROLES}),
    _Format("conversations", "from", "value", _SHAREGPT_ROLES),
)


def parse_chat(line: bytes) -> list[Message]:
    """Return the messages of a line; raises ValueError if it is not a chat with an answer."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError(f'must be {{"messages": […]}}, not {format_value(value)}')
    kind = next((kind for kind in _FORMATS if kind.chat in value), None)
    if kind is None:
        keys = ", ".join(map(str, list(value)[:5])) or "none"
        raise ValueError(f"has neither messages nor conversations (its keys: {keys})")
    turns = value[kind.chat]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{kind.chat}: {format_value(turns)} is not a list of messages")
    messages = [_message(kind, turn, f"{kind.chat}[{n}]") for n, turn in enumerate(turns)]
    if not any(message.role == ASSISTANT and message.content for message in messages):
        raise ValueError(f"{kind.chat}: has no message from the assistant, so nothing to learn")
    return messages


def _message(kind: _Format, turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{place}: {format_value(turn)} is not an object")
    for key in (kind.role, kind.content):
        if key not in turn:
            raise ValueError(f"{place}: {key}: missing")
    role = turn[kind.role]
    if not isinstance(role, str) or role not in kind.roles:
        known = ", ".join(kind.roles)
        raise ValueError(f"{place}: {kind.role}: {format_value(role)} is not one of {known}")
    return Message(kind.roles[role], _text(turn[kind.content], f"{place}: {kind.content}"))


def _text(content: Any, place: str) -> str:
    """Return a content, or the joined texts of its parts, as in {"type": "text", "text": "…"}."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{place}: has a part that is not text")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise ValueError(f"{place}: {format_value(content)} is not a string")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: has an invalid character (a lone surrogate)") from None
    return content
