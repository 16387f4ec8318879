"""Speculative decoding with drafts from the text itself, also called prompt lookup (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding).

A row's last n-gram is looked up in its text so far, prompt included; the tokens that followed it
are the draft. One pass computes the logits after the last token and after each drafted one. From
each a token is drawn, with the random key that plain decoding has for it, and drawn tokens are kept
up to the first that differs from the draft. The next pass overwrites the cache's slots after that.

Such a draft x is a point distribution. Speculative sampling (Leviathan et al. 2023, section 2.3;
Chen et al. 2023, algorithm 2) accepts it with probability p(x), else samples from p without x,
renormalized. Drawing from p does both. With the same keys the text even equals plain decoding's, up
to rounding, which depends on the number of tokens in a pass.

Axes as in `decoding.py`, but S tokens of a pass (a row's last one and its draft), P tokens of a
draft, G tokens of an n-gram."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.decoding import Decoder, DecodingState, Weights, seen_tokens
from rungs.model.sampling import Sampling, next_tokens

SHORTEST, LONGEST = 2, 3
"""Lengths of the n-grams that are looked up."""


def decode(
    decoder: Decoder,
    weights: Weights,
    state: DecodingState,
    limit: Array,
    last: Array,
    *,
    sampling: Sampling,
    draft_length: int,
) -> DecodingState:
    """Add tokens until every row has one in slot `limit` or has stopped. A pass has `draft_length`
    + 1 tokens per row, or 1 if no row has a draft.

    Args:
        state: with `draft_length` free slots after `last`.
        limit: rows that reach it before others continue.
        last: no row gets a token after this slot; at least `limit`.
        draft_length: tokens of a draft, at least 1."""

    def add_tokens(state: DecodingState) -> DecodingState:
        last_B1 = jnp.take_along_axis(state.tokens_BT, state.ends_B[:, None] - 1, axis=1)
        draft_BP, is_found_B = find_drafts(state, draft_length)
        tokens_BS = jnp.concatenate([last_B1, draft_BP], axis=1)

        def verify(tokens_BS: Array) -> DecodingState:
            logits_BSV, caches = decoder.all_logits(weights, state, tokens_BS, state.ends_B - 1)
            drawn_BS = draw_tokens(sampling, state, logits_BSV)
            return keep_agreed(sampling, state._replace(caches=caches), tokens_BS, drawn_BS, last)

        has_draft = (is_found_B & ~state.stopped_B).any()
        return jax.lax.cond(has_draft, lambda: verify(tokens_BS), lambda: verify(last_B1))

    return jax.lax.while_loop(
        lambda state: (state.slot < limit) & ~state.stopped_B.all(), add_tokens, state
    )


def find_drafts(state: DecodingState, length: int) -> tuple[Array, Array]:
    """Return draft_BP, the tokens after the latest of the longest matches of each row's last
    n-gram, and is_found_B, whether there is one; other drafts are arbitrary tokens."""
    find = functools.partial(_find_draft, length=length)
    draft_BP, is_found_B = jax.vmap(find)(state.tokens_BT, state.padding_B, state.ends_B)
    return draft_BP, is_found_B


def _find_draft(text_T: Array, start: Array, end: Array, length: int) -> tuple[Array, Array]:
    """Return draft_P and whether it was found, for the text between two slots. A draft that reaches
    the text's end continues periodically with the tokens between match and end."""
    slot_T, back_G = jnp.arange(len(text_T)), 1 + jnp.arange(LONGEST)
    before_TG = slot_T[:, None] - back_G
    is_equal_TG = (text_T[before_TG] == text_T[end - back_G]) & (before_TG >= start)
    matched_T = jnp.cumprod(is_equal_TG, axis=1).sum(axis=1)
    rank_T = jnp.where(slot_T < end, matched_T * len(text_T) + slot_T, -1)
    place = jnp.argmax(rank_T)
    return text_T[place + jnp.arange(length) % (end - place)], matched_T[place] >= SHORTEST


def draw_tokens(sampling: Sampling, state: DecodingState, logits_BSV: Array) -> Array:
    """Return drawn_BS: after each token, the one that plain decoding would add. Drafted tokens are
    from the row's text, so they don't change the set of seen tokens."""
    _, length, vocab_size = logits_BSV.shape
    first_number_B = state.ends_B - 1 - state.sampling_offset
    numbers_BS = first_number_B[:, None] + jnp.arange(length)
    keys_BS = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(state.keys_B, numbers_BS)
    draw = jax.vmap(functools.partial(next_tokens, sampling), in_axes=(1, None, 1), out_axes=1)
    drawn_BS: Array = draw(logits_BSV, seen_tokens(state, vocab_size), keys_BS)
    return drawn_BS


def keep_agreed(
    sampling: Sampling, state: DecodingState, tokens_BS: Array, drawn_BS: Array, last: Array
) -> DecodingState:
    """Return the state with drawn tokens added up to the first that differs from the draft, stops
    the text, or is in slot `last`; none in stopped rows."""
    slots_BS = state.ends_B[:, None] + jnp.arange(tokens_BS.shape[1])
    is_stop_BS = jnp.isin(drawn_BS, jnp.asarray(sampling.stop_tokens, jnp.int32))
    goes_on_BS = (drawn_BS == jnp.roll(tokens_BS, -1, axis=1)) & ~is_stop_BS
    follows_BS = jnp.cumprod(jnp.roll(goes_on_BS, 1, axis=1).at[:, 0].set(True), axis=1) > 0
    is_kept_BS = follows_BS & (slots_BS <= last) & ~state.stopped_B[:, None]
    ends_B = state.ends_B + is_kept_BS.sum(axis=1)
    stopped_B = state.stopped_B | (is_kept_BS & is_stop_BS).any(axis=1)
    row_B1 = jnp.arange(len(tokens_BS))[:, None]
    return state._replace(
        tokens_BT=state.tokens_BT.at[row_B1, slots_BS].set(jnp.where(is_kept_BS, drawn_BS, 0)),
        slot=jnp.where(stopped_B, last, ends_B - 1).min(),
        ends_B=ends_B,
        stopped_B=stopped_B,
    )
