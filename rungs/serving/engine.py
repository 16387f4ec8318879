"""The thread that generates for all requests: texts join free rows of their model's `Slots` as they
come, and leave them as they end."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rungs.model.generation import Generator, row_key
from rungs.model.sampling import UNDEFINED, Sampling
from rungs.serving.slots import MOST_TOKENS, LogProbs, NewTokens, Slots
from rungs.serving.structured import Grammar

_SECONDS_PER_CALL = 0.05
"""How long a call may take before texts are delivered in smaller pieces."""
_NOT_NUMBERS = "the model's logits are NaN"


class NamedGenerator(NamedTuple):
    """A model to generate with, and what its weights are called."""

    name: str
    generator: Generator


class QueueFullError(Exception):
    """Too many texts wait for a row."""


class Delivery(NamedTuple):
    """New tokens of a text."""

    tokens: list[int]
    """Without the stop token."""
    log_probs: Sequence[LogProbs | None]
    """Of each token and the stop token, if requested. In the first delivery of a text whose prompt
    is scored those of the prompt come before, None for its first token."""
    finish: str | None = None
    """Why this is the last delivery: "stop", "length", or "failed"."""
    problem: str = ""
    """What failed."""
    stop_token: Sequence[int] = ()
    """The token that ends the text, if one does."""


@dataclasses.dataclass(eq=False)
class Text:
    """A text to generate.

    Attributes:
        prompt: token ids, at least one; with the new tokens at most one more than the context.
        number: the text's number within its request, for its random key.
        left: the most tokens that are still to add; 0 at first only scores the prompt.
        deliver: called from the engine's thread, until a delivery has a `finish`.
        grammar: what it may be; None for any text.
        is_wanted: False as soon as nobody waits for it.
        weights: name of the weights that it is generated with, from the first delivery on."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    number: int
    left: int
    log_probs: bool
    scores_prompt: bool
    deliver: Callable[[Delivery], None]
    grammar: Grammar | None = None
    is_wanted: bool = True
    weights: str = ""


class _Batch:
    """The rows of a model, and their texts."""

    def __init__(self, slots: Slots, weights: str) -> None:
        self.slots, self._weights = slots, weights
        self.texts: dict[int, Text] = {}
        self.newer: NamedGenerator | None = None
        """Weights for texts that join after those of now have ended."""
        self._seconds_per_token = _SECONDS_PER_CALL / MOST_TOKENS

    def renew(self) -> None:
        """Use the newer weights, if there are any and no text has those of now."""
        if self.newer and not self.texts:
            self._weights = self.newer.name
            self.slots.use(self.newer.generator)
            self.newer = None

    def join(self, text: Text) -> None:
        """Put a text into a free row."""
        text.weights = self._weights
        if text.scores_prompt:
            scores = self.slots.score(text.prompt) if len(text.prompt) > 1 else None
            if scores is not None and np.isnan(scores.top_K).any():
                text.deliver(Delivery([], [], "failed", _NOT_NUMBERS))
                return
            places = [] if scores is None else [_place(scores, n) for n in range(len(scores[0]))]
            text.deliver(Delivery([], [None, *places], None if text.left else "length"))
        if text.left:
            key = row_key(text.seed, text.number)
            self.texts[self.slots.join(text.prompt, key, text.sampling)] = text

    def add(self) -> None:
        """Add tokens to all texts, deliver them, and let those that end leave."""
        for row in [row for row, text in self.texts.items() if not text.is_wanted]:
            self.leave(row)
        if not self.texts:
            return
        texts = self.texts.items()
        allowed = {row: text.grammar.allowed() for row, text in texts if text.grammar}
        count = 1 if allowed else min(MOST_TOKENS, max(text.left for _, text in texts))
        count = max(1, min(count, round(_SECONDS_PER_CALL / self._seconds_per_token)))
        start = time.perf_counter()
        new = self.slots.add(count, any(text.log_probs for _, text in texts), allowed)
        self._seconds_per_token = (time.perf_counter() - start) / count
        for row in list(self.texts):
            self._deliver(row, new)

    def leave(self, row: int) -> None:
        """Free the row of a text."""
        self.slots.leave(row)
        del self.texts[row]

    def _deliver(self, row: int, new: NewTokens) -> None:
        """Deliver a row's new tokens."""
        text = self.texts[row]
        tokens = new.ids_CR[: text.left, row].tolist()
        ends = {*text.sampling.stop_tokens, UNDEFINED}
        count = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        text.left -= count
        finish = None if text.left else "length"
        if count < len(tokens):
            finish = "failed" if tokens[count] == UNDEFINED else "stop"
        problem = _NOT_NUMBERS if finish == "failed" else ""
        if text.grammar and not problem and (problem := text.grammar.add(tokens[0])):
            finish = "failed"
        log_probs = [
            _place(new.log_probs_CR, (n, row)) if new.log_probs_CR and text.log_probs else None
            for n in range(count + (finish == "stop"))
        ]
        stop = tokens[count : count + 1] if finish == "stop" else ()
        text.deliver(Delivery(tokens[:count], log_probs, finish, problem, stop))
        if finish:
            self.leave(row)


