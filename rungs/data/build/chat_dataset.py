"""The dataset builder for chats, tokenized with a chat template. The loss counts what the template
marks, else the content of the assistant's messages and the special token after each turn."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.common.errors import UserError, errors_at
from rungs.common.run_log import log
from rungs.data.build.sections import (
    LineSection,
    Progress,
    parse_json,
    split_lines,
    write_splits,
)
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import ASSISTANT, Message, chat_of
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens.dataset import Chats, Source
from rungs.data.tokens.token_file import ChatWriter

Turn = tuple[list[int], list[int]]
"""Token ids before an answer, and token ids of the answer."""


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How chats become tokens. Raises UserError if the tokenizer lacks a token of the template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    max_tokens: int | None = None
    """Longer chats are left out; None for no limit."""

    def __post_init__(self) -> None:
        for name in self.template.needs:
            if len(self.tokenizer.encode(name)) != 1:
                raise UserError(f"--chat-template: the model's tokenizer has no token {name}")

    def encode(
        self,
        messages: list[Message],
        variables: Mapping[str, Any] = {},
        *,
        learns_empty: bool = False,
    ) -> list[Turn]:
        """Return the turns of a chat, each ending with an answer; text after the last answer is
        dropped. `variables` are the template's, such as `tools`; with `learns_empty`, an answer may
        be nothing but the end of its turn. Raises UserError if the template refuses the chat, or
        the tokenizer has no tokens for it."""
        rendered = self.template.render_answers(messages, variables, learns_empty=learns_empty)
        ids, spans = self.tokenizer.encode_spans(rendered.text, rendered.answers)
        turns, last = list[Turn](), 0
        for first, end in spans:
            if not rendered.are_marked:
                end = self._end_of_turn(ids, end)
            if first < end and last < end:
                turns.append((ids[last : max(first, last)], ids[max(first, last) : end]))
                last = end
        return turns

    @property
    def end_of_turn(self) -> int | None:
        """Id of the special token that ends an answer, None if there is none."""
        turns = self.encode([Message("user", "a"), Message(ASSISTANT, "b")])
        last = turns[-1][1][-1] if turns else None
        return last if last in self.tokenizer.special_ids else None

    def _end_of_turn(self, ids: list[int], end: int) -> int:
        """Return the index after the special token that follows `end`, spaces aside, if any."""
        place = end
        while place < len(ids) and not self.tokenizer.decode(ids[place : place + 1]).strip():
            place += 1
        is_special = place < len(ids) and ids[place] in self.tokenizer.special_ids
        return place + 1 if is_special else end


def build(folder: Path, files: list[Path], form: ChatFormat, validation_percent: float) -> Source:
    """Write the token files, tokenizer and chat template of a dataset of chats into its folder.
    Raises UserError if a file is missing or has no chats, or a line isn't one."""
    left_out, unused = 0, set[str]()

    def encode(line: bytes) -> list[Turn]:
        chat = chat_of(parse_json(line))
        unused.update(chat.unused)
        turns = form.encode(chat.messages, chat.variables)
        if token_count(turns) < 2:
            raise ValueError("has no answer, in the format of the chat template")
        return turns

    def write_section(writer: ChatWriter, section: LineSection, progress: Progress) -> None:
        nonlocal left_out
        for place, line in section.lines(progress):
            with errors_at(f"{place}: ", ValueError):
                turns = encode(line)
            if form.max_tokens is not None and token_count(turns) > form.max_tokens:
                left_out += 1
            else:
                writer.append_chat(turns)

    sections = split_lines(list(map(LineSection.of_file, files)), validation_percent)
    lacking = f"the {{}} split has no chat of at most {form.max_tokens} tokens"
    write_splits(folder, sections, form.tokenizer, ChatWriter, write_section, lacking)
    if unused:
        log.warning("keys of chats that are not used: %s", ", ".join(sorted(unused)))
    chats = save_template(folder, form.template, form.max_tokens, left_out)
    return Source(kind="chats", files=[path.name for path in files], chats=chats)


def token_count(turns: Sequence[Turn]) -> int:
    """Return the tokens of a chat."""
    return sum(len(before) + len(answer) for before, answer in turns)


def save_template(
    folder: Path, template: ChatTemplate | None, max_tokens: int | None, left_out: int
) -> Chats:
    """Write the chat template, if there is one, into a dataset's folder; describe its chats."""
    if template:
        template.save(folder)
    source = template.source if template else ""
    checksum = hashlib.sha256(source.encode()).hexdigest()
    return Chats(template_sha256=checksum, max_tokens=max_tokens, left_out=left_out)
