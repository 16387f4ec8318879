"""Texts that are generated together, each in a row of one compiled program. A text joins a free row
at any time and leaves it when it ends; other rows don't change.

Axes as in `decoding.py`; R rows in use, C tokens of a call, K most likely tokens."""

import copy
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.model.decoding import DecodingState, Prompts, Weights, pad_left, seen_tokens
from rungs.model.generation import SLOT_MULTIPLE, Generator, bucket_length
from rungs.model.sampling import GREEDY, RowSampling, Sampling

MOST_TOKENS = 8
"""Most tokens per row and call."""
MOST_LIKELY = 20
"""How many of the most likely tokens are given with log-probabilities."""
_SHORTEST = 64
"""Cache slots that the program for short texts has."""


class LogProbs(NamedTuple):
    """Log-probabilities before temperature and other settings, float32, in nats."""

    of_token: Array | np.ndarray
    """Of each token."""
    top_K: Array | np.ndarray
    """Of the most likely tokens in its place."""
    top_ids_K: Array | np.ndarray
    """Their ids."""

    @classmethod
    def of(cls, logits: Array, tokens: Array) -> "LogProbs":
        """Return those of some tokens, from logits with one more axis."""
        log_probs = jax.nn.log_softmax(logits)
        of_token = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
        count = min(MOST_LIKELY, logits.shape[-1])
        return cls(of_token, *jax.lax.top_k(log_probs, count))


class NewTokens(NamedTuple):
    """Tokens that a call has added to each row in use."""

    ids_CR: Array | np.ndarray
    """`sampling.UNDEFINED` where logits were NaN."""
    log_probs_CR: LogProbs | None


