"""One decoder, `GPT`, that reads top to bottom as a transformer; its architecture is data.

Arrays are named with their axes:
    B batch, S sequence, T attended positions, D emb_dim, N query heads, K key/value heads,
    H head_dim, F ffn_dim, E experts, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import Remat
from rungs.model.attention import Attention, Cache, View, soft_capped, views
from rungs.model.feed_forward import Routing, make_feed_forward
from rungs.model.kernels import cross_entropy, matmul
from rungs.model.layers import (
    NO_DROPOUT,
    Dropout,
    Embedding,
    Linear,
    Norm,
    initializer,
    is_split,
    make_norm,
    normed,
)
from rungs.model.remat import checkpoint_layer
from rungs.parallel import collectives
from rungs.parallel.fsdp import no_gather
from rungs.parallel.names import TENSOR


class Forward(NamedTuple):
    """What a forward pass can tell."""

    logits_BSV: Array
    """float32"""
    routing: Routing | None
    """Of each layer, a leading axis L; None without experts."""
    hidden_states: list[Array] | None
    """x_BSD of the embedding, then of each block, that of the last one after the final norm; None
    where they were not asked for."""


class Compute(NamedTuple):
    """How a forward pass is computed, which does not change what it means."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    """Type of activations and products."""
    remat: Remat = "dots"
    """What of a layer the backward pass computes again; see `TrainConfig.remat`."""
    unroll: int = 1
    """Periods of the layers' pattern compiled one after the other in each turn of the scan."""
    whole: Callable[[nnx.State], nnx.State] = no_gather
    """Makes whole the weights of a layer of which each device keeps a part; the backward pass does
    so again."""


