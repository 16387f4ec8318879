"""Read chats: JSON lines with `messages`, or ShareGPT's `conversations`.

{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

Templates get `tools`, `documents` and `chat_template_kwargs` of a line, and all keys of a message.
Keys for unsupported kinds of training are refused; other keys are ignored."""

from typing import Any, NamedTuple

from rungs.common.strict_json import format_value

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_SHAREGPT_ROLES = {
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant"), ASSISTANT),
    **{"tool": "tool", "observation": "tool"},
}
TOOL_CALLS = "tool_calls"
_LISTS, _KWARGS, _SYSTEM = ("tools", "documents"), "chat_template_kwargs", "system"
_LEARNED_KEYS = ("weight", "train", "training", "loss")
"""Keys for whether to train on a message, 0 or 1: OpenAI and Mistral, Axolotl (2), ms-swift."""
_REFUSED = {
    "line": {
        *("functions", "function_call", "images", "videos", "audios", "weight", "loss_weight"),
        *("rejected", "rejected_response", "rejected_messages", "kto_tag"),
    },
    "message": {"train_detail", "training_detail", "loss_scale", "loss_weight", "images"},
}
"""Keys of unsupported kinds of training."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str | None
    """None for a message with only tool calls."""
    keys: dict[str, Any] = {}  # noqa: RUF012 — never changed
    """All keys in the file, for the template."""
    is_learned: bool = True
    """For a message of the assistant: whether it counts in the loss."""

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        values = {**self.keys, "role": self.role, "content": self.content}
        return {key: value for key, value in values.items() if value is not None}


class Chat(NamedTuple):
    """One chat, a line of a file."""

    messages: list[Message]
    variables: dict[str, Any]
    """Variables of the template, such as `tools`."""
    unused: frozenset[str]


class _Format(NamedTuple):
    chat: str
    role: str
    content: str
    roles: dict[str, str]


_FORMATS = (
    _Format("messages", "role", "content", {role: role for role in ROLES}),
    _Format("conversations", "from", "value", _SHAREGPT_ROLES),
)


def chat_of(value: Any, *, learns_empty: bool = False) -> Chat:
    """Return the chat in the value of a line. Raises ValueError if it is none, or has no answer to
    train on; see `says_something`."""
    if not isinstance(value, dict):
        raise ValueError(f'must be {{"messages": […]}}, not {format_value(value)}')
    kind = next((kind for kind in _FORMATS if kind.chat in value), None)
    if kind is None:
        keys = ", ".join(map(str, list(value)[:5])) or "none"
        raise ValueError(f"has neither messages nor conversations (its keys: {keys})")
    _refuse_keys("line", value)
    messages = messages_of(value[kind.chat], kind)
    messages = _with_system(messages, value.get(_SYSTEM))
    if not any(says_something(message, learns_empty) for message in messages):
        raise ValueError(f"{kind.chat}: has no message from the assistant to learn")
    used = (kind.chat, *_LISTS, _KWARGS, _SYSTEM)
    unused = frozenset(key for key, found in value.items() if found and key not in used)
    return Chat(messages, _variables(value), unused)


def messages_of(turns: Any, kind: _Format = _FORMATS[0]) -> list[Message]:
    """Return the messages in a list of a line. Raises ValueError if it isn't one, or is empty."""
    if not isinstance(turns, list):
        raise ValueError(f"{kind.chat}: {format_value(turns)} is not a list of messages")
    if not turns:
        raise ValueError(f"{kind.chat}: has no message")
    return [_message(kind, turn, f"{kind.chat}[{n}]") for n, turn in enumerate(turns)]


def says_something(message: Message, learns_empty: bool = False) -> bool:
    """Whether a message is an answer to train on: one with a content, or with `learns_empty` also
    an empty text, after which the turn ends."""
    has_text = bool(message.content or message.keys.get(TOOL_CALLS))
    is_answer = has_text or (learns_empty and message.content == "")
    return message.role == ASSISTANT and message.is_learned and is_answer


def _refuse_keys(what: str, values: dict[str, Any], place: str = "") -> None:
    found = (key for key in sorted(values.keys() & _REFUSED[what]) if values[key] not in _EMPTY)
    if key := next(found, None):
        raise ValueError(
            f"{place}{key}: not supported in a {what}; remove it, or leave this chat out"
        )


def _variables(line: dict[str, Any]) -> dict[str, Any]:
    kwargs = line.get(_KWARGS) or {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"{_KWARGS}: {format_value(kwargs)} is not an object")
    lists = {key: line[key] for key in _LISTS if line.get(key) is not None}
    for key, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
            raise ValueError(f"{key}: {format_value(values)} is not a list of objects")
    return kwargs | lists


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    """Return the messages, with the line's separate system message first."""
    if not system:
        return messages
    first = Message("system", _text(system, _SYSTEM))
    if messages[0].role != first.role:
        return [first, *messages]
    if messages[0].content != first.content:
        raise ValueError(f"{_SYSTEM}: is not what the first message says; remove one of the two")
    return messages


def _message(kind: _Format, turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{place}: {format_value(turn)} is not an object")
    _refuse_keys("message", turn, f"{place}: ")
    calls = turn.get(TOOL_CALLS)
    for key in (kind.role, kind.content):
        if key not in turn and not (key == kind.content and calls):
            raise ValueError(f"{place}: {key}: missing")
    role = turn[kind.role]
    if not isinstance(role, str) or role not in kind.roles:
        known = ", ".join(kind.roles)
        raise ValueError(f"{place}: {kind.role}: {format_value(role)} is not one of {known}")
    content = turn.get(kind.content)
    if content is not None or not calls:
        content = _text(content, f"{place}: {kind.content}")
    keys = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return Message(kind.roles[role], content, keys, _is_learned(kind.roles[role], turn, place))


def _is_learned(role: str, turn: dict[str, Any], place: str) -> bool:
    """Return the value of a message's `weight` or a synonym, True if there is none."""
    is_learned = True
    for key in _LEARNED_KEYS:
        value = turn.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{place}: {key}: {format_value(value)} is neither 0 nor 1")
        if value and role != ASSISTANT:
            problem = "only messages from the assistant are learned"
            raise ValueError(f"{place}: {key}: {format_value(value)}, but {problem}")
        is_learned = is_learned and bool(value)
    return is_learned


def _text(content: Any, place: str) -> str:
    """Return the content, or its joined text parts, as in {"type": "text", "text": "…"}."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{place}: has a part that is not text")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise ValueError(f"{place}: {format_value(content)} is not a string")
    return content