def _place(log_probs: LogProbs, place: int | tuple[int, int]) -> LogProbs:
    """Return the log-probabilities in one place."""
    return LogProbs(*(array[place] for array in log_probs))


class Engine(threading.Thread):
    """Generates for the clients of some models.

    Args:
        generators: models by name.
        rows: the most texts of a model at a time.
        most_waiting: the most texts that wait for a row, of all models.

    Attributes:
        error: why the thread ended, if it failed."""

    def __init__(
        self, generators: Mapping[str, NamedGenerator], rows: int, most_waiting: int
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._most_waiting = most_waiting
        self._wake = threading.Condition()
        self._waiting = {name: collections.deque[Text]() for name in generators}
        self._batches = {
            name: _Batch(Slots(generator, rows), weights)
            for name, (weights, generator) in generators.items()
        }
        self._is_ending = False
        self.error: BaseException | None = None

    @property
    def waiting(self) -> int:
        """Number of texts that wait for a row."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Number of texts that are generated."""
        return sum(len(batch.texts) for batch in self._batches.values())

    def submit(self, name: str, texts: Sequence[Text]) -> None:
        """Let texts join a model's rows in their turn. Raises QueueFullError if too many wait."""
        with self._wake:
            if self.waiting + len(texts) > self._most_waiting or self.error:
                raise QueueFullError
            self._waiting[name] += texts
            self._wake.notify()

    def replace(self, name: str, new: NamedGenerator) -> None:
        """Use other weights of the same model for texts that join from now on, as soon as those in
        progress have ended."""
        with self._wake:
            self._batches[name].newer = new
            self._wake.notify()

    def end(self) -> None:
        """End the thread, without waiting for texts."""
        with self._wake:
            self._is_ending = True
            self._wake.notify()
        self.join()

    def run(self) -> None:
        """Generate until `end`."""
        try:
            while self._wait():
                for name in self._batches:
                    self._advance(name)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._fail_all()

    def warm_up(self) -> None:
        """Compile the programs for few and for many texts, before the thread starts."""
        for batch in self._batches.values():
            rows = 0
            while rows < len(batch.slots):
                text = Text([0], Sampling(), 0, 0, 1, False, False, lambda _: None)
                while rows >= len(batch.texts):
                    batch.join(text)
                batch.slots.add(1)
                rows = 2 * rows or 1
            for row in list(batch.texts):
                batch.leave(row)

    def _wait(self) -> bool:
        """Wait for something to do; False if there will be nothing more."""
        with self._wake:
            batches = self._batches.values()
            self._wake.wait_for(
                lambda: (
                    self._is_ending
                    or self.waiting
                    or self.running
                    or any(batch.newer for batch in batches)
                )
            )
            return not self._is_ending

    def _advance(self, name: str) -> None:
        """Let texts join, and add tokens to all of a model's texts."""
        batch = self._batches[name]
        with self._wake:
            batch.renew()
        while not batch.newer and (text := self._next(name, batch)):
            batch.join(text)
        batch.add()

    def _next(self, name: str, batch: _Batch) -> Text | None:
        """Take the next text that somebody waits for, if there is a free row."""
        with self._wake:
            waiting = self._waiting[name]
            while waiting and not waiting[0].is_wanted:
                waiting.popleft()
            return waiting.popleft() if waiting and not batch.slots.are_full else None

    def _fail_all(self) -> None:
        """Tell all clients that the engine has ended."""
        with self._wake:
            texts = [text for waiting in self._waiting.values() for text in waiting]
            texts += [text for batch in self._batches.values() for text in batch.texts.values()]
            for waiting in self._waiting.values():
                waiting.clear()
        for text in texts:
            text.deliver(Delivery([], [], "failed", "the server is ending"))
