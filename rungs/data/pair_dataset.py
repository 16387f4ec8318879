"""The dataset builder for pairs: JSON lines of prompts and answers. A pair's tokens are its prompt
(after the tokenizer's begin-of-text token, if any), its answer, and end of text. Prompt and answer
are tokenized separately with nothing in between, not even the space that SentencePiece adds: a
separator must be part of one of them."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError, check_characters, did_you_mean
from rungs.common.strict_json import format_value
from rungs.data import bpe, dataset, text_dataset
from rungs.data.text_dataset import (
    Progress,
    Sections,
    TextSection,
    json_lines,
    line_error,
    read_lines,
)
from rungs.data.token_file import PairWriter
from rungs.data.tokenizer import Tokenizer

_KEYS = ("prompt", "answer")
_PAIRS_PER_BATCH = 512
NO_END = (
    "the tokenizer has no end-of-text token, which must end every answer; name it beside"
    ' tokenizer.json, in tokenizer_config.json: {"eos_token": "…"}'
)


class Pair(NamedTuple):
    """A prompt with its answer, and its place in the file."""

    path: Path
    offset: int
    """Offset of its line's first byte in the file."""
    prompt: str
    answer: str


def build(
    folder: Path, texts: list[TextSection], tokenizer: Tokenizer | int, validation_percent: float
) -> dataset.Source:
    """Write the token files and tokenizer of a dataset of pairs into its folder; arguments as for
    `text_dataset.build`. Raises UserError if a file has no pairs, a line is not a pair, or the
    tokenizer has no end of text."""
    sections = split_sections(texts, validation_percent)
    if isinstance(tokenizer, int):
        pairs = (pair for section in sections["train"] for pair in read_pairs(section))
        tokenizer = bpe.train_bpe((text for pair in pairs for text in pair[-2:]), tokenizer)
    end = tokenizer.end_of_answer
    if end is None:
        raise UserError(NO_END)

    def write_section(writer: PairWriter, section: TextSection, progress: Progress) -> None:
        write_pairs(writer, read_pairs(section, progress), tokenizer)

    open_writer = partial(PairWriter, texts=text_dataset.log_texts(tokenizer, end))
    text_dataset.write_splits(folder, sections, tokenizer, open_writer, write_section)
    return dataset.Source(kind="pairs", files=[text.path.name for text in texts])


def split_sections(sections: list[TextSection], percent: float) -> Sections:
    """Split files of pairs as `text_dataset.split_sections` does, but cut a single file between two
    pairs. Raises UserError if a file has no pairs, or a single file only one."""
    for section in sections:
        if next(json_lines(section), None) is None:
            raise UserError(f"{section.path}: has no lines; each line must be a pair or a chat")
    return text_dataset.split_sections(sections, percent, _split)


def _split(section: TextSection, percent: float) -> tuple[TextSection, TextSection]:
    """Return the section without its last `percent`, and that part; both have at least one pair."""
    target = section.end - round(section.size * percent / 100)
    offsets = (offset for offset, _ in json_lines(section))
    cut = first = next(offsets)
    for cut in offsets:
        if cut >= target:
            break
    if cut == first:
        problem = (
            "this is the only line, so none is left for validation; give more, or a"
            " --validation-percent of 0"
        )
        raise line_error(section.path, cut, problem)
    return section._replace(end=cut), section._replace(start=cut)


def write_pairs(writer: PairWriter, pairs: Iterator[Pair], tokenizer: Tokenizer) -> None:
    """Write pairs, each with an end of text, to a file. Raises UserError for an empty answer."""
    while batch := list(itertools.islice(pairs, _PAIRS_PER_BATCH)):
        for turn in encode_pairs(batch, tokenizer):
            writer.append_chat([turn])


def encode_pairs(pairs: list[Pair], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of each prompt and of each answer with an end of text. Raises UserError
    for an empty answer, or if the tokenizer has no end of text."""
    if tokenizer.end_of_answer is None:
        raise UserError(NO_END)
    prompts = tokenizer.encode_batch([pair.prompt for pair in pairs])
    answers = tokenizer.continuing.encode_batch([pair.answer for pair in pairs])
    for pair, prompt_ids, continuing_ids in zip(pairs, prompts, answers, strict=True):
        answer_ids = continuing_ids if pair.prompt else tokenizer.encode(pair.answer)
        if not answer_ids:
            problem = f"answer: {format_value(pair.answer)} has no tokens"
            raise line_error(pair.path, pair.offset, problem)
        yield [*tokenizer.begin, *prompt_ids], [*answer_ids, tokenizer.end_of_answer]


def read_pairs(section: TextSection, progress: Progress = lambda _: None) -> Iterator[Pair]:
    """Yield the pairs of a section, one per line that is not blank. Raises UserError, which names
    the file and the line, if a line is not a pair."""
    return read_lines(section, lambda at, line: Pair(section.path, at, *_parse(line)), progress)


def _parse(line: bytes) -> tuple[str, str]:
    """Return the prompt and the answer of a line. Raises ValueError if it is not a pair."""
    value = text_dataset.parse_json(line, _object_with_unique_keys)
    if not isinstance(value, dict):
        raise ValueError(f'must be {{"prompt": …, "answer": …}}, not {format_value(value)}')
    for key in value:
        if key not in _KEYS:
            advice = did_you_mean(key, _KEYS, f"the keys are {' and '.join(_KEYS)}")
            shown = key if key.isprintable() else format_value(key)
            raise ValueError(f"{shown}: unknown key; {advice}")
    return _text(value, "prompt"), _text(value, "answer")


def _object_with_unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
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
        raise ValueError("answer: must not be empty")
    check_characters(text, key)
    return text
