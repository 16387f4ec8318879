"""Accuracy on multiple-choice items.

Each line of a file is {"prompt": "…", "choices": ["…", "…"], "answer": 0}. A choice follows the
prompt as it is, so it starts with a space if there must be one.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.common.strict_json import format_value, read_text
from rungs.data.tokenizer import Tokenizer
from rungs.evaluation.scoring import Continuation, Scorer, split_tokens
from rungs.run.evaluations import wilson_interval


class Item(NamedTuple):
    """A question with the possible answers."""

    prompt: str
    choices: list[str]
    answer: int
    """Index of the right choice."""


class Share(NamedTuple):
    """How many items are answered rightly."""

    mean: float
    low: float
    """Of a 95 % interval."""
    high: float


class Accuracy(NamedTuple):
    """Of the choice with the highest log-probability."""

    items: int
    accuracy: Share
    normalized: Share
    """With each log-probability divided by the number of the choice's characters, as `acc_norm` in
    the lm-evaluation-harness."""


def read_items(path: Path) -> list[Item]:
    """Return the items of a file.

    Raises:
        UserError: it has no items, or a line is not one; it names the line.
    """
    lines = enumerate(read_text(path).splitlines(), 1)
    items = [_parse(line, f"{path}: line {number}") for number, line in lines if line.strip()]
    if not items:
        raise UserError(f"{path}: has no items")
    return items


def _parse(line: str, place: str) -> Item:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {error}") from None
    if not isinstance(value, dict) or value.keys() != {"prompt", "choices", "answer"}:
        shape = '{"prompt": "…", "choices": ["…", "…"], "answer": 0}'
        raise UserError(f"{place}: must be {shape}")
    prompt, choices, answer = value["prompt"], value["choices"], value["answer"]
    if not isinstance(prompt, str):
        raise UserError(f"{place}: prompt: {format_value(prompt)} is not a string")
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
        raise UserError(f"{place}: choices: must be two or more strings that are not empty")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UserError(
            f"{place}: answer: {format_value(answer)} is not the index of a choice, from 0 to"
            f" {len(choices) - 1}"
        )
    return Item(prompt, choices, answer)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def measure(items: Sequence[Item], scorer: Scorer, tokenizer: Tokenizer) -> Accuracy:
    """Return the accuracy of a model on items.

    Raises:
        UserError: a choice adds no token to its prompt.
    """
    continuations = list(_continuations(items, tokenizer))
    log_probs = [0.0] * len(continuations)
    for index, score in scorer.scores(continuations):
        log_probs[index] = score.log_prob
    right, right_normalized, first = 0, 0, 0
    for item in items:
        own = log_probs[first : first + len(item.choices)]
        by_character = [one / len(text) for one, text in zip(own, item.choices, strict=True)]
        right += own.index(max(own)) == item.answer
        right_normalized += by_character.index(max(by_character)) == item.answer
        first += len(item.choices)
    return Accuracy(len(items), _share(right, len(items)), _share(right_normalized, len(items)))


def _continuations(items: Sequence[Item], tokenizer: Tokenizer) -> Iterator[Continuation]:
    for number, item in enumerate(items):
        for choice in item.choices:
            one = split_tokens(item.prompt, choice, tokenizer)
            if not one.tokens:
                raise UserError(
                    f"item {number + 1}: the choice {format_value(choice)} adds no token to its"
                    " prompt"
                )
            yield one


def _share(right: int, items: int) -> Share:
    return Share(right / items, *wilson_interval(right / items, items))
