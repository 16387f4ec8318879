"""The dataset builder for preferences: pairs of a chosen and a rejected answer, as TRL reads them:

{"prompt": "…", "chosen": "…", "rejected": "…"}
{"prompt": [messages], "chosen": [messages], "rejected": [messages]}

or, unpaired, `desirable` as true or false, or `label` as TRL calls it:

{"prompt": "…", "completion": "…", "desirable": true}
{"prompt": [messages], "completion": [messages], "desirable": true}

Without a `prompt` it is what both answers begin with. One of the two may be empty: it ends at
once. Texts are tokenized as `pair_dataset` does; chats with the chat template, where only the
assistant's messages after the prompt count."""

import dataclasses
import functools
import json
import logging
from collections import Counter
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rungs.common.errors import errors_at
from rungs.common.strict_json import format_value
from rungs.data.build.chat_dataset import ChatFormat, Turn, save_template, token_count
from rungs.data.build.document_files import DataFile, FetchedFile, fetch_ahead, fetcher, rows
from rungs.data.build.pair_dataset import Pair, encode_pairs
from rungs.data.build.sections import (
    LineSection,
    Progress,
    parse_json,
    split_lines,
    write_splits,
)
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import chat_of
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens.dataset import Source
from rungs.data.tokens.token_file import ChatWriter, PreferenceWriter, UnpairedWriter

logger = logging.getLogger("rungs.dataset")

_ANSWERS = ("chosen", "rejected")
_UNPAIRED = ("prompt", "completion")
_RATINGS = ("desirable", "label")
_OF_CHATS = ("tools", "documents", "chat_template_kwargs", "system")
_KEYS = (*_ANSWERS, *_UNPAIRED, *_RATINGS, *_OF_CHATS)


class Preference(NamedTuple):
    """A prompt with two answers, or one that is desirable or not: texts, or lists of messages."""

    prompt: Any
    answers: dict[str, Any]
    """By key."""
    variables: dict[str, Any]
    """Keys of a chat besides its messages."""
    desirable: bool | None = None
    """Of an unpaired answer."""

    @property
    def is_text(self) -> bool:
        return isinstance(self.prompt, str)


def parse_preference(line: bytes) -> Preference:
    """Return the preference of a line. Raises ValueError if it is none."""
    row = _row(line, _ANSWERS)
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    kind = str if isinstance(chosen, str) else list
    if kind is list and isinstance(prompt, str) and _content(chosen) == prompt:
        prompt = None  # the first message of both, as in UltraFeedback
    _check_kind(row, kind, *_ANSWERS, *([] if prompt is None else ["prompt"]))
    if prompt is None:
        prompt, chosen, rejected = _without_prefix(chosen, rejected)
    if not chosen and not rejected:
        raise ValueError("chosen and rejected: are empty, or nothing but the prompt")
    return Preference(prompt, {"chosen": chosen, "rejected": rejected}, _variables(row))


def parse_unpaired(line: bytes) -> Preference:
    """Return the unpaired preference of a line. Raises ValueError if it is none."""
    row = _row(line, _UNPAIRED)
    completion = row["completion"]
    _check_kind(row, str if isinstance(completion, str) else list, *reversed(_UNPAIRED))
    desirable = next((row[key] for key in _RATINGS if key in row), None)
    if not isinstance(desirable, bool):
        raise ValueError("desirable: must be true or false")
    return Preference(row["prompt"], {"completion": completion}, _variables(row), desirable)


def _row(line: bytes, needed: tuple[str, ...]) -> dict[str, Any]:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"must be an object with {' and '.join(needed)}, not {format_value(row)}")
    if missing := [key for key in needed if row.get(key) is None]:
        raise ValueError(f"{missing[0]}: missing; a preference needs {' and '.join(needed)}")
    return row


def _check_kind(row: dict[str, Any], kind: type, *keys: str) -> None:
    for key in keys:
        if not isinstance(row[key], kind):
            raise ValueError(f"{key}: must be a {'text' if kind is str else 'list of messages'}")


def _variables(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in _OF_CHATS if row.get(key)}


def _content(messages: Any) -> Any:
    first = messages[0] if isinstance(messages, list) and messages else None
    return first.get("content") if isinstance(first, dict) else None


