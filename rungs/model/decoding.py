"""Generates tokens one at a time with a key/value cache. Prompts of unequal length are padded on
the left, so that the last tokens of all rows share a slot; positions count from a row's first
token.

Axes as in `gpt.py`; S slots of the padded prompts, T all slots."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import LayerKind, ModelConfig
from rungs.model.attention import AttentionContext, Cache, cache_contexts, sequence_contexts
from rungs.model.blocks import block_graphs, layer_contexts
from rungs.model.delta_net import DeltaState
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.sampling import Sampling, next_tokens
from rungs.model.weight_formats import WeightFormat, convert_all, converter, unstack_layers
from rungs.parallel import collectives, sharding, target_device

Weights = tuple[nnx.State, list[nnx.State]]
"""Parameters outside the blocks, and those of each block."""


LayerCache = Cache | DeltaState


class Prompts(NamedTuple):
    """A batch of padded prompts and their sampling state."""

    tokens_BS: Array
    padding_B: Array
    """Padding slots at the start of each row."""
    stopped_B: Array
    """Whether a row gets no more tokens."""
    keys_B: Array
    """One random key per row."""
    generated: Array | int
    """Tokens at the end of each row, or of all rows, since the prompt ended."""


class DecodingState(NamedTuple):
    """A batch of texts during decoding."""

    tokens_BT: Array
    """The token in each slot, zero in free slots."""
    log_probs_BT: Array | None
    """Log-probability of each new token when sampled, float32, in nats; None unless requested."""
    slot: Array
    """The last slot with a token in every unfinished row."""
    sampling_offset: Array
    """A row's last slot with a token minus the number of its generated tokens."""
    padding_B: Array
    """Padding slots at the start of each row."""
    ends_B: Array
    """Slot after each row's last token, which is its stop token if it has stopped."""
    stopped_B: Array
    """Whether a row has a stop token."""
    keys_B: Array
    """One random key per row."""
    caches: list[LayerCache]
    """Keys and values of each layer, up to the slot before each row's last token; later slots are
    overwritten before they are read. Of a delta_net layer, its state after that slot."""


