"""Generate text from a model, batched, with a key/value cache.

Prompts of unequal length are padded on the left, so that the last tokens of all rows are in the
same slot; a row's positions count from its first token. Prompts are padded to a bucket length, and
the number of slots is rounded up. Each such shape compiles one prefill and one decoding loop, which
runs any number of steps.

Axes as in `gpt.py`; S is the slots of the padded prompts, T all slots.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.model.attention import Cache, cache_contexts
from rungs.model.blocks import cast_matrices, unstack_layers
from rungs.model.gpt import GPT
from rungs.model.sampling import GREEDY, Sampling, next_tokens
from rungs.parallel import target_device

SMALLEST_BUCKET = 16
SLOT_MULTIPLE = 32
Texts = list[list[int]]
Weights = tuple[nnx.State, list[nnx.State]]
"""Those outside the blocks, and those of each block."""


class Request(NamedTuple):
    """What to generate for a batch of prompts."""

    new_tokens: int
    """The number of tokens to add to each text, at most."""
    sampling: Sampling = GREEDY
    seed: int = 0
    """Samples depend on this, the row and the token's number, not on other rows."""


class DecodingState(NamedTuple):
    """A batch of texts while tokens are added."""

    tokens_BT: Array
    """The token in each slot, zero in free slots."""
    slot: Array
    """The last slot that has a token."""
    sampling_offset: Array
    """The slot minus the number of tokens generated for each text so far."""
    padding_B: Array
    """The number of padding slots at the start of each row."""
    stopped_B: Array
    """Whether the row has a stop token."""
    keys_B: Array
    """A random key for each row."""
    caches: list[Cache]
    """Keys and values of each layer, up to the slot before the last."""


