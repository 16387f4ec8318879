"""A chat template: Jinja that renders messages as the text that a model was trained on.

Published models have it in `chat_template.jinja` or `tokenizer_config.json`. It runs in a sandbox,
with the names and filters that transformers offers it:
https://huggingface.co/docs/transformers/chat_templating_writing

A template may mark what the assistant says with {% generation %} … {% endgeneration %}. In one
without marks, the content of each assistant message is found by rendering the chat with another
content in its place.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file
from rungs.common.strict_json import read_text
from rungs.data.chats.messages import ASSISTANT, Message
from rungs.data.tokenizer_config import CONFIG_FILE, json_object, special_tokens
from rungs.data.tokenizer_files import finder

TEMPLATE_FILE = "chat_template.jinja"
_OLDER_TEMPLATE_FILE = "chat_template.json"
_TEMPLATE_KEY, _DEFAULT = "chat_template", "default"
_PLACEHOLDER, _MARK = "\uf8ffcontent\uf8ff", "\uf8ffmark\uf8ff"
"""For a message's content, and around what the assistant says. U+F8FF is for private use, so chats
don't have it."""

Span = tuple[int, int]
"""Positions of characters: the first, and that after the last."""


class Rendered(NamedTuple):
    """A chat as a text."""

    text: str
    answers: list[Span]
    """What the assistant says, in order."""
    are_marked: bool
    """Whether the template marks them. If not, the token that ends a turn may follow them."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: in Jinja.
        special_tokens: by their names in transformers, such as `bos_token`.

    Raises:
        UserError: it is not a valid template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source, self.special_tokens = source, special_tokens
        # Jinja takes a moment to import, and most runs have no template
        from rungs.data.chats.template_sandbox import compile_template

        self._template = compile_template(source, _MARK)

    @classmethod
    def load(cls, place: Path | str, file: Path | None = None) -> Self:
        """Load the template that belongs to a tokenizer.

        Args:
            place: as for `load_tokenizer`.
            file: a template to use instead of its own.

        Raises:
            UserError: there is no template, or it is not valid.
        """
        template = cls.find(place, file)
        if template is None:
            raise UserError(
                f"{place}: its tokenizer has no chat template (neither {TEMPLATE_FILE} nor"
                f" {_TEMPLATE_KEY} in {CONFIG_FILE}); give one with --chat-template FILE"
            )
        return template

    @classmethod
    def find(cls, place: Path | str, file: Path | None = None) -> Self | None:
        """Return the same as `load`, but None if there is no template."""
        find = finder(place)
        config = json_object(find(CONFIG_FILE))
        source = read_text(file) if file else _find_source(find, config)
        if source is None:
            return None
        return cls(source, special_tokens(find))

    def save(self, folder: Path) -> None:
        """Write the template into a folder, where `load` and transformers find it."""
        (folder / TEMPLATE_FILE).write_text(self.source, encoding="utf-8", newline="")
        config = folder / CONFIG_FILE
        keys = {**json_object(config if config.exists() else None), **self.special_tokens}
        config.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a chat.

        Args:
            add_generation_prompt: whether to end with the start of an answer.

        Raises:
            UserError: the template refuses the chat.
        """
        return _without_marks(self._render(messages, add_generation_prompt))[0]

    def render_answers(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a chat, and the place of each answer.

        Raises:
            UserError: the template refuses the chat, or changes what the assistant says.
        """
        text, marked = _without_marks(self._render(messages))
        if marked:
            return Rendered(text, marked, are_marked=True)
        numbers = [n for n, message in enumerate(messages) if message.role == ASSISTANT]
        answers = [self._find_content(text, messages, number) for number in numbers]
        return Rendered(text, answers, are_marked=False)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                **self.special_tokens,
                messages=[message._asdict() for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template can raise anything
            raise UserError(f"the chat template refuses this chat: {reason(error)}") from None

    def _find_content(self, text: str, messages: Sequence[Message], number: int) -> Span:
        """Return the place of a message's content in the text of the chat."""
        replaced = [*messages]
        replaced[number] = messages[number]._replace(content=_PLACEHOLDER)
        before, found, after = self._render(replaced).partition(_PLACEHOLDER)
        end = len(text) - len(after)
        is_around = text.startswith(before) and text.endswith(after) and len(before) <= end
        if not found or not is_around:
            raise UserError(
                "the chat template changes with what the assistant says, so its place in the text"
                " is unknown; mark it in the template, with {% generation %} … {% endgeneration %},"
                " and give that with --chat-template FILE"
            )
        return len(before), end


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Return a text without its marks, and the places of what was between two of them."""
    parts, spans, length = marked.split(_MARK), list[Span](), 0
    for number, part in enumerate(parts):
        if number % 2 and part:
            spans.append((length, length + len(part)))
        length += len(part)
    return "".join(parts), spans


def read_template_files(folder: Path) -> dict[str, bytes]:
    """Return the files that `ChatTemplate.save` wrote into a folder, by name."""
    paths = (folder / TEMPLATE_FILE, folder / CONFIG_FILE)
    return {path.name: path.read_bytes() for path in paths} if all(map(is_file, paths)) else {}


def _find_source(find: Callable[[str], Path | None], config: dict[str, Any]) -> str | None:
    """Return the template of a tokenizer; of several, the one called "default"."""
    if path := find(TEMPLATE_FILE):
        return read_text(path)
    source = config.get(_TEMPLATE_KEY) or json_object(find(_OLDER_TEMPLATE_FILE)).get(_TEMPLATE_KEY)
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get(_DEFAULT)
    return source if isinstance(source, str) else None
