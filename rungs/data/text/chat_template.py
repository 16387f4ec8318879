"""A chat template, the model's or a built-in one: Jinja that renders messages as the text that a
model was trained on, in the sandbox and with the names and filters that transformers provides:
https://huggingface.co/docs/transformers/chat_templating_writing"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rungs.common.errors import UserError, reason
from rungs.common.strict_json import read_text
from rungs.data.text.messages import ASSISTANT, TOOL_CALLS, Message, says_something
from rungs.data.text.tokenizer_files import CONFIG_FILE, finder, json_object, special_tokens

BUILT_IN = {path.stem: path for path in Path(__file__).with_name("chat_templates").glob("*.jinja")}
"""Templates for models of a family that were published without one, by name."""
_SPECIAL_TOKEN = re.compile(r"<\|?[a-z_]+\|?>")
TEMPLATE_FILE = "chat_template.jinja"
_OLDER_TEMPLATE_FILE = "chat_template.json"
_TEMPLATE_KEY, _DEFAULT, _FOR_TOOLS = "chat_template", "default", "tool_use"
_PLACEHOLDER, _MARK = "\uf8ffcontent\uf8ff", "\uf8ffmark\uf8ff"
"""Placeholders for a message's content and around answers, of a character for private use."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for a message's reasoning; templates get the first two, as in transformers."""
_SAID: tuple[tuple[str, ...], ...] = ((TOOL_CALLS,), ("function_call",), _REASONING)
"""Keys of the assistant's output other than the content, synonyms together."""

Span = tuple[int, int]
"""Indices of the first character and after the last."""


class Rendered(NamedTuple):
    """A chat rendered as text."""

    text: str
    answers: list[Span]
    """Places of the assistant's answers, in order."""
    are_marked: bool
    """Whether the template marks the answers; if not, an end-of-turn token may follow them."""