class Generator:
    """A model prepared for generation: its layers are unstacked, its matrices have one dtype.

    XLA's CPU compiler would keep float32 copies of a bfloat16 cache, and of every matrix that is
    multiplied by a single row. On a CPU the cache is therefore float32, and in bfloat16 a single
    row is computed twice.

    Args:
        model: its parameters are copied.
        compute_dtype: dtype of matrices, of activations and, except on a CPU, of the cache.
        donate: free the model's parameters as they are copied, to save memory.
    """

    def __init__(
        self, model: GPT, compute_dtype: jnp.dtype = jnp.float32, donate: bool = False
    ) -> None:
        on_cpu = target_device.platform() == "cpu"
        self._config, self._dtype = model.config, jnp.dtype(compute_dtype)
        self._cache_dtype = jnp.dtype(jnp.float32) if on_cpu else self._dtype
        self._min_rows = 2 if on_cpu and self._dtype == jnp.bfloat16 else 1
        outer = nnx.merge(*nnx.split(model))
        blocks, outer.blocks = outer.blocks, None
        self._outer_graph, outer_state = nnx.split(outer)
        block_graph, stacked = nnx.split(blocks)
        self._block_graph: Any = block_graph
        layers = unstack_layers(stacked, self._config.n_layers, self._dtype, donate)
        self._weights = cast_matrices(outer_state, self._dtype), layers
        self._jit_prefill = jax.jit(self._prefill, static_argnames=("slots", "sampling"))
        self._jit_decode = jax.jit(
            self._decode, static_argnames="sampling", donate_argnames="state"
        )

    @property
    def context_length(self) -> int:
        """The number of tokens that the model can attend to at most."""
        return self._config.context_length

    def generate(self, prompts: Sequence[Sequence[int]], request: Request) -> Texts:
        """Return the new tokens of each prompt, without the prompt and without the stop token.

        Args:
            prompts: token ids, at least one in each.
            request: how many tokens, and how they are chosen.

        Raises:
            ValueError: a prompt is empty, or has a token id that the model doesn't have.
        """
        result: Texts = [[] for _ in prompts]
        for chunk in self.stream(prompts, request, chunk_size=request.new_tokens):
            for row, new_tokens in zip(result, chunk, strict=True):
                row += new_tokens
        return result

    def stream(
        self, prompts: Sequence[Sequence[int]], request: Request, chunk_size: int = 8
    ) -> Iterator[Texts]:
        """Yield the tokens of `generate` as they are made: first one token for each prompt, then
        `chunk_size` at a time; none for texts that have stopped.

        The model attends to at most `context_length` tokens. A text that outgrows them is prefilled
        again with its last half context.
        """
        self._check_prompts(prompts)
        texts = [list(prompt) for prompt in prompts]
        window_starts = [0] * len(texts)
        context = self._config.context_length
        half = max(context // 2, 1)
        stopped_B = np.zeros(len(texts), bool)
        generated = 0
        while generated < request.new_tokens and not stopped_B.all():
            window_starts = [
                start if len(text) - start <= context else len(text) - half
                for text, start in zip(texts, window_starts, strict=True)
            ]
            windows = [text[start:] for text, start in zip(texts, window_starts, strict=True)]
            count = min(context + 1 - max(map(len, windows)), request.new_tokens - generated)
            chunks = self._stream_in_context(
                windows, stopped_B, request, generated, count, chunk_size
            )
            for chunk, stopped in chunks:
                yield [_until_stop(row, request.sampling.stop_tokens) for row in chunk]
                texts = [text + row for text, row in zip(texts, chunk, strict=True)]
                generated, stopped_B = generated + len(chunk[0]), stopped

    def logits_after(self, texts: Sequence[Sequence[int]], decoded: int) -> np.ndarray:
        """Return logits_BSV, float32, as generation sees them: after the prefill of each text
        without its last `decoded` tokens, then after each of those, added through the cache.

        Args:
            texts: of equal or unequal length, each longer than `decoded` and no longer than the
                context.
            decoded: how many tokens of each text are added one by one.
        """
        rows = len(texts)
        tokens_BS, padding_B = pad_left([list(text[: len(text) - decoded]) for text in texts])
        length = tokens_BS.shape[1]
        state = self._initial_state(
            jnp.asarray(tokens_BS),
            jnp.asarray(padding_B),
            jnp.zeros(rows, bool),
            row_keys(0, rows),
            0,
            slots=length + decoded,
        )
        last_logits = jax.jit(self._last_logits)
        logits_BV, caches = last_logits(self._weights, state, tokens_BS, 0)
        found = [logits_BV]
        for place in range(decoded):
            state = state._replace(caches=caches)
            column_B1 = np.array([[text[len(text) - decoded + place]] for text in texts])
            logits_BV, caches = last_logits(self._weights, state, column_B1, length + place)
            found.append(logits_BV)
        return np.stack(found, axis=1)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        if not all(prompts):
            raise ValueError("a prompt has no token")
        if not all(0 <= token < self._config.vocab_size for text in prompts for token in text):
            raise ValueError(
                f"a prompt has a token id beyond the model's vocab_size {self._config.vocab_size}"
            )

    def _stream_in_context(
        self,
        windows: Texts,
        stopped_B: np.ndarray,
        request: Request,
        generated: int,
        count: int,
        chunk_size: int,
    ) -> Iterator[tuple[Texts, np.ndarray]]:
        """Generate `count` tokens for each text, or fewer if all stop, after one prefill.

        Yields:
            The new tokens of each row, stop tokens for rows that have stopped; and which rows have
            stopped.
        """
        rows = len(windows)
        extra_rows = max(self._min_rows - rows, 0)
        tokens_BS, padding_B = pad_left(windows + windows[:1] * extra_rows)
        read = tokens_BS.shape[1] - 1
        last = read + count
        slots = -(-(last + 1) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        sampling = request.sampling
        state = self._jit_prefill(
            self._weights,
            tokens_BS,
            padding_B,
            np.pad(stopped_B, (0, extra_rows), mode="edge"),
            row_keys(request.seed, rows + extra_rows),
            generated,
            slots=slots,
            sampling=sampling,
        )
        while True:
            slot, stopped_B = int(state.slot), np.asarray(state.stopped_B)[:rows]
            yield np.asarray(state.tokens_BT)[:rows, read + 1 : slot + 1].tolist(), stopped_B
            if slot == last or stopped_B.all():
                return
            read = slot
            limit = min(slot + chunk_size, last)
            state = self._jit_decode(self._weights, state=state, limit=limit, sampling=sampling)

    def _prefill(
        self,
        weights: Weights,
        tokens_BS: Array,
        padding_B: Array,
        stopped_B: Array,
        keys_B: Array,
        generated: Array,
        *,
        slots: int,
        sampling: Sampling,
    ) -> DecodingState:
        """Read the padded prompts, and add one token."""
        state = self._initial_state(tokens_BS, padding_B, stopped_B, keys_B, generated, slots)
        return self._add_token(weights, state, tokens_BS, jnp.asarray(0), sampling)

    def _initial_state(
        self,
        tokens_BS: Array,
        padding_B: Array,
        stopped_B: Array,
        keys_B: Array,
        generated: Array | int,
        slots: int,
    ) -> DecodingState:
        """Return the padded prompts with empty caches."""
        rows, length = tokens_BS.shape
        return DecodingState(
            tokens_BT=jnp.pad(tokens_BS, ((0, 0), (0, slots - length))),
            slot=jnp.asarray(length - 1),
            sampling_offset=jnp.asarray(length - 1 - generated),
            padding_B=padding_B,
            stopped_B=stopped_B,
            keys_B=keys_B,
            caches=[self._empty_cache(rows, slots) for _ in range(self._config.n_layers)],
        )

    def _decode(
        self,
        weights: Weights,
        state: DecodingState,
        limit: Array,
        *,
        sampling: Sampling,
    ) -> DecodingState:
        """Add tokens up to slot `limit`, or until all rows have stopped."""

        def add_token(state: DecodingState) -> DecodingState:
            last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BT, state.slot, 1, axis=1)
            return self._add_token(weights, state, last_B1, state.slot, sampling)

        return jax.lax.while_loop(
            lambda state: (state.slot < limit) & ~state.stopped_B.all(), add_token, state
        )

    def _add_token(
        self,
        weights: Weights,
        state: DecodingState,
        tokens_BS: Array,
        first_slot: Array,
        sampling: Sampling,
    ) -> DecodingState:
        """Add the token after `tokens_BS`, the last ones of the state, which start at
        `first_slot`."""
        logits_BV, caches = self._last_logits(weights, state, tokens_BS, first_slot)
        number = state.slot - state.sampling_offset
        keys_B = jax.vmap(jax.random.fold_in, (0, None))(state.keys_B, number)
        seen_BV = seen_tokens(state, self._config.vocab_size)
        tokens_B = next_tokens(sampling, logits_BV, seen_BV, keys_B)
        if sampling.stop_tokens:
            tokens_B = jnp.where(state.stopped_B, sampling.stop_tokens[0], tokens_B)
            stops_B = jnp.isin(tokens_B, jnp.asarray(sampling.stop_tokens))
            state = state._replace(stopped_B=state.stopped_B | stops_B)
        slot = state.slot + 1
        tokens_BT = jax.lax.dynamic_update_slice_in_dim(
            state.tokens_BT, tokens_B[:, None], slot, axis=1
        )
        return state._replace(tokens_BT=tokens_BT, slot=slot, caches=caches)

    def _last_logits(
        self, weights: Weights, state: DecodingState, tokens_BS: Array, first_slot: Array
    ) -> tuple[Array, list[Cache]]:
        """Return logits_BV after the last of the tokens, and the caches with all of them added."""
        outer_state, layers = weights
        outer: GPT = nnx.merge(self._outer_graph, outer_state)
        length, slots = tokens_BS.shape[1], state.tokens_BT.shape[1]
        contexts = (
            cache_contexts(self._config, first_slot, length, slots, state.padding_B)
            if layers
            else {}
        )
        positions_BS = jnp.maximum(first_slot + jnp.arange(length) - state.padding_B[:, None], 0)
        x_BSD = outer.embed(tokens_BS, positions_BS).astype(self._dtype)
        caches = []
        for layer, kind, old in zip(layers, self._config.layer_kinds(), state.caches, strict=True):
            block = nnx.merge(self._block_graph, layer)
            x_BSD, cache, _ = block(x_BSD, contexts[kind], cache=old)
            caches.append(cache)
        return outer.unembed(x_BSD[:, -1:])[:, 0], caches

    def _empty_cache(self, rows: int, slots: int) -> Cache:
        kv_heads = self._config.n_kv_heads or self._config.n_heads or 1
        shape = (rows, kv_heads, slots, self._config.head_width)
        return Cache(jnp.zeros(shape, self._cache_dtype), jnp.zeros(shape, self._cache_dtype))


def pad_left(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens_BS, int32, padded with zeros on the left to a bucket length, and padding_B, the
    amount of padding."""
    length = SMALLEST_BUCKET
    while length < max(map(len, texts)):
        length *= 2
    tokens_BS = np.zeros((len(texts), length), np.int32)
    for row, text in zip(tokens_BS, texts, strict=True):
        row[length - len(text) :] = text
    return tokens_BS, np.array([length - len(text) for text in texts], np.int32)


def seen_tokens(state: DecodingState, vocab_size: int) -> Array:
    """Return seen_BV, true for tokens that are in the row's text."""
    rows, slots = state.tokens_BT.shape
    slot_T = jnp.arange(slots)
    is_token_BT = (slot_T >= state.padding_B[:, None]) & (slot_T <= state.slot)
    none_BV = jnp.zeros((rows, vocab_size), bool)
    return none_BV.at[jnp.arange(rows)[:, None], state.tokens_BT].max(is_token_BT)


def row_keys(seed: int, rows: int) -> Array:
    """Return a random key for each row, which doesn't depend on the number of rows."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))


def _until_stop(row: list[int], stop_tokens: tuple[int, ...]) -> list[int]:
    """Return the tokens before the first stop token."""
    return list(itertools.takewhile(lambda token: token not in stop_tokens, row))