class Slots:
    """Rows for texts, and the programs that add to them.

    Args:
        generator: the model; texts have at most its context_length, plus one last token.
        rows: the most texts at a time."""

    def __init__(self, generator: Generator, rows: int) -> None:
        self._decoder, self._weights = generator.decoder, generator.weights
        slots = generator.context_length + MOST_TOKENS
        self._slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
        self._ends = np.ones(rows, np.int32)
        self._samplings = [GREEDY] * rows
        self._is_free = np.ones(rows, bool)
        self._jit_empty = jax.jit(self._empty)
        self._jit_read = jax.jit(self._read, donate_argnames="state")
        self._jit_add = jax.jit(
            self._add, donate_argnames="state", static_argnames=("rows", "length", "log_probs")
        )
        self._jit_score = jax.jit(self._score)
        self._state = self._jit_empty()

    def with_weights(self, generator: Generator) -> "Slots":
        """Return free rows for other weights of the same model, with the same programs."""
        other = copy.copy(self)
        other._weights = generator.weights
        other._ends = np.ones_like(self._ends)
        other._samplings = [GREEDY] * len(self._ends)
        other._is_free = np.ones_like(self._is_free)
        other._state = self._jit_empty()
        return other

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def used(self) -> list[int]:
        """Rows with a text."""
        return np.flatnonzero(~self._is_free).tolist()

    @property
    def are_full(self) -> bool:
        """Whether no row is free."""
        return not self._is_free.any()

    def join(self, prompt: Sequence[int], key: Array, sampling: Sampling) -> int:
        """Put a text into a free row and return the row.

        Args:
            prompt: at least one token, at most the context length.
            key: with the text's number of new tokens it makes the random key of each."""
        row = int(np.argmax(self._is_free))
        self._is_free[row] = False
        self._samplings[row], self._ends[row] = sampling, len(prompt)
        read = list(prompt[:-1])  # the last one is read by the next call of `add`
        tokens_1S, padding_1 = pad_left([read], bucket_length([read]))
        self._state = self._jit_read(
            self._weights, self._state, tokens_1S, padding_1, row, prompt[-1], key
        )
        return row

    def leave(self, row: int) -> None:
        """End a row's text."""
        self._is_free[row], self._ends[row], self._samplings[row] = True, 1, GREEDY

    def add(self, count: int, log_probs: bool = False) -> NewTokens:
        """Add tokens to every row with a text, and return them.

        Args:
            count: tokens per row, at most MOST_TOKENS. A text that has its last one before gets
                further ones, which mean nothing.
            log_probs: whether to compute log-probabilities."""
        rows = 1
        while rows <= self.used[-1]:
            rows *= 2
        rows, length = min(rows, len(self._ends)), _SHORTEST
        while length < self._ends.max() + count:
            length *= 2
        self._state, added = self._jit_add(
            self._weights,
            self._state,
            RowSampling.of(self._samplings[:rows]),
            self._ends[:rows],
            count,
            rows=rows,
            length=min(length, self._slots),
            log_probs=log_probs,
        )
        self._ends = np.where(self._is_free, 1, self._ends + count).astype(np.int32)
        return jax.tree.map(lambda array: np.asarray(array)[:count], added)

    def score(self, text: Sequence[int]) -> LogProbs:
        """Return the log-probabilities of a text's tokens, S − 1 of them, as the first has none.
        The text must fit the context."""
        tokens_1S, padding_1 = pad_left([text], bucket_length([list(text)]))
        found = self._jit_score(self._weights, tokens_1S, padding_1)
        return jax.tree.map(lambda array: np.asarray(array)[padding_1[0] :], found)

    def _empty(self) -> DecodingState:
        rows = len(self._ends)
        prompts = Prompts(
            jnp.zeros((rows, 1), jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, bool),
            jax.random.split(jax.random.key(0), rows),
            0,
        )
        state = self._decoder.initial_state(prompts, self._slots)
        return state._replace(sampling_offset=jnp.zeros(rows, jnp.int32))

    def _read(
        self,
        weights: Weights,
        state: DecodingState,
        tokens_1S: Array,
        padding_1: Array,
        row: Array,
        last: Array,
        key: Array,
    ) -> DecodingState:
        """Return the state with a text in a row, from slot 0 on: its last token, and the others
        with their keys and values."""
        length = tokens_1S.shape[1]
        prompts = Prompts(tokens_1S, padding_1, jnp.zeros(1, bool), key[None], 0)
        own = self._decoder.initial_state(prompts, length)
        _, caches = self._decoder.last_logits(weights, own, tokens_1S, None)
        count, most = length - padding_1[0], min(length, self._slots)

        def put(into: Array, value: Array, axis: int) -> Array:
            moved = jnp.roll(value, -padding_1[0], axis=axis)
            moved = jax.lax.slice_in_dim(moved, 0, most, axis=axis)
            return jax.lax.dynamic_update_slice_in_dim(into, moved.astype(into.dtype), row, axis=0)

        tokens_BT = put(state.tokens_BT, tokens_1S, axis=1)
        return state._replace(
            tokens_BT=tokens_BT.at[row, count].set(last),
            sampling_offset=state.sampling_offset.at[row].set(count),
            keys_B=state.keys_B.at[row].set(key),
            caches=jax.tree.map(functools.partial(put, axis=2), state.caches, caches),
        )

    def _add(
        self,
        weights: Weights,
        state: DecodingState,
        sampling: RowSampling,
        ends_R: Array,
        count: Array,
        *,
        rows: int,
        length: int,
        log_probs: bool,
    ) -> tuple[DecodingState, NewTokens]:
        """Add `count` tokens to each of the first rows, whose texts must fit `length` slots."""
        used = state._replace(
            tokens_BT=state.tokens_BT[:rows, :length],
            sampling_offset=state.sampling_offset[:rows],
            padding_B=state.padding_B[:rows],
            keys_B=state.keys_B[:rows],
            ends_B=ends_R,
            caches=jax.tree.map(lambda cache: cache[:rows, :, :length], state.caches),
        )
        row_R, vocab_size = jnp.arange(rows), self._decoder.config.vocab_size

        def add_one(
            number: Array, carry: tuple[DecodingState, NewTokens]
        ) -> tuple[DecodingState, NewTokens]:
            now, added = carry
            last_R1 = jnp.take_along_axis(now.tokens_BT, now.ends_B[:, None] - 1, axis=1)
            logits_RSV, caches = self._decoder.all_logits(weights, now, last_R1, now.ends_B - 1)
            keys_R = jax.vmap(jax.random.fold_in)(now.keys_B, now.ends_B - 1 - now.sampling_offset)
            logits_RV = logits_RSV[:, 0]
            tokens_R = sampling.next_tokens(
                logits_RV, functools.partial(seen_tokens, now, vocab_size), keys_R
            )
            new = NewTokens(tokens_R, LogProbs.of(logits_RV, tokens_R) if log_probs else None)
            added = jax.tree.map(lambda all_CR, one_R: all_CR.at[number].set(one_R), added, new)
            tokens_BT = now.tokens_BT.at[row_R, now.ends_B].set(tokens_R, mode="drop")
            now = now._replace(tokens_BT=tokens_BT, ends_B=now.ends_B + 1, caches=caches)
            return now, added

        none = self._none(rows, log_probs)
        used, added = jax.lax.fori_loop(0, count, add_one, (used, none))
        state = state._replace(
            tokens_BT=state.tokens_BT.at[:rows, :length].set(used.tokens_BT),
            caches=jax.tree.map(
                lambda whole, part: whole.at[:rows, :, :length].set(part), state.caches, used.caches
            ),
        )
        return state, added

    def _none(self, rows: int, log_probs: bool) -> NewTokens:
        """Return tokens that are not known yet."""
        ids_CR = jnp.zeros((MOST_TOKENS, rows), jnp.int32)
        if not log_probs:
            return NewTokens(ids_CR, None)
        top = (*ids_CR.shape, min(MOST_LIKELY, self._decoder.config.vocab_size))
        return NewTokens(
            ids_CR, LogProbs(jnp.zeros(ids_CR.shape), jnp.zeros(top), jnp.zeros(top, jnp.int32))
        )

    def _score(self, weights: Weights, tokens_1S: Array, padding_1: Array) -> LogProbs:
        prompts = Prompts(tokens_1S, padding_1, jnp.zeros(1, bool), jax.random.key(0)[None], 0)
        state = self._decoder.initial_state(prompts, tokens_1S.shape[1])
        logits_1SV, _ = self._decoder.all_logits(weights, state, tokens_1S, None)
        return LogProbs.of(logits_1SV[0, :-1], tokens_1S[0, 1:])