class ChatTemplate:
    """A chat template with Jinja `source`, and `tool_source` for chats with `tools` if that is
    separate. Raises UserError if it is not valid. `special_tokens` has the texts of tokens by their
    names in transformers, such as `bos_token`; `needs` the tokens that a tokenizer must have.

    A template may mark answers with {% generation %} … {% endgeneration %}. Without marks, answers
    are found by rendering the chat again with placeholders as content."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], tool_source: str | None = None
    ) -> None:
        self.source, self.special_tokens = source, special_tokens
        self.needs: Sequence[str] = ()
        self._tool_source = tool_source or source
        for template in (source, self._tool_source):
            _compiled(template)

    @classmethod
    def load(cls, place: Path | str, file: Path | None = None) -> Self:
        """Load a tokenizer's template; `place` is as for `load_tokenizer`, and `file`, which may be
        the name of a built-in one, replaces the template. Raises UserError if there is none, or it
        is not valid."""
        template = cls.find(place, file)
        if template is None:
            raise UserError(
                f"{place}: its tokenizer has no chat template (neither {TEMPLATE_FILE} nor"
                f" {_TEMPLATE_KEY} in {CONFIG_FILE}); give one with --chat-template FILE, or by"
                f" name: {', '.join(BUILT_IN)}"
            )
        return template

    @classmethod
    def find(cls, place: Path | str, file: Path | None = None) -> Self | None:
        """Like `load`, but return None if there is no template."""
        find = finder(place)
        config = json_object(find(CONFIG_FILE))
        if built_in := BUILT_IN.get(str(file)):
            source = read_text(built_in)
            template = cls(source, special_tokens(find))
            template.needs = _SPECIAL_TOKEN.findall(source)
            return template
        named = {_DEFAULT: read_text(file)} if file else _find_sources(find, config)
        if _DEFAULT not in named:
            return None
        return cls(named[_DEFAULT], special_tokens(find), named.get(_FOR_TOOLS))

    def save(self, folder: Path) -> None:
        """Write the template into a folder, where `load` and transformers find it."""
        (folder / TEMPLATE_FILE).write_text(self.source, encoding="utf-8", newline="")
        config = folder / CONFIG_FILE
        keys = {**json_object(config if config.exists() else None), **self.special_tokens}
        config.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = {},
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a chat, with `variables` such as `tools`; `add_generation_prompt` adds
        the start of an answer. Raises UserError if the template refuses the chat, or omits part of
        it."""
        turns = [_with_reasoning(message.variables) for message in messages]
        self._check_all_is_used(turns, variables)
        return _without_marks(self._render(turns, variables, add_generation_prompt))[0]

    def render_answers(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = {},
        *,
        learns_empty: bool = False,
    ) -> Rendered:
        """Return the text of a chat with the places of answers to train on. Raises UserError if the
        template refuses the chat, omits part of it, or alters an answer."""
        turns = [_with_reasoning(message.variables) for message in messages]
        text, marked = _without_marks(self._render(turns, variables))
        self._check_all_is_used(turns, variables)
        if any(first < end for first, end in marked):
            answers = _learned(messages, marked)
        else:
            answers = [
                self._find_answer(text, turns, variables, number)
                for number, message in enumerate(messages)
                if says_something(message, learns_empty)
            ]
        filled = [(first, end) for first, end in answers if first < end or learns_empty]
        return Rendered(text, filled, are_marked=bool(marked))

    def _render(
        self,
        turns: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        own = {"messages": turns, "add_generation_prompt": add_generation_prompt}
        defaults = {"tools": None, "documents": None, **self.special_tokens}
        values = {**defaults, **variables, **own}
        try:
            return _compiled(self._source_for(variables)).render(values)
        except Exception as error:  # a template can raise anything
            raise UserError(f"the chat template refuses this chat: {reason(error)}") from None

    def _source_for(self, variables: Mapping[str, Any]) -> str:
        return self.source if variables.get("tools") is None else self._tool_source

    def _check_all_is_used(
        self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> None:
        """Raise UserError if the template ignores part of a chat."""

        def check(name: str, others: Sequence[dict[str, Any]], left: Mapping[str, Any]) -> None:
            if self._render(others, left) == self._render(turns, variables):
                raise UserError(
                    f"the chat template leaves out {name}; give one that has a place for it with"
                    f" --chat-template FILE, or remove {name}"
                )

        source = self._source_for(variables)
        for name in variables:
            if name not in source and variables[name]:
                check(name, turns, {key: variables[key] for key in variables if key != name})
        for names in _SAID:
            found = next((name for name in names if any(turn.get(name) for turn in turns)), None)
            if found and not any(name in source for name in names):
                check(found, [_without(turn, names) for turn in turns], variables)

    def _find_answer(
        self, text: str, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any], number: int
    ) -> Span:
        """Return the place of a message's answer in the text of the chat."""
        replaced = [*turns]
        said = [name for names in _SAID for name in names]
        replaced[number] = _without(turns[number], said) | {"content": _PLACEHOLDER}
        try:
            before, found, after = self._render(replaced, variables).partition(_PLACEHOLDER)
        except UserError:  # such as for the answer of a tool that wasn't called
            before = found = after = ""
        end = len(text) - len(after)
        is_around = text.startswith(before) and text.endswith(after) and len(before) <= end
        if not found or not is_around:
            raise UserError(
                "the chat template changes with what the assistant says, so its place in the text"
                " is unknown; mark it in the template, with {% generation %} … {% endgeneration %},"
                " and give that with --chat-template FILE"
            )
        return len(before), end


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the keys that transformers gives templates."""
    found = next((turn[name] for name in _REASONING if turn.get(name) is not None), None)
    if found is None:
        return turn
    return {"thinking": found, **turn, "reasoning_content": found}


def _without(turn: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key not in names}


def _learned(messages: Sequence[Message], marked: list[Span]) -> list[Span]:
    """Return the marked spans to train on."""
    learned = [message.is_learned for message in messages if message.role == ASSISTANT]
    if all(learned):
        return marked
    if len(learned) != len(marked):
        raise UserError(
            f"the chat template marks {len(marked)} parts in {len(learned)} messages from the"
            " assistant, so it is unknown which of them not to learn; mark each message once"
        )
    return [span for span, is_learned in zip(marked, learned, strict=True) if is_learned]


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Return a text without its marks, and the spans between each two of them."""
    parts, spans, length = marked.split(_MARK), list[Span](), 0
    for number, part in enumerate(parts):
        if number % 2:
            spans.append((length, length + len(part)))
        length += len(part)
    return "".join(parts), spans


def read_template_files(folder: Path) -> dict[str, bytes]:
    """Return the files that `ChatTemplate.save` wrote into a folder, by name."""
    files = [folder / TEMPLATE_FILE, folder / CONFIG_FILE]
    is_there = all(file.is_file() for file in files)
    return {file.name: file.read_bytes() for file in files} if is_there else {}


def _find_sources(find: Callable[[str], Path | None], config: dict[str, Any]) -> dict[str, str]:
    """Return the templates of a tokenizer by name; most have only the one called "default"."""
    if path := find(TEMPLATE_FILE):
        return {_DEFAULT: read_text(path)}
    found = config.get(_TEMPLATE_KEY) or json_object(find(_OLDER_TEMPLATE_FILE)).get(_TEMPLATE_KEY)
    named = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
    pairs = [(one.get("name"), one.get("template")) for one in named if isinstance(one, dict)]
    return {
        name: source
        for name, source in pairs
        if isinstance(name, str) and isinstance(source, str) and source
    }


@functools.lru_cache
def _compiled(source: str) -> Any:
    """Return a Jinja template in a sandbox, which puts `_MARK` around the text of
    {% generation %} … {% endgeneration %}. Raises UserError if it is not valid."""
    import jinja2.ext  # here, as few commands need Jinja
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationMarks(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 — as Jinja declares it

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{_MARK}{caller()}{_MARK}"

    def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)  # Jinja's own escapes HTML

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise UserError(f"the chat template is not valid: {reason(error)}") from None