class Decoder:
    """A model's structure, prepared for decoding; its weights are an argument of each method. On a
    CPU the cache is float32, as XLA's CPU compiler would keep float32 copies of a bfloat16 cache
    anyway.

    Args:
        model: any model of the structure to decode.
        compute_dtype: dtype of matrices, activations and, except on a CPU, the cache.
        weight_format: "int8" quantizes the matrices.

    Raises:
        ValueError: the model can't be quantized. UserError: it is bidirectional."""

    def __init__(
        self, model: GPT, compute_dtype: jnp.dtype, weight_format: WeightFormat = "dtype"
    ) -> None:
        model.config.require_next_token()
        on_cpu = target_device.platform() == "cpu"
        self.config: ModelConfig = model.config
        self.dtype = jnp.dtype(compute_dtype)
        self._convert = converter(weight_format, model.config, self.dtype)
        self._cache_dtype = jnp.dtype(jnp.float32) if on_cpu else self.dtype
        outer, blocks = _without_blocks(model)
        self._outer_graph = nnx.graphdef(outer)
        self._block_graphs = block_graphs(model.config, blocks) if model.config.n_layers else []

    def weights(self, states: tuple[nnx.State, nnx.State]) -> Weights:
        """Return unstacked weights in the decoder's format; `states` is from `states_of`."""
        outer_state, stacked = states
        # the largest first, before the rest takes memory
        outer = convert_all(outer_state, self._convert)
        return outer, unstack_layers(stacked, self.config.n_layers, self._convert)

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise ValueError unless each prompt has tokens, all with ids of the model."""
        size = self.config.vocab_size
        for text in prompts:
            if not len(text) or not all(0 <= operator.index(token) < size for token in text):
                raise ValueError(f"a prompt has no token, or one beyond the vocab_size {size}")

    def prefill(
        self, weights: Weights, prompts: Prompts, *, slots: int, sampling: Sampling
    ) -> DecodingState:
        """Process the padded prompts and add one token."""
        state = self.initial_state(prompts, slots)
        return self._add_token(weights, state, prompts.tokens_BS, None, sampling)

    def initial_state(
        self, prompts: Prompts, slots: int, keep_log_probs: bool = False
    ) -> DecodingState:
        """Return the state of padded prompts with empty caches."""
        rows, length = prompts.tokens_BS.shape
        slot, log_probs_BT, caches = collectives.to_varying(
            (
                jnp.asarray(length - 1),
                jnp.zeros((rows, slots), jnp.float32) if keep_log_probs else None,
                empty_caches(self.config, rows, slots, self._cache_dtype),
            ),
            sharding.DATA,
        )
        return DecodingState(
            tokens_BT=jnp.pad(prompts.tokens_BS, ((0, 0), (0, slots - length))),
            log_probs_BT=log_probs_BT,
            slot=slot,
            sampling_offset=slot - prompts.generated,
            padding_B=prompts.padding_B,
            ends_B=jnp.full_like(prompts.padding_B, length),
            stopped_B=prompts.stopped_B,
            keys_B=prompts.keys_B,
            caches=caches,
        )

    def decode(
        self, weights: Weights, state: DecodingState, limit: Array, *, sampling: Sampling
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
        first_slot: Array | None,
        sampling: Sampling,
    ) -> DecodingState:
        """Add the token after `tokens_BS`: prompts, or the state's tokens from `first_slot` on."""
        logits_BV, caches = self.last_logits(weights, state, tokens_BS, first_slot)
        numbers_B = jnp.broadcast_to(state.slot - state.sampling_offset, state.ends_B.shape)
        keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, numbers_B)
        seen_BV = seen_tokens(state, self.config.vocab_size)
        tokens_B = next_tokens(sampling, logits_BV, seen_BV, keys_B)
        stopped_B = state.stopped_B
        if sampling.stop_tokens:
            tokens_B = jnp.where(stopped_B, sampling.stop_tokens[0], tokens_B)
            stopped_B |= jnp.isin(tokens_B, jnp.asarray(sampling.stop_tokens))
        slot = state.slot + 1
        log_probs_BT = state.log_probs_BT
        if log_probs_BT is not None:
            log_probs_B = -target_losses(logits_BV / sampling.temperature, tokens_B)
            log_probs_BT = _with_column(log_probs_BT, log_probs_B, slot)
        return state._replace(
            tokens_BT=_with_column(state.tokens_BT, tokens_B, slot),
            log_probs_BT=log_probs_BT,
            slot=slot,
            ends_B=jnp.where(state.stopped_B, state.ends_B, slot + 1),
            stopped_B=stopped_B,
            caches=caches,
        )

    def last_logits(
        self, weights: Weights, state: DecodingState, tokens_BS: Array, first_slot: Array | None
    ) -> tuple[Array, list[LayerCache]]:
        """Return logits_BV after the last of the tokens, and the caches with all of them added.
        `first_slot` is the tokens' first slot in all rows; None for prompts into empty caches."""
        outer, x_BSD, caches = self._run_blocks(weights, state, tokens_BS, first_slot)
        return outer.unembed(x_BSD[:, -1:])[:, 0], caches

    def all_logits(
        self, weights: Weights, state: DecodingState, tokens_BS: Array, first_slot_B: Array | None
    ) -> tuple[Array, list[LayerCache]]:
        """Return logits_BSV after each token, and the caches with all of them added from slot
        `first_slot_B` on, which may differ by row; None for slot 0 of empty caches."""
        outer, x_BSD, caches = self._run_blocks(weights, state, tokens_BS, first_slot_B)
        return outer.unembed(x_BSD), caches

    def _run_blocks(
        self, weights: Weights, state: DecodingState, tokens_BS: Array, first_slot: Array | None
    ) -> tuple[GPT, Array, list[LayerCache]]:
        """Return the parts outside the blocks, the last block's output x_BSD, and the caches with
        all tokens added. Tokens beyond the context (only in drafts) get its last position."""
        outer_state, layers = weights
        outer: GPT = nnx.merge(self._outer_graph, outer_state)
        length = tokens_BS.shape[1]
        contexts = self._contexts(state, length, first_slot) if layers else {}
        first = 0 if first_slot is None else first_slot
        slots_BS = jnp.atleast_1d(first)[:, None] + jnp.arange(length)
        positions_BS = jnp.clip(
            slots_BS - state.padding_B[:, None], 0, self.config.context_length - 1
        )
        x_BSD = outer.embed(tokens_BS, positions_BS).astype(self.dtype)
        caches = list[LayerCache]()
        values = outer.embed_values(tokens_BS, self.dtype)
        of_layers = layer_contexts(self.config, contexts, x_BSD, values)
        parts = self._block_graphs, layers, of_layers, state.caches
        for graph, layer, context, old in zip(*parts, strict=True):
            block = nnx.merge(graph, layer)
            passed = block(x_BSD, context, cache=old)
            x_BSD = passed.x_BSD
            assert passed.cache is not None
            caches.append(passed.cache)
        return outer, x_BSD, caches

    def _contexts(
        self, state: DecodingState, length: int, first_slot: Array | None
    ) -> dict[LayerKind, AttentionContext]:
        """Return the context of each layer kind. Prompts attend to themselves, as sequences do in
        training; padding, which nothing attends to, attends to itself."""
        if first_slot is None:
            starts_BS = jnp.minimum(state.padding_B[:, None], jnp.arange(length))
            contexts = sequence_contexts(self.config, length, starts_BS)
            return {k: one._replace(padding_B=state.padding_B) for k, one in contexts.items()}
        slots = state.tokens_BT.shape[1]
        return cache_contexts(self.config, first_slot, length, slots, state.padding_B)