class GPT(nnx.Module):
    """A decoder-only transformer: embedding, blocks, output head.

    With `n_layers` 0 the embedding goes straight into the head. The blocks are one module whose
    parameters are stacked along a leading axis L.

    Args:
        config: the architecture.
        key: a JAX random key; the initial weights are a function of config and key alone.
    """

    def __init__(self, config: ModelConfig, key: Array) -> None:
        self.config = config
        token_key, position_key, block_key, head_key = jax.random.split(key, 4)
        width = {"emb": config.emb_dim}
        vocabulary = {"vocab": config.vocab_size}
        init = functools.partial(initializer, config)
        self.token_embedding = Embedding(vocabulary, width, init(), token_key)
        self.position_embedding = (
            Embedding({"position": config.context_length}, width, init(), position_key)
            if config.positions == "learned"
            else None
        )
        self.blocks = stacked_blocks(config, block_key) if config.n_layers else None
        self.final_norm = make_norm(config, width) if config.norm_placement != "after" else None
        self.head = (
            None
            if config.tied_embeddings
            else Linear(width, vocabulary, init(), head_key, bias=False)
        )

    def __call__(
        self,
        tokens_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
    ) -> Array:
        """Logits of the token at each position's target: logits_BSV, float32; as `forward`."""
        return self.forward(tokens_BS, dropout, compute).logits_BSV

    def forward(
        self,
        tokens_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        keep_hidden_states: bool = False,
    ) -> Forward:
        """All of a forward pass.

        Args:
            tokens_BS: token ids, integers below `vocab_size`; S at most `context_length`.
            dropout: applied after the embedding and inside the blocks.
            compute: how.
            keep_hidden_states: whether to return them; they take memory.
        """
        x_BSD = self._start(tokens_BS, dropout, compute)
        return self.decode(x_BSD, dropout, compute, keep_hidden_states)

    def summed_loss(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
    ) -> tuple[Array, Routing | None]:
        """Cross-entropy summed over the targets that count (those not negative), in nats; and the
        routing of `forward`. There are never all logits at once."""
        x_MD, routing = self._before_head(tokens_BS, dropout, compute)
        head = functools.partial(logits_of, self.config)
        targets_M = targets_BS.reshape(-1)
        return cross_entropy.summed_loss(head, x_MD, self._output_matrix(), targets_M), routing

    def losses(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
    ) -> Array:
        """losses_BS of each target, 0 where it does not count; to look at, without a gradient."""
        x_MD, _ = self._before_head(tokens_BS, NO_DROPOUT, compute)
        head = functools.partial(logits_of, self.config)
        targets_M = targets_BS.reshape(-1)
        losses_M = cross_entropy.losses(head, x_MD, self._output_matrix(), targets_M)
        return losses_M.reshape(targets_BS.shape)

    def _start(self, tokens_BS: Array, dropout: Dropout, compute: Compute) -> Array:
        """x_BSD as the blocks see it."""
        x_BSD = self.embed(tokens_BS, jnp.arange(tokens_BS.shape[-1])).astype(compute.dtype)
        return dropout.fold(0)(x_BSD)

    def _before_head(
        self, tokens_BS: Array, dropout: Dropout, compute: Compute
    ) -> tuple[Array, Routing | None]:
        """x_MD as the head sees it, M for the tokens of all sequences; and the routing."""
        x_BSD, routing = self._start(tokens_BS, dropout, compute), None
        if self.blocks is not None:
            x_BSD, _, routing = through_blocks(
                self.blocks, self.config, x_BSD, dropout, compute, keep_hidden_states=False
            )
        return self._as_head_sees(x_BSD), routing

    def _as_head_sees(self, x_BSD: Array) -> Array:
        """The blocks' output through the last norm: x_MD."""
        x_BSD = collectives.to_varying(normed(self.final_norm, x_BSD), TENSOR)
        return x_BSD.reshape(-1, x_BSD.shape[-1])

    def decode(
        self,
        x_BSD: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        keep_hidden_states: bool = False,
    ) -> Forward:
        """As `forward`, from embedded tokens."""
        hidden_states, routing = [x_BSD], None
        if self.blocks is not None:
            x_BSD, inner, routing = through_blocks(
                self.blocks, self.config, x_BSD, dropout, compute, keep_hidden_states
            )
            hidden_states += inner or []
        hidden_states[-1] = normed(self.final_norm, x_BSD)
        return Forward(self.unembed(x_BSD), routing, hidden_states if keep_hidden_states else None)

    def embed(self, tokens_BS: Array, positions_BS: Array) -> Array:
        """Token embeddings with their positions added: x_BSD, float32.

        Args:
            tokens_BS: token ids.
            positions_BS: of each token, also without B.
        """
        x_BSD = self.token_embedding(tokens_BS)
        if self.config.embedding_scale == "sqrt_emb_dim":
            x_BSD = x_BSD * math.sqrt(self.config.emb_dim)
        if self.position_embedding is not None:
            return x_BSD + self.position_embedding(positions_BS)
        if self.config.positions == "sinusoidal":
            return x_BSD + sinusoids(positions_BS, self.config.emb_dim)
        return x_BSD

    def unembed(self, x_BSD: Array) -> Array:
        """Logits of the blocks' output: logits_BSV, float32; where devices share the vocabulary,
        those of this device's part, −inf for rows that stand for no token."""
        x_MD = self._as_head_sees(x_BSD)
        logits_MV = logits_of(self.config, x_MD, self._output_matrix())
        logits_BSV = logits_MV.reshape(*x_BSD.shape[:-1], -1)
        return logits_BSV if is_split("vocab") else logits_BSV[..., : self.config.vocab_size]

    def _output_matrix(self) -> Array:
        """matrix_DV of the head, or of the embedding where that is the head, too."""
        if self.head is not None:
            return self.head.kernel[...]
        return self.token_embedding.embedding[...].T


class Block(nnx.Module):
    """Attention, then feed-forward, each with its norms, dropout and residual sum."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        attention_key, feed_forward_key = jax.random.split(key)
        self.residual, self.norm_placement = config.residual, config.norm_placement
        width = {"emb": config.emb_dim}
        sandwich = config.norm_placement == "around"
        self.attention_norm = make_norm(config, width)
        self.attention = Attention(config, attention_key)
        self.attention_output_norm = make_norm(config, width) if sandwich else None
        self.feed_forward = make_feed_forward(config, feed_forward_key)
        has_feed_forward = self.feed_forward is not None
        self.feed_forward_norm = make_norm(config, width) if has_feed_forward else None
        self.feed_forward_output_norm = (
            make_norm(config, width) if has_feed_forward and sandwich else None
        )

    def __call__(
        self,
        x_BSD: Array,
        view: View,
        dropout: Dropout = NO_DROPOUT,
        cache: Cache | None = None,
    ) -> tuple[Array, Cache | None, Routing | None]:
        """Returns x_BSD, the cache with these tokens in it, and where the experts' tokens went."""
        attention_input = self._enter(x_BSD, self.attention_norm)
        y_BSD, cache = self.attention(attention_input, view, dropout.fold(0), cache)
        y_BSD = dropout.fold(1)(normed(self.attention_output_norm, y_BSD))
        x_BSD = self._leave(x_BSD, y_BSD, self.attention_norm)
        if self.feed_forward is None:
            return x_BSD, cache, None
        y_BSD, routing = self.feed_forward(self._enter(x_BSD, self.feed_forward_norm))
        y_BSD = dropout.fold(2)(normed(self.feed_forward_output_norm, y_BSD))
        return self._leave(x_BSD, y_BSD, self.feed_forward_norm), cache, routing

    def _enter(self, x_BSD: Array, norm: Norm | None) -> Array:
        """What a sub-layer sees of the residual stream."""
        return x_BSD if self.norm_placement == "after" else normed(norm, x_BSD)

    def _leave(self, x_BSD: Array, y_BSD: Array, norm: Norm | None) -> Array:
        """The residual stream after a sub-layer that gave y."""
        y_BSD = x_BSD + y_BSD if self.residual else y_BSD
        return normed(norm, y_BSD) if self.norm_placement == "after" else y_BSD


