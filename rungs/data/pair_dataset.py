"""Datasets made of prompts with their answers: JSON lines, read and tokenized a few at a time.

A pair's tokens are those of its prompt as the tokenizer begins a text, those of its answer, and
the end of text. Prompt and answer are tokenized apart and nothing is put between them, so what
stands between them, a line end or the marks of a chat, is the user's own text.
"""

import difflib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.common.strict_json import format_value
from rungs.data import dataset, text_dataset, token_file
from rungs.data.text_dataset import Sections, TextSection
from rungs.data.tokenizer import TOKENIZER_FILE, Tokenizer

_KEYS = ("prompt", "answer")
_PAIRS_AT_ONCE = 512
_BLOCK_BYTES = 1 << 20


class Pair(NamedTuple):
    """A prompt with its answer, and where it stands."""

    path: Path
    place: int
    """Of its line's first byte in the file."""
    prompt: str
    answer: str


def split_sections(sections: list[TextSection], percent: float) -> Sections:
    """Part files of pairs into training and validation as text is parted, one file between two
    pairs, each part with one at least.

    Raises:
        UserError: for a file without a pair, or a single one that has only one.
    """
    for section in sections:
        if next(_lines(section), None) is None:
            raise UserError(f"{section.path}: holds no pair; each line is to hold one")
    return text_dataset.split_sections(sections, percent, _part)


def _part(section: TextSection, percent: float) -> tuple[TextSection, TextSection]:
    """The section and its last `percent`, the last pair at least."""
    target = section.end - round(section.size * percent / 100)
    places = (place for place, _ in _lines(section))
    cut = first = next(places)
    for cut in places:
        if cut >= target:
            break
    if cut == first:
        raise UserError(
            f"{section.path}: line {_line_number(section.path, cut)}: the only pair, so none is"
            " left for validation; give more, or a --validation-percent of 0"
        )
    return section._replace(end=cut), section._replace(start=cut)


def write(folder: Path, sections: Sections, tokenizer: Tokenizer) -> None:
    """Write the token files and the tokenizer of a dataset of pairs into its folder.

    Raises:
        UserError: for a line that is not a pair, or a tokenizer without an end of text.
    """
    end_of_text = tokenizer.end_of_text
    if end_of_text is None:
        raise UserError("the tokenizer has no end-of-text token, which is to end every answer")
    size = sum(section.size for split in sections.values() for section in split)
    with text_dataset.progress_bar("tokenizing", size) as bar:
        for split, parts in sections.items():
            path = folder / dataset.split_file(split)
            with token_file.PairWriter(path, text_dataset.token_type(tokenizer)) as writer:
                for section in parts:
                    pairs = pairs_of(section, bar.update)
                    for prompt_ids, answer_ids in _tokenized(pairs, tokenizer):
                        writer.append_pair(prompt_ids, [*answer_ids, end_of_text])
    tokenizer.save(folder / TOKENIZER_FILE)


def _tokenized(
    pairs: Iterator[Pair], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of each prompt and answer."""
    while batch := list(itertools.islice(pairs, _PAIRS_AT_ONCE)):
        answers = tokenizer.encode_batch([pair.answer for pair in batch])
        for pair, answer_ids in zip(batch, answers, strict=True):
            if not answer_ids:
                raise _wrong(
                    pair.path, pair.place, f"answer: {format_value(pair.answer)} has no tokens"
                )
            yield _encode_prompt(pair.prompt, tokenizer), answer_ids


def _encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """As the tokenizer begins a text, but not as some end one: the answer is to follow."""
    ids = tokenizer.encode_prompt(prompt)
    if ids[-1:] == [tokenizer.end_of_text]:
        own = tokenizer.encode(prompt)  # whose end may be the name of that token
        if ids[-len(own) - 1 : -1] == own:
            return ids[:-1]
    return ids


def pairs_of(section: TextSection, progress: Callable[[int], object]) -> Iterator[Pair]:
    """The pairs of a section, one a line; blank lines are left out. `progress` is told of each
    line's bytes.

    Raises:
        UserError: for a line that is not a pair, naming file and line.
    """
    for place, line in _lines(section):
        try:
            prompt, answer = _parse(line)
        except ValueError as error:
            raise _wrong(section.path, place, str(error)) from None
        yield Pair(section.path, place, prompt, answer)
        progress(len(line))


def _lines(section: TextSection) -> Iterator[tuple[int, bytes]]:
    """The lines of a section that are not blank, each with the place of its first byte."""
    place = section.start
    with section.path.open("rb") as file:
        file.seek(place)
        while place < section.end and (line := file.readline()):
            if line.strip():
                yield place, line
            place += len(line)


def _parse(line: bytes) -> tuple[str, str]:
    """Prompt and answer of a line; raises ValueError with what is wrong."""
    try:
        value = json.loads(line.rstrip().decode(), object_pairs_hook=_with_each_key_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, near byte {error.start + 1}; convert it first") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON at column {error.colno}: {error.msg}") from None
    except RecursionError as error:
        raise ValueError(f"unreadable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f'must be {{"prompt": …, "answer": …}}, not {format_value(value)}')
    for key in value:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            advice = f"did you mean {close[0]}?" if close else f"the keys are {' and '.join(_KEYS)}"
            raise ValueError(
                f"{key if key.isprintable() else format_value(key)}: unknown key; {advice}"
            )
    return _text(value, "prompt"), _text(value, "answer")


def _with_each_key_once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(items)
    if len(value) < len(items):
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{format_value(twice)}: given more than once; keep one")
    return value


def _text(value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise ValueError(f"{key}: missing; a pair needs prompt and answer")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"{key}: {format_value(text)} is not allowed; must be a string")
    if key == "answer" and not text:
        raise ValueError("answer: empty; there is nothing to learn from it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key}: holds half a character (a lone surrogate)") from None
    return text


def _wrong(path: Path, place: int, problem: str) -> UserError:
    return UserError(f"{path}: line {_line_number(path, place)}: {problem}")


def _line_number(path: Path, place: int) -> int:
    """Number of the line that starts at a place, counted from 1."""
    number = 1
    with path.open("rb") as file:
        while place and (block := file.read(min(place, _BLOCK_BYTES))):
            number += block.count(b"\n")
            place -= len(block)
    return number
