"""The dataset builder for pairs: JSON lines of prompts and answers. A pair's tokens are its prompt
(after the tokenizer's begin-of-text token, if any), its answer, and end of text. Prompt and answer
are tokenized separately with nothing in between, not even the space that SentencePiece adds: a
separator must be part of one of them."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from rungs.common import strict_json
from rungs.common.errors import UserError, errors_at
from rungs.data.build.sections import (
    LineSection,
    Progress,
    log_texts,
    split_lines,
    text_of,
    write_splits,
)
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.tokens import dataset
from rungs.data.tokens.token_file import PairWriter

_PAIRS_PER_BATCH = 512
NO_END = (
    "the tokenizer has no end-of-text token, which must end every answer; name it beside"
    ' tokenizer.json, in tokenizer_config.json: {"eos_token": "…"}'
)


class PairLine(strict_json.StrictModel):
    """A line of a file of pairs."""

    prompt: str
    answer: Annotated[str, Field(min_length=1)]


class Pair(NamedTuple):
    """A prompt with its answer."""

    place: str
    """Begins messages about it: file and line."""
    prompt: str
    answer: str


def build(
    folder: Path, files: list[Path], tokenizer: Tokenizer | int, validation_percent: float
) -> dataset.Source:
    """Write the token files and tokenizer of a dataset of pairs into its folder; arguments as for
    `text_dataset.build`. Raises UserError if a file has no pairs, a line is not a pair, or the
    tokenizer has no end of text."""
    sections = split_lines(list(map(LineSection.of_file, files)), validation_percent)
    if isinstance(tokenizer, int):
        pairs = (pair for section in sections["train"] for pair in read_pairs(section))
        tokenizer = train_bpe((text for pair in pairs for text in pair[-2:]), tokenizer)
    end = tokenizer.end_of_answer
    if end is None:
        raise UserError(NO_END)

    def write_section(writer: PairWriter, section: LineSection, progress: Progress) -> None:
        write_pairs(writer, read_pairs(section, progress), tokenizer)

    open_writer = partial(PairWriter, texts=log_texts(tokenizer, end))
    write_splits(folder, sections, tokenizer, open_writer, write_section)
    return dataset.Source(kind="pairs", files=[path.name for path in files])


def write_pairs(writer: PairWriter, pairs: Iterator[Pair], tokenizer: Tokenizer) -> None:
    """Write pairs, each with an end of text, to a file. Raises UserError for an empty answer."""
    while batch := list(itertools.islice(pairs, _PAIRS_PER_BATCH)):
        for pair, turn in zip(batch, encode_pairs(batch, tokenizer), strict=True):
            if len(turn[1]) < 2:
                shown = strict_json.format_value(pair.answer)
                raise UserError(f"{pair.place}answer: {shown} has no tokens")
            writer.append_chat([turn])


def encode_pairs(pairs: list[Pair], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of each prompt and of each answer with an end of text. Raises UserError
    if the tokenizer has no end of text."""
    if tokenizer.end_of_answer is None:
        raise UserError(NO_END)
    prompts = tokenizer.encode_batch([pair.prompt for pair in pairs])
    answers = tokenizer.continuing.encode_batch([pair.answer for pair in pairs])
    for pair, prompt_ids, continuing_ids in zip(pairs, prompts, answers, strict=True):
        answer_ids = continuing_ids if pair.prompt else tokenizer.encode(pair.answer)
        yield [*tokenizer.begin, *prompt_ids], [*answer_ids, tokenizer.end_of_answer]


def read_pairs(section: LineSection, progress: Progress = lambda _: None) -> Iterator[Pair]:
    """Yield the pairs of a section. Raises UserError, which names the file and the line, if a line
    is not a pair."""
    for place, line in section.lines(progress):
        with errors_at(f"{place}: ", ValueError):
            text = text_of(line)
        found = strict_json.parse(text, place, PairLine)
        yield Pair(f"{place}: ", found.prompt, found.answer)