def logits_of(config: ModelConfig, x_MD: Array, matrix_DV: Array) -> Array:
    """logits_MV, float32, of what the head sees; −inf for rows that stand for no token. Where
    devices share the vocabulary, those of this device's part."""
    logits_MV = matmul.product(x_MD, matrix_DV)
    if config.mup:
        logits_MV = logits_MV / config.width_multiplier
    logits_MV = soft_capped(logits_MV, config.final_soft_cap)
    rows = logits_MV.shape[-1]
    if rows * collectives.axis_size(TENSOR) == config.vocab_size:
        return logits_MV
    token_V = collectives.vocabulary_offset(rows) + jnp.arange(rows)
    return jnp.where(token_V < config.vocab_size, logits_MV, -jnp.inf)


def stacked_blocks(config: ModelConfig, key: Array) -> Block:
    """All blocks as one module whose parameters have a leading axis L."""
    make = nnx.vmap(functools.partial(Block, config))
    return make(jax.random.split(key, config.n_layers))


def through_blocks(
    blocks: Block,
    config: ModelConfig,
    x_BSD: Array,
    dropout: Dropout,
    compute: Compute,
    keep_hidden_states: bool,
) -> tuple[Array, list[Array] | None, Routing | None]:
    """One block after the other: a scan over whole periods of the layers' pattern, each compiled
    once, then the layers that are left.

    Returns:
        x_BSD, each block's x_BSD where they are kept, and the routing of all layers.
    """
    graph, stacked = nnx.split(blocks)
    seen = views(config, x_BSD.shape[-2])
    kinds = config.repeated_kinds
    periods, rest = divmod(config.n_layers, len(kinds))

    def through_block(
        layer: nnx.State, x_BSD: Array, view: View, dropout: Dropout
    ) -> tuple[Array, Routing | None]:
        x_BSD, _, routing = nnx.merge(graph, compute.whole(layer))(x_BSD, view, dropout)
        return x_BSD, routing

    def through(carry: tuple[Array, Array], layers: nnx.State) -> tuple[tuple[Array, Array], Any]:
        x_BSD, number = carry
        outcomes = []
        for place, kind in enumerate(kinds[: first_axis(layers)]):
            layer = jax.tree.map(lambda array, at=place: array[at], layers)
            x_BSD, routing = apply(layer, x_BSD, seen[kind], dropout.fold(number + place))
            outcomes.append((x_BSD if keep_hidden_states else None, routing))
        return (x_BSD, number + len(outcomes)), jax.tree.map(lambda *a: jnp.stack(a), *outcomes)

    apply = checkpoint_layer(through_block, compute.remat, compute.whole is not no_gather)
    whole = periods * len(kinds)
    in_periods = jax.tree.map(
        lambda a: a[:whole].reshape(periods, len(kinds), *a.shape[1:]), stacked
    )
    start = x_BSD, jnp.asarray(1)
    carry, outcomes = jax.lax.scan(through, start, in_periods, unroll=compute.unroll)
    outcomes = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), outcomes)
    if rest:
        carry, last = through(carry, jax.tree.map(lambda a: a[whole:], stacked))
        outcomes = jax.tree.map(lambda *a: jnp.concatenate(a), outcomes, last)
    hidden_LBSD, routing = outcomes
    return carry[0], None if hidden_LBSD is None else list(hidden_LBSD), routing


def first_axis(tree: Any) -> int:
    """Length of the first axis that all arrays of a tree share."""
    length: int = jax.tree.leaves(tree)[0].shape[0]
    return length


def sinusoids(positions_BS: Array, width: int) -> Array:
    """Fixed position vectors x_BSD: sines in the first half of D, cosines in the second, of
    wavelengths from 2π to 10,000 · 2π (Vaswani et al. 2017, section 3.5)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = positions_BS[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
