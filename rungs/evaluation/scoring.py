"""Log-probabilities of continuations; the loss on a text, and accuracy on multiple-choice items."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rungs.common import strict_json
from rungs.common.errors import RunFailure, UserError
from rungs.common.signals import Interrupted
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.parallel.sharding import Layout, place_batch
from rungs.run.records import wilson_interval
from rungs.step.forward import make_score_step

_LENGTH_MULTIPLE = 32
"""Lengths are padded to a multiple of this, so that few shapes are compiled."""


class Continuation(NamedTuple):
    """Context tokens, and the tokens that continue them."""

    context: list[int]
    """At least one token."""
    tokens: list[int]


class Score(NamedTuple):
    """Likelihood of a continuation."""

    log_prob: float
    """Sum over its tokens, in nats."""
    is_greedy: bool
    """Whether each token is the most likely one."""


def split_tokens(context: str, continuation: str, tokenizer: Tokenizer) -> Continuation:
    """Tokenize a text and its continuation together. Spaces at the text's end are part of the
    continuation, as in the lm-evaluation-harness. An empty text becomes end of text."""
    if not context:
        start = tokenizer.begin or [tokenizer.end_of_text or 0]
        return Continuation(start, tokenizer.encode(continuation))
    whole = tokenizer.encode_prompt(context + continuation)
    before = tokenizer.encode_prompt(context.rstrip())
    return Continuation(before, whole[len(before) :])


class Scorer:
    """Scores continuations with a model on all devices of its layout, in mode `dp` or `fsdp`.
    `batch_size` counts texts and is rounded up to a multiple of the devices. `should_stop` is
    called before each batch."""

    def __init__(
        self,
        model: GPT,
        layout: Layout,
        dtype: jnp.dtype,
        batch_size: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model, self._mesh, self._should_stop = model, layout.mesh, should_stop
        self._step = make_score_step(dtype, layout)
        self.batch_size = _round_up(batch_size, layout.mesh.size)
        self.context_length = model.config.context_length

    def scores(self, continuations: Sequence[Continuation]) -> Iterator[tuple[int, Score]]:
        """Yield the index and score of each continuation, the longest texts first. Texts longer
        than the context are cut at the start. Raises Interrupted if `should_stop` returns True,
        RunFailure if log-probabilities are NaN."""
        sizes = [len(one.context) + len(one.tokens) for one in continuations]
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        size = min(self.batch_size, _round_up(max(len(order), 1), self._mesh.size))
        for first in range(0, len(order), size):
            if self._should_stop():
                raise Interrupted
            indices = order[first : first + size]
            found = self._score([continuations[index] for index in indices], size)
            yield from zip(indices, found, strict=False)

    def _score(self, continuations: Sequence[Continuation], size: int) -> list[Score]:
        """Return the scores of a batch of up to `size` texts, of which the longest comes first."""
        rows = []
        for one in continuations:
            tokens = (one.context + one.tokens)[-self.context_length - 1 :]
            rows.append((tokens[:-1], tokens[1:][-len(one.tokens) :]))  # only these targets count
        length = min(_round_up(len(rows[0][0]), _LENGTH_MULTIPLE), self.context_length)
        inputs_BS = np.zeros((size, length), np.int32)
        count = min(1 << (max(len(targets) for _, targets in rows) - 1).bit_length(), length)
        places_BT = np.zeros((size, count), np.int32)
        targets_BT = np.full((size, count), IGNORED, np.int32)
        for row, (inputs, targets) in enumerate(rows):
            inputs_BS[row, : len(inputs)] = inputs
            places_BT[row, : len(targets)] = np.arange(len(inputs) - len(targets), len(inputs))
            targets_BT[row, : len(targets)] = targets
        batch = place_batch(self._mesh, inputs_BS, places_BT, targets_BT)
        log_probs_B, is_greedy_B = jax.device_get(self._step(self._model, *batch))
        if np.isnan(log_probs_B[: len(rows)]).any():
            raise RunFailure("the model's log-probabilities are NaN; use another checkpoint")
        pairs = zip(log_probs_B.tolist(), is_greedy_B.tolist(), strict=True)
        return [Score(*pair) for pair in pairs][: len(rows)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class TextScore(NamedTuple):
    """How likely a text is."""

    loss: float
    """Mean over its tokens, in nats."""
    tokens: int
    bytes: int
    """Of the text in UTF-8."""

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / math.log(2) / self.bytes


def score_text(text: str, scorer: Scorer, tokenizer: Tokenizer, length: int) -> TextScore:
    """Return the loss of a text that isn't empty, in windows of `length` tokens that see nothing
    before them, as in validation; the last one may be shorter."""
    begin = tokenizer.begin or [tokenizer.end_of_text or 0]
    ids = tokenizer.encode(text)
    windows = [
        Continuation(ids[place - 1 : place] or begin, ids[place : place + length])
        for place in range(0, len(ids), length)
    ]
    log_prob = sum(score.log_prob for _, score in scorer.scores(windows))
    return TextScore(-log_prob / len(ids), len(ids), len(text.encode()))


class Item(strict_json.StrictModel):
    """A question with the possible answers: {"prompt": "…", "choices": ["…", "…"], "answer": 0}."""

    prompt: str
    choices: list[str]
    """Texts that follow the prompt unchanged, so with a leading space where one is needed."""
    answer: int
    """Index of the correct choice."""

    @strict_json.check
    def _answer_is_a_choice(self) -> Iterator[str]:
        last = len(self.choices) - 1
        if last < 1 or not all(self.choices):
            yield "choices: must be two or more strings that are not empty"
        elif len(set(self.choices)) <= last:
            yield "choices: two are the same, so neither can be told to be right"
        elif not 0 <= self.answer <= last:
            yield f"answer: {self.answer} is not the index of a choice, from 0 to {last}"


class Share(NamedTuple):
    """Share of correctly answered items, with a 95% confidence interval."""

    value: float
    low: float
    high: float


class Accuracy(NamedTuple):
    """Accuracy of choosing the answer with the highest log-probability."""

    items: int
    accuracy: Share
    normalized: Share
    """Accuracy with log-probabilities divided by the choice's number of characters, as `acc_norm`
    in the lm-evaluation-harness."""


def read_items(path: Path) -> list[Item]:
    """Return the items of a JSON-lines file. Raises UserError if it has none, or other lines."""
    lines = enumerate(strict_json.read_text(path).split("\n"), 1)
    items = [
        strict_json.parse(line, Path(f"{path}:{number}"), Item)
        for number, line in lines
        if line.strip()
    ]
    if not items:
        raise UserError(f"{path}: has no items")
    return items


def measure_accuracy(items: Sequence[Item], scorer: Scorer, tokenizer: Tokenizer) -> Accuracy:
    """Return a model's accuracy on items. Raises UserError if a choice adds no token, or two have
    the same ones."""
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
        seen = list[Continuation]()
        for choice in item.choices:
            one = split_tokens(item.prompt, choice, tokenizer)
            if not one.tokens:
                shown = strict_json.format_value(choice)
                raise UserError(
                    f"item {number + 1}: the choice {shown} adds no token to its prompt"
                )
            if one in seen:
                shown = strict_json.format_value(choice)
                raise UserError(f"item {number + 1}: another choice has the tokens of {shown}")
            seen.append(one)
            yield one


def _share(right: int, items: int) -> Share:
    return Share(right / items, *wilson_interval(right / items, items))
