"""`GPT`, a decoder-only transformer: token and position embedding, blocks, final norm, output head.

Arrays are named with their axes:
    B batch, S sequence, T attended positions, D emb_dim, N query heads, K key/value heads,
    H head_dim, F ffn_dim, E experts, V vocabulary, L layers, M tokens of all sequences (B · S)."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rungs.config.model_config import ModelConfig
from rungs.model.attention import ValueEmbedding, apply_soft_cap
from rungs.model.blocks import Compute, Observe, keep_nothing, keep_output, make_blocks, run_blocks
from rungs.model.feed_forward import Routing
from rungs.model.kernels import cross_entropy, stored_matrix
from rungs.model.kernels.matmul import matmul
from rungs.model.layers import (
    NO_DROPOUT,
    Dropout,
    Embedding,
    Linear,
    apply_norm,
    initializer,
    is_split,
    make_norm,
    make_vector,
)
from rungs.model.positions import make_position_embedding, over_batch, own_positions
from rungs.model.prediction import PredictionModule
from rungs.parallel import collectives, sharding

GATE_CHANNELS = 12
"""Channels of attention's input for the gate of a value embedding, as in nanochat."""
VALUE_KEY = 0x7A
"""Folded into a model's key for its value embeddings."""


class Hidden(NamedTuple):
    """What the blocks make of tokens."""

    embedded_BSD: Array
    """Input of the first block."""
    x_BSD: Array
    """Output of the last block, before the final norm."""
    kept: Any
    """What was kept of each layer, stacked along a leading axis L; None without layers."""
    routing: Routing | None
    """Routing of all layers, with a leading axis L; None without experts."""


class Forward(NamedTuple):
    """Outputs of a forward pass."""

    logits_BSV: Array
    """float32"""
    routing: Routing | None
    """As in `Hidden`."""
    hidden_states: list[Array] | None
    """x_BSD after the embedding and each block, the last after the final norm, if requested."""


class WeightedLoss(NamedTuple):
    """Results of `GPT.weighted_loss`, float32, in nats."""

    total: Array
    log_probs_BS: Array
    """Log-probability of each target, without a gradient; 0 where it is ignored."""
    entropies_BS: Array
    """Entropy of the distribution at each target, without a gradient; 0 where it is ignored."""
    routing: Routing | None
    """As in `Hidden`."""


