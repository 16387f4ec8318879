"""Texts that are generated together, each in a row of one compiled program. A text joins a free row
at any time and leaves it when it ends; other rows don't change. The caches have room for about what
the texts need, and grow and shrink by powers of two.

Axes as in `decoding.py`; R rows in use, C tokens of a call, K likely tokens, W words of bits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.model.decoding import DecodingState, LayerCache, Prompts, Weights, pad_left, seen_tokens
from rungs.model.generation import SLOT_MULTIPLE, Generator, bucket_length
from rungs.model.sampling import GREEDY, RowSampling, Sampling

MOST_TOKENS = 8
"""Most tokens per row and call."""
MOST_LIKELY = 20
"""How many of the most likely tokens are given with log-probabilities."""
_ALL = np.uint32(0xFFFFFFFF)
"""A word that allows its 32 tokens."""
_SHORTEST = 64
"""The fewest cache slots of a row."""
_LOWEST = -9999.0
"""Of a token without any probability, as in OpenAI's API; JSON has no infinity."""


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
        log_probs = jnp.maximum(jax.nn.log_softmax(logits), _LOWEST)
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
        self._jit_empty = jax.jit(self._empty, static_argnums=(0, 1))
        self._jit_resize = jax.jit(self._resized, static_argnums=(1, 2))
        self._jit_read = jax.jit(self._read)
        self._jit_put = jax.jit(self._put, donate_argnums=0)
        self._jit_add = jax.jit(self._add, donate_argnames="state")
        self._jit_score = jax.jit(self._score)
        self._state = self._jit_empty(1, _SHORTEST)

    def use(self, generator: Generator) -> None:
        """Use other weights of the same model. No row may have a text."""
        self._weights = generator.weights

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and slots that the caches have now."""
        rows, slots = self._state.tokens_BT.shape
        return rows, slots

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
        self._make_room()
        read = list(prompt[:-1])  # the last one is read by the next call of `add`
        tokens_1S, padding_1 = pad_left([read], bucket_length([read]))
        text = self._jit_read(self._weights, tokens_1S, padding_1, key)
        self._state = self._jit_put(self._state, text, row, len(read), prompt[-1])
        return row

    def leave(self, row: int) -> None:
        """End a row's text."""
        self._is_free[row], self._ends[row], self._samplings[row] = True, 1, GREEDY

    def add(
        self, count: int, log_probs: bool = False, allowed: Mapping[int, np.ndarray] = {}
    ) -> NewTokens:
        """Add tokens to every row with a text, and return them.

        Args:
            count: tokens per row, at most MOST_TOKENS. A text that has its last one before gets
                further ones, which mean nothing.
            log_probs: whether to compute log-probabilities.
            allowed: for some rows which tokens may be chosen, bits in words of uint32."""
        self._make_room()
        rows, _ = self.shape
        allowed_RW = np.full((rows, -(-self._decoder.config.vocab_size // 32)), _ALL, np.uint32)
        for row, words_W in allowed.items():
            allowed_RW[row] = words_W
        self._state, added = self._jit_add(
            self._weights,
            self._state,
            RowSampling.of(self._samplings[:rows]),
            self._ends[:rows],
            allowed_RW,
            count,
            log_probs,
        )
        self._ends = np.where(self._is_free, 1, self._ends + count).astype(np.int32)
        new = jax.tree.map(lambda array: np.asarray(array)[:count], added)
        return new if log_probs else new._replace(log_probs_CR=None)

    def score(self, text: Sequence[int]) -> LogProbs:
        """Return the log-probabilities of a text's tokens, S − 1 of them, as the first has none.
        The text must fit the context."""
        tokens_1S, padding_1 = pad_left([text], bucket_length([list(text)]))
        found = self._jit_score(self._weights, tokens_1S, padding_1)
        return jax.tree.map(lambda array: np.asarray(array)[padding_1[0] :], found)

    def _make_room(self) -> None:
        """Resize the state for the rows with a text, and the tokens of a call in each."""
        length = int(self._ends.max()) + MOST_TOKENS
        rows = _size(self.used[-1] + 1, self.shape[0], len(self))
        slots = _size(max(length, _SHORTEST), self.shape[1], self._slots)
        if (rows, slots) != self.shape:
            self._state = self._jit_resize(self._state, rows, slots)

    def _empty(self, rows: int, slots: int) -> DecodingState:
        prompts = Prompts(
            jnp.zeros((rows, 1), jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, bool),
            jax.random.split(jax.random.key(0), rows),
            0,
        )
        state = self._decoder.initial_state(prompts, slots)
        return state._replace(sampling_offset=jnp.zeros(rows, jnp.int32))

    def _resized(self, state: DecodingState, rows: int, slots: int) -> DecodingState:
        def resized(empty: Array, old: Array) -> Array:
            part = tuple(map(slice, map(min, empty.shape, old.shape)))
            return empty.at[part].set(old[part])

        return jax.tree.map(resized, self._empty(rows, slots), state)

    def _read(
        self, weights: Weights, tokens_1S: Array, padding_1: Array, key: Array
    ) -> DecodingState:
        """Return a text that is read, from slot 0 on."""
        length = tokens_1S.shape[1]
        prompts = Prompts(tokens_1S, padding_1, jnp.zeros(1, bool), key[None], 0)
        own = self._decoder.initial_state(prompts, length)
        _, caches = self._decoder.last_logits(weights, own, tokens_1S, None)
        to_begin = functools.partial(jnp.roll, shift=-padding_1[0])
        return own._replace(
            tokens_BT=to_begin(tokens_1S, axis=1),
            caches=[_map_slots(to_begin, cache) for cache in caches],
        )

    def _put(
        self, state: DecodingState, text: DecodingState, row: Array, count: Array, last: Array
    ) -> DecodingState:
        """Return the state with a text in a row: `count` tokens that are read, and the last one."""
        slots = state.tokens_BT.shape[1]

        def put(into: Array, value: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(into, value.astype(into.dtype), row, axis=0)

        def cut(value: Array, axis: int) -> Array:
            return jax.lax.slice_in_dim(value, 0, min(value.shape[axis], slots), axis=axis)

        read = [_map_slots(cut, cache) for cache in text.caches]
        tokens_BT = put(state.tokens_BT, cut(text.tokens_BT, axis=1))
        return state._replace(
            tokens_BT=tokens_BT.at[row, count].set(last),
            sampling_offset=state.sampling_offset.at[row].set(count),
            keys_B=state.keys_B.at[row].set(text.keys_B[0]),
            caches=jax.tree.map(put, state.caches, read),
        )

    def _add(
        self,
        weights: Weights,
        state: DecodingState,
        sampling: RowSampling,
        ends_R: Array,
        allowed_RW: Array,
        count: Array,
        log_probs: Array,
    ) -> tuple[DecodingState, NewTokens]:
        """Add `count` tokens to each row, with log-probabilities or zeros."""
        rows, vocab_size = len(ends_R), self._decoder.config.vocab_size
        row_R, is_bound = jnp.arange(rows), (allowed_RW != _ALL).any()
        top_RK = jnp.zeros((rows, min(MOST_LIKELY, vocab_size)))
        none = LogProbs(jnp.zeros(rows), top_RK, top_RK.astype(jnp.int32))
        nothing = NewTokens(jnp.zeros(rows, jnp.int32), none)

        def add_one(
            number: Array, carry: tuple[DecodingState, NewTokens]
        ) -> tuple[DecodingState, NewTokens]:
            now, added = carry
            last_R1 = jnp.take_along_axis(now.tokens_BT, now.ends_B[:, None] - 1, axis=1)
            logits_RSV, caches = self._decoder.all_logits(weights, now, last_R1, now.ends_B - 1)
            keys_R = jax.vmap(jax.random.fold_in)(now.keys_B, now.ends_B - 1 - now.sampling_offset)
            logits_RV = logits_RSV[:, 0]
            bound_RV = jax.lax.cond(is_bound, _bound, lambda x, _: x, logits_RV, allowed_RW)
            tokens_R = sampling.next_tokens(
                bound_RV, functools.partial(seen_tokens, now, vocab_size), keys_R
            )
            found = jax.lax.cond(log_probs, lambda: LogProbs.of(logits_RV, tokens_R), lambda: none)
            new = NewTokens(tokens_R, found)
            added = jax.tree.map(lambda all_CR, one_R: all_CR.at[number].set(one_R), added, new)
            tokens_BT = now.tokens_BT.at[row_R, now.ends_B].set(tokens_R, mode="drop")
            now = now._replace(tokens_BT=tokens_BT, ends_B=now.ends_B + 1, caches=caches)
            return now, added

        none_CR = jax.tree.map(lambda one_R: jnp.stack([one_R] * MOST_TOKENS), nothing)
        start = state._replace(ends_B=ends_R), none_CR
        return jax.lax.fori_loop(0, count, add_one, start)

    def _score(self, weights: Weights, tokens_1S: Array, padding_1: Array) -> LogProbs:
        prompts = Prompts(tokens_1S, padding_1, jnp.zeros(1, bool), jax.random.key(0)[None], 0)
        state = self._decoder.initial_state(prompts, tokens_1S.shape[1])
        logits_1SV, _ = self._decoder.all_logits(weights, state, tokens_1S, None)
        return LogProbs.of(logits_1SV[0, :-1], tokens_1S[0, 1:])


def _map_slots(function: Callable[..., Array], cache: LayerCache) -> LayerCache:
    """Return a cache with a function applied along the axis of slots, if it has one."""
    axis = cache.slot_axis
    return cache if axis is None else jax.tree.map(functools.partial(function, axis=axis), cache)


def _bound(logits_RV: Array, allowed_RW: Array) -> Array:
    """Return logits with −∞ for tokens that are not allowed."""
    bits_RWB = (allowed_RW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    is_allowed_RV = bits_RWB.reshape(len(allowed_RW), -1)[:, : logits_RV.shape[1]] == 1
    return jnp.where(is_allowed_RV, logits_RV, -jnp.inf)


def _size(needed: int, now: int, most: int) -> int:
    """Return the size of an axis: a power of two, at most `most`; what it is now unless that is too
    small, or four times too large."""
    size = min(1 << (needed - 1).bit_length(), most)
    return now if size <= now < 4 * size else size