def empty_caches(config: ModelConfig, rows: int, slots: int, dtype: jnp.dtype) -> list[LayerCache]:
    """Return the cache of each layer, before the first token."""
    return [
        DeltaState.empty(config.delta_net, rows, dtype)
        if kind == "delta_net" and config.delta_net
        else Cache.empty(config, rows, slots, dtype)
        for kind in config.layer_kinds()
    ]


def states_of(model: GPT) -> tuple[nnx.State, nnx.State]:
    """Return the parameters outside the blocks, and the blocks' stacked parameters."""
    outer, blocks = _without_blocks(model)
    return nnx.state(outer), nnx.state(blocks)


def _without_blocks(model: GPT) -> tuple[GPT, Any]:
    """Return the model without its blocks, and the blocks."""
    outer = nnx.merge(*nnx.split(model))
    blocks, outer.blocks = outer.blocks, None
    return outer, blocks


def _with_column(rows_BT: Array, column_B: Array, slot: Array) -> Array:
    """Return the rows with the column at a slot replaced."""
    return jax.lax.dynamic_update_slice_in_dim(rows_BT, column_B[:, None], slot, axis=1)


def pad_left(texts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens_BS, int32, left-padded with zeros to a length, and padding_B, their number."""
    tokens_BS = np.zeros((len(texts), length), np.int32)
    for row, text in zip(tokens_BS, texts, strict=True):
        row[length - len(text) :] = text
    return tokens_BS, np.array([length - len(text) for text in texts], np.int32)


def seen_tokens(state: DecodingState, vocab_size: int) -> Array:
    """Return seen_BV, true for tokens that occur in the row's text."""
    rows, slots = state.tokens_BT.shape
    slot_T = jnp.arange(slots)
    is_token_BT = (slot_T >= state.padding_B[:, None]) & (slot_T < state.ends_B[:, None])
    none_BV = jnp.zeros((rows, vocab_size), bool)
    return none_BV.at[jnp.arange(rows)[:, None], state.tokens_BT].max(is_token_BT)