class GPT(nnx.Module):
    """A decoder-only transformer. With `n_layers` 0 the embedding goes straight into the head. The
    blocks are one module whose parameters are stacked along a leading axis L.

    Args:
        config: the architecture.
        key: a JAX random key; config and key alone determine the initial weights."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        self.config = config
        token_key, position_key, block_key, head_key = jax.random.split(key, 4)
        width = {"emb": config.emb_dim}
        vocabulary = {"vocab": config.vocab_size}
        init = functools.partial(initializer, config)
        self.token_embedding = Embedding(vocabulary, width, init(), token_key)
        self.position_embedding = make_position_embedding(config, position_key)
        self.embedding_norm = make_norm(config, width) if config.embedding_norm else None
        self.blocks = make_blocks(config, block_key) if config.n_layers else None
        self.value_embedding, self.value_gates = _make_value_embedding(config, key)
        self.final_norm = make_norm(config, width) if config.norm_placement != "after" else None
        self.head = (
            None
            if config.tied_embeddings
            else Linear(width, vocabulary, init(), head_key, bias=False)
        )
        self.prediction = PredictionModule(config, key) if config.prediction_module else None

    def __call__(
        self,
        tokens_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
    ) -> Array:
        """Return logits_BSV, float32; arguments as for `hidden`."""
        return self.unembed(self.hidden(tokens_BS, dropout, compute).x_BSD)

    def hidden(
        self,
        tokens_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        starts_BS: Array | None = None,
        observe: Observe = keep_nothing,
        embedded_BSD: Array | None = None,
    ) -> Hidden:
        """Return what the blocks make of tokens.

        Args:
            tokens_BS: token ids below `vocab_size`; S at most `context_length`. Others raise
                ValueError; within jit, ids are not checked.
            dropout: applied after the embedding and inside the blocks.
            compute: dtype, rematerialization etc.
            starts_BS: for separate documents, the position in the sequence where each token's
                document starts: tokens attend to their own document only, and positions count from
                its start. None if each sequence is one document.
            observe: says what to keep of each layer.
            embedded_BSD: replaces the embedding of the tokens, whose ids are not checked then."""
        if embedded_BSD is None:
            check_tokens(self.config, tokens_BS)
            positions = own_positions(tokens_BS.shape[-1], starts_BS)
            embedded_BSD = self.embed(tokens_BS, positions).astype(compute.dtype)
            embedded_BSD = dropout.fold(0).of_tokens(embedded_BSD)
        values = self.embed_values(tokens_BS, compute.dtype)
        x_BSD, kept, routing = run_blocks(
            self.blocks, self.config, embedded_BSD, dropout, compute, observe, starts_BS, values
        )
        return Hidden(embedded_BSD, x_BSD, kept, routing)

    def forward(
        self,
        tokens_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        keep_hidden_states: bool = False,
        starts_BS: Array | None = None,
    ) -> Forward:
        """Return logits, routing and, on request, hidden states, which take memory; other arguments
        as for `hidden`."""
        if not keep_hidden_states:
            found = self.hidden(tokens_BS, dropout, compute, starts_BS)
            return Forward(self.unembed(found.x_BSD), found.routing, None)
        found = self.hidden(tokens_BS, dropout, compute, starts_BS, keep_output)
        states = [found.embedded_BSD, *([] if found.kept is None else found.kept)]
        states[-1] = apply_norm(self.final_norm, found.x_BSD)
        return Forward(self.unembed(found.x_BSD), found.routing, states)

    def summed_loss(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        starts_BS: Array | None = None,
        weights_BS: Array | None = None,
    ) -> tuple[Array, Routing | None]:
        """Return the cross-entropy in nats summed over non-negative targets, and the routing of all
        layers. The full logits are never materialized. `weights_BS`: factors on the losses."""
        found = self.hidden(tokens_BS, dropout, compute, starts_BS)
        return self.head_loss(found.x_BSD, targets_BS, compute, weights_BS), found.routing

    def head_loss(
        self,
        x_BSD: Array,
        targets_BS: Array,
        compute: Compute,
        weights_BS: Array | None = None,
        module: PredictionModule | None = None,
    ) -> Array:
        """Return the loss of `summed_loss` from the output of the blocks or of the module."""
        head = self._head(dtype=compute.logits_dtype)
        operands = *self._head_operands(x_BSD, module), targets_BS.reshape(-1)
        if weights_BS is None:
            return cross_entropy.summed_loss(head, *operands)
        extras = _by_token((weights_BS,))
        return cross_entropy.weighted_loss(head, lambda _, weights: weights, *operands, extras)[0]

    def weighted_loss(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        weight_of: cross_entropy.WeightOf,
        extras: tuple[Array, ...] = (),
        temperature: float = 1.0,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        of_sequences: Callable[[Array], Array] | None = None,
    ) -> WeightedLoss:
        """Return the weighted cross-entropy summed over non-negative targets, without dropout. The
        full logits are never materialized.

        Args:
            weight_of: pure function from the log-probabilities of some targets, and their part of
                each of `extras`, to their weights, through which no gradient flows.
            extras: arrays with leading axes B and S.
            temperature: divisor of the logits, above 0; not traced.
            of_sequences: from log_probs_BS, as in the result, to one more of `extras`; they then go
                through the head twice."""
        found = self.hidden(tokens_BS, compute=compute)
        head, operands = self._head(temperature), self._head_operands(found.x_BSD)
        targets_M = targets_BS.reshape(-1)
        if of_sequences is not None:
            fixed = jax.lax.stop_gradient(operands)
            log_probs_M = cross_entropy.target_statistics(head, *fixed, targets_M).log_probs_M
            extras += (of_sequences(log_probs_M.reshape(targets_BS.shape)),)
        total, statistics = cross_entropy.weighted_loss(
            head, weight_of, *operands, targets_M, _by_token(extras)
        )
        log_probs_BS, entropies_BS = (array.reshape(targets_BS.shape) for array in statistics)
        return WeightedLoss(total, log_probs_BS, entropies_BS, found.routing)

    def map_logits(
        self,
        function: Callable[..., Array],
        tokens_BS: Array,
        targets_BS: Array,
        extras: tuple[Array, ...] = (),
        dropout: Dropout = NO_DROPOUT,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        starts_BS: Array | None = None,
    ) -> tuple[Array, Routing | None]:
        """Return values_BS, a function of each token's logits, with gradients, and the routing of
        all layers. The full logits are never materialized.

        Args:
            function: pure, from logits_MV (this device's part of a split vocabulary), targets_M and
                the extras with leading axis M to values_M.
            extras: arrays with leading axes B and S."""
        found = self.hidden(tokens_BS, dropout, compute, starts_BS)
        head, operands = self._head(dtype=compute.logits_dtype), self._head_operands(found.x_BSD)
        values_M = cross_entropy.map_logits(
            function, head, *operands, targets_BS.reshape(-1), _by_token(extras)
        )
        return values_M.reshape(targets_BS.shape), found.routing

    def losses(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        starts_BS: Array | None = None,
    ) -> Array:
        """Return losses_BS, the cross-entropy at each target in nats, 0 where it is negative. For
        inspection: there is no gradient."""
        return -self.log_probs(tokens_BS, targets_BS, compute=compute, starts_BS=starts_BS)

    def log_probs(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        temperature: float = 1.0,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
        starts_BS: Array | None = None,
    ) -> Array:
        """Return log_probs_BS of the targets as in `weighted_loss`, without a gradient."""
        operands = self._head_operands(self.hidden(tokens_BS, NO_DROPOUT, compute, starts_BS).x_BSD)
        head, targets_M = self._head(temperature), targets_BS.reshape(-1)
        statistics = cross_entropy.target_statistics(head, *operands, targets_M)
        return statistics.log_probs_M.reshape(targets_BS.shape)

    def scores(
        self,
        tokens_BS: Array,
        places_BT: Array,
        targets_BT: Array,
        compute: Compute = Compute(),  # noqa: B008 — a tuple
    ) -> tuple[Array, Array]:
        """Return log_probs_BT of some targets, and is_largest_BT, whether no token is more likely;
        0 and True where a target is negative. `places_BT` are the slots before the targets."""
        x_MD, matrix = self._head_operands(self.hidden(tokens_BS, compute=compute).x_BSD)
        x_BSD = x_MD.reshape(*tokens_BS.shape, -1)
        x_BTD = jnp.take_along_axis(x_BSD, places_BT[..., None], axis=1)
        x_MD, targets_M = x_BTD.reshape(-1, x_BTD.shape[-1]), targets_BT.reshape(-1)
        scores = cross_entropy.target_scores(self._head(), x_MD, matrix, targets_M)
        log_probs_BT, is_largest_BT = (array.reshape(targets_BT.shape) for array in scores)
        return log_probs_BT, is_largest_BT

    @jax.named_scope("embedding")
    def embed(self, tokens_BS: Array, positions_BS: Array) -> Array:
        """Return token plus position embeddings, normalized if `embedding_norm`: x_BSD, float32.
        `positions_BS` has each token's position, with or without B."""
        x_BSD = self.token_embedding(tokens_BS)
        if self.config.embedding_scale == "sqrt_emb_dim":
            x_BSD = x_BSD * math.sqrt(self.config.emb_dim)
        if self.position_embedding is not None:
            vectors = self.position_embedding(positions_BS)
            x_BSD, vectors = collectives.to_common_varying(x_BSD, vectors)
            x_BSD += vectors if vectors.ndim == x_BSD.ndim else over_batch(vectors, len(x_BSD))
        return apply_norm(self.embedding_norm, x_BSD)

    def embed_values(self, tokens_BS: Array, dtype: jnp.dtype) -> ValueEmbedding | None:
        """Return the stacked value embeddings of all layers that have one, None without any."""
        if self.value_embedding is None or self.value_gates is None:
            return None
        gate_LGK = self.value_gates[...]
        rows_BSC = self.value_embedding(tokens_BS).astype(dtype)
        shape = len(gate_LGK), -1, self.config.head_width
        return ValueEmbedding(
            jnp.moveaxis(rows_BSC.reshape(*tokens_BS.shape, *shape), 2, 0), gate_LGK
        )

    def unembed(self, x_BSD: Array) -> Array:
        """Return logits_BSV of the blocks' output, float32. With a vocabulary split over devices,
        these are this device's part, with −inf for padding rows."""
        logits_MV = self._head()(*self._head_operands(x_BSD))
        logits_BSV = logits_MV.reshape(*x_BSD.shape[:-1], -1)
        return logits_BSV if is_split("vocab") else logits_BSV[..., : self.config.vocab_size]

    def _head(self, temperature: float = 1.0, dtype: DTypeLike = jnp.float32) -> cross_entropy.Head:
        """Return `head_logits` of x_MD and the head's matrix."""
        return functools.partial(head_logits, self.config, temperature, dtype=dtype)

    def _head_operands(self, x_BSD: Array, of: PredictionModule | None = None) -> tuple[Array, Any]:
        """Return the normalized output of the blocks or the prediction module, x_MD, and the head's
        matrix_DV: an array or, for generation, a `StoredMatrix`."""
        x_BSD = apply_norm((of or self).final_norm, x_BSD)
        x_BSD = collectives.to_varying(x_BSD, sharding.TENSOR)
        if self.head is None:
            matrix_DV = self.token_embedding.transposed(x_BSD.dtype)
        else:
            matrix_DV = self.head.kernel.get_value()
        return x_BSD.reshape(-1, x_BSD.shape[-1]), matrix_DV


def _by_token(extras: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return arrays with axes B and S merged to M."""
    return tuple(extra.reshape(-1, *extra.shape[2:]) for extra in extras)


def _make_value_embedding(
    config: ModelConfig, key: Array
) -> tuple[Embedding | None, nnx.Param | None]:
    """Return the table of all value embeddings, concatenated in one row per token, and the gates of
    their layers, which start at 1."""
    if not (layers := len(config.value_layers)):
        return None, None
    rows, width = {"vocab": config.vocab_size}, {"value": config.value_embedding_width}
    table = Embedding(rows, width, initializer(config), jax.random.fold_in(key, VALUE_KEY))
    heads = config.n_kv_heads or config.n_heads or 1
    channels = min(GATE_CHANNELS, config.emb_dim)
    return table, make_vector({"layers": layers, "gate": channels, "kv_heads": heads}, 0.0)


def check_tokens(config: ModelConfig, tokens_BS: Any) -> None:
    """Raise ValueError unless these sequences are no longer than the model's context and have only
    its token ids, which are not checked within jit."""
    if tokens_BS.shape[1] > config.context_length:
        raise ValueError(
            f"sequences have {tokens_BS.shape[1]} tokens, but the model's context_length is"
            f" {config.context_length}"
        )
    is_here = isinstance(tokens_BS, np.ndarray) or (
        not isinstance(tokens_BS, jax.core.Tracer) and tokens_BS.is_fully_addressable
    )
    if is_here and tokens_BS.size:
        ids = np.asarray(tokens_BS)  # jnp would make it part of the trace
        smallest, largest = ids.min(), ids.max()
        if smallest < 0 or largest >= config.vocab_size:
            raise ValueError(
                f"tokens have ids from {smallest} to {largest}, but the model's vocab_size is"
                f" {config.vocab_size}"
            )


def head_logits(
    config: ModelConfig,
    temperature: float,
    x_MD: Array,
    matrix_DV: Array | stored_matrix.StoredMatrix,
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """Return logits_MV, float32, divided by the temperature, −inf for padding rows of the
    vocabulary; only this device's part of a split vocabulary. The matmul's output has `dtype`."""
    logits_MV = matmul(x_MD, matrix_DV, dtype).astype(jnp.float32)
    if config.mup:
        logits_MV = logits_MV / config.width_multiplier
    logits_MV = apply_soft_cap(logits_MV, config.final_soft_cap) / temperature
    rows = logits_MV.shape[-1]
    if rows * collectives.axis_size(sharding.TENSOR) == config.vocab_size:
        return logits_MV
    token_V = collectives.vocabulary_offset(rows) + jnp.arange(rows)
    return jnp.where(token_V < config.vocab_size, logits_MV, -jnp.inf)