def _without_prefix(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return what both answers begin with, and the rest of each. Of texts, a space before the rest
    belongs to the rest, as in TRL's `extract_prompt`."""
    shortest = min(len(chosen), len(rejected))
    differs = (n for n in range(shortest) if chosen[n] != rejected[n])
    length = next(differs, max(shortest - 1, 0))
    if isinstance(chosen, str) and chosen[:length].endswith(" "):
        length -= 1
    return chosen[:length], chosen[length:], rejected[length:]


@dataclasses.dataclass(frozen=True)
class PreferenceFormat:
    """How preferences become tokens."""

    tokenizer: Tokenizer
    place: str
    """Argument of `load_tokenizer`, where the chat template is."""
    template_file: Path | None
    max_tokens: int | None
    """Preferences with a longer answer are left out; None for no limit."""
    is_unpaired: bool = False

    def encode(self, found: Preference) -> list[list[Turn]]:
        """Return the turns of each answer's document. Raises ValueError."""
        if found.is_text:
            pairs = [Pair("", found.prompt, answer) for answer in found.answers.values()]
            return [[turn] for turn in encode_pairs(pairs, self.tokenizer)]
        return [self._encode_chat(found, key) for key in found.answers]

    def _encode_chat(self, found: Preference, key: str) -> list[Turn]:
        """Return the turns of the chat with one answer. Raises ValueError, which names its key."""
        try:
            turns = self._turns(found, found.answers[key])
        except ValueError as error:
            raise ValueError(f"{key}: {str(error).removeprefix('messages: ')}") from None
        if not turns:
            raise ValueError(f"{key}: has nothing to learn, in the format of the chat template")
        return turns

    def _turns(self, found: Preference, answer: list[Any]) -> list[Turn]:
        messages = [*found.prompt, *answer]
        if not messages:
            raise ValueError("has no message, and there is no prompt")
        is_sharegpt = isinstance(messages[0], dict) and "from" in messages[0]
        kind = "conversations" if is_sharegpt else "messages"
        chat = chat_of({**found.variables, kind: messages}, learns_empty=True)
        asked = len(chat.messages) - len(answer)
        told = [message._replace(is_learned=False) for message in chat.messages[:asked]]
        return self.chats.encode([*told, *chat.messages[asked:]], chat.variables, learns_empty=True)

    @functools.cached_property
    def chats(self) -> ChatFormat:
        """The format of chats. Raises UserError if there is no chat template."""
        return ChatFormat(ChatTemplate.load(self.place, self.template_file), self.tokenizer)


def build(
    folder: Path,
    chosen: list[DataFile],
    form: PreferenceFormat,
    validation_percent: float,
    repository: str | None = None,
    revision: str | None = None,
) -> Source:
    """Write the token files, tokenizer and chat template of a dataset of preferences into its
    folder, from files of the user or of a repository. Raises UserError if a file has no
    preferences, or a line isn't one."""
    counts: Counter[str] = Counter()
    parse = parse_unpaired if form.is_unpaired else parse_preference

    def write_section(writer: ChatWriter, section: LineSection, progress: Progress) -> None:
        for place, line in section.lines(progress):
            with errors_at(f"{place}: ", ValueError):
                found = parse(line)
                documents = form.encode(found)
            if len(documents) == 2 and documents[0] == documents[1]:
                counts["equal"] += 1
            elif form.max_tokens is not None and max(map(token_count, documents)) > form.max_tokens:
                counts["left out"] += 1
            else:
                counts["chats"] += not found.is_text
                for turns in documents:
                    writer.append_chat(turns)
                if isinstance(writer, UnpairedWriter):
                    writer.rate(bool(found.desirable))

    lacking = "the {} split has no preferences" + " that are short enough" * bool(form.max_tokens)
    with (
        TemporaryDirectory() as place,
        closing(fetch_ahead(chosen, fetcher(repository, revision, Path(place)))) as fetched,
    ):
        sections: dict[Any, list[LineSection]] = {}  # by split, None to divide them
        for number, file in enumerate(fetched):
            lines = _lines_of(file, Path(place, f"rows-{number}"))
            sections.setdefault(file.file.split, []).append(lines)
        splits = split_lines(sections[None], validation_percent) if None in sections else sections
        open_writer = UnpairedWriter if form.is_unpaired else PreferenceWriter
        write_splits(folder, splits, form.tokenizer, open_writer, write_section, lacking)
    if equal := counts["equal"]:
        logger.warning("left out %s preferences, as both answers are the same", f"{equal:,}")
    template = form.chats.template if counts["chats"] else None
    has_selection = template is not None or form.max_tokens is not None
    chats = save_template(folder, template, form.max_tokens, counts["left out"])
    return Source(
        kind="unpaired" if form.is_unpaired else "preferences",
        files=[Path(file.name).name for file in chosen],
        chats=chats if has_selection else None,
    )


def _lines_of(fetched: FetchedFile, folder: Path) -> LineSection:
    """Return the lines of a file. If it is not plain JSON lines, its rows are written as those into
    a new folder. Raises UserError if a preference holds something else than text, such as bytes."""
    path, name = fetched.path, fetched.file.name
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        path = folder / f"{path.stem}.jsonl"
        folder.mkdir()
        place = f"{name}: a preference must hold texts: "
        with path.open("w") as lines, errors_at(place, TypeError):
            for row in rows(fetched.path, name):
                lines.write(json.dumps({key: row[key] for key in _KEYS if key in row}) + "\n")
    return LineSection.of_file(path)._replace(name=name)
