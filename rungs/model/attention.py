"""Self-attention, its masks and its key/value cache. Axes as in `gpt.py`."""

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.common.errors import UserError
from rungs.config.base import AUTO
from rungs.config.model_config import LayerKind, ModelConfig
from rungs.config.optimization_config import (
    AttentionKernel,
    AttentionKernelOrAuto,
    OptimizationConfig,
)
from rungs.model.kernels import (
    blockwise_attention,
    cudnn_attention,
    mosaic_attention,
    splash_attention,
    triton_attention,
)
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.layers import (
    NO_DROPOUT,
    Axes,
    Dropout,
    Linear,
    apply_norm,
    initializer,
    make_norm,
    make_vector,
)
from rungs.model.positions import Rotary, own_positions, rotary_for
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives, target_device
from rungs.parallel.sharding import CONTEXT, TENSOR

KERNELS: dict[AttentionKernel, ModuleType] = {
    "cudnn": cudnn_attention,
    "splash": splash_attention,
    "triton": triton_attention,
    "mosaic": mosaic_attention,
    "blockwise": blockwise_attention,
}
_FASTEST: tuple[AttentionKernel, ...] = "cudnn", "splash", "triton", "blockwise"
"""What "auto" chooses from, the fastest first. The last one runs everywhere."""
_NEEDS: dict[AttentionKernel, str] = {
    "cudnn": "an NVIDIA GPU of compute capability 8.0 or more, 16 bits, heads of at most 128"
    " elements in multiples of 8, and no soft cap, separate documents or sinks",
    "splash": "a TPU, causal attention, and bfloat16 or float32",
    "triton": "an NVIDIA GPU of compute capability 8.0 or more, causal attention, and heads of at"
    " most 256 elements",
    "mosaic": mosaic_attention.NEEDS,
}
GATE_KEY = 0x6A
"""Folded into a layer's key for the gate of its output."""


class Cache(NamedTuple):
    """Keys and values of one layer, one slot per token, in the axis order that attention reads."""

    key_BKTH: Array
    value_BKTH: Array

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, slots: int, dtype: jnp.dtype) -> "Cache":
        """Return a layer's cache."""
        heads, *widths = config.cache_shape
        return cls(*(jnp.zeros((rows, heads, slots, width), dtype) for width in widths))

    @property
    def slot_axis(self) -> int | None:
        """The axis of slots, None if there is none."""
        return 2

    def update(self, key_BSKH: Array, value_BSKH: Array, first_slot: Array) -> "Cache":
        """Return the cache with the keys and values of S tokens written from `first_slot` on, which
        is one slot for all rows or one per row."""

        def write(old_BKTH: Array, new_BSKH: Array) -> Array:
            new_BKSH = new_BSKH.swapaxes(1, 2).astype(old_BKTH.dtype)
            insert = jax.lax.dynamic_update_slice_in_dim
            if first_slot.ndim:
                return jax.vmap(functools.partial(insert, axis=1))(old_BKTH, new_BKSH, first_slot)
            return insert(old_BKTH, new_BKSH, first_slot, axis=2)

        return Cache(write(self.key_BKTH, key_BSKH), write(self.value_BKTH, value_BSKH))

    def read(self) -> tuple[Array, Array]:
        """Return key_BTKH and value_BTKH of all slots."""
        return self.key_BKTH.swapaxes(1, 2), self.value_BKTH.swapaxes(1, 2)


class ValueEmbedding(NamedTuple):
    """Addition to attention's values in a layer: a vector per token and head, times a gate."""

    rows_BSKH: Array
    """For all heads."""
    gate_GK: Array
    """Gate weights from the input's first G channels to this device's heads."""

    def added_to(self, value_BSKH: Array, x_BSD: Array) -> Array:
        """Return the values of this device's heads plus their embeddings."""
        own, rows_BSKH = value_BSKH.shape[2], collectives.to_varying(self.rows_BSKH, TENSOR)
        if own < rows_BSKH.shape[2]:
            first = collectives.axis_index(TENSOR) * own
            rows_BSKH = jax.lax.dynamic_slice_in_dim(rows_BSKH, first, own, axis=2)
        x_BSG = x_BSD[..., : len(self.gate_GK)].astype(jnp.float32)
        gate_BSK = 2 * jax.nn.sigmoid(jnp.einsum("bsg,gk->bsk", x_BSG, self.gate_GK))
        return (value_BSKH + gate_BSK[..., None] * rows_BSKH).astype(value_BSKH.dtype)


class AttentionContext(NamedTuple):
    """Inputs of a layer besides the hidden states."""

    scoring: Scoring
    rotary: Rotary | None
    mask: Array | None = None
    """True where a query may attend to a key in the cache, broadcast to BNST. None: full sequences
    with the causal mask of `scoring`."""
    first_slot: Array | int = 0
    """Cache slot of the first token, for all rows or per row."""
    embedding_BSD: Array | None = None
    """Input of the first block, if the model has residual scalars."""
    value_embedding: ValueEmbedding | None = None
    """This layer's, if it has one."""
    padding_B: Array | None = None
    """Padding tokens at the start of each row of full sequences, if there are any; attention needs
    only its masks."""


class Attention(nnx.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2). Groups of query heads
    may share a key/value head (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        keys = jax.random.split(key, 4)
        width, head = {"emb": config.emb_dim}, {"head_dim": config.head_width}
        heads = {"heads": config.n_heads or 1} | head
        self.n_kv_heads = config.n_kv_heads or config.n_heads or 1
        kv_heads = {"kv_heads": self.n_kv_heads} | head
        init = functools.partial(initializer, config, mup_power=0.5)
        self.query = Linear(width, heads, init(), keys[0], config.qkv_bias)
        self.key = Linear(width, kv_heads, init(), keys[1], config.qkv_bias)
        self.value = Linear(width, kv_heads, init(), keys[2], config.qkv_bias)
        self._make_output(config, heads, keys[3])
        normed = (heads, kv_heads) if config.qk_norm_scope == "all_heads" else (head, head)
        self.query_norm = make_norm(config, normed[0]) if config.qk_norm else None
        self.key_norm = make_norm(config, normed[1]) if config.qk_norm else None

    def _make_output(self, config: ModelConfig, heads: Axes, key: Array) -> None:
        """Make the projection of all heads, their sinks and their gate."""
        width, each = {"emb": config.emb_dim}, {"heads": heads["heads"]}
        init = functools.partial(initializer, config, mup_power=0.5)
        gate, gate_key = config.attention_output_gate, jax.random.fold_in(key, GATE_KEY)
        gated = {"none": {}, "head": each, "element": heads}[gate]
        self.sink = make_vector(each, 0.0) if config.attention_sinks else None
        self.gate = Linear(width, gated, init(), gate_key, config.qkv_bias) if gated else None
        output_init = init(into_residual=True)
        self.output = Linear(heads, width, output_init, key, config.attention_output_bias)

    @jax.named_scope("attention_projections")
    def __call__(
        self,
        x_BSD: Array,
        context: AttentionContext,
        dropout: Dropout = NO_DROPOUT,
        cache: Cache | None = None,
    ) -> tuple[Array, Cache | None]:
        """Attend to the given tokens or, with a mask, to all tokens in the cache. Without dropout,
        causal attention uses the fastest kernel for this device. Return y_BSD, and the cache with
        the given tokens added."""
        query_BSNH, key_BTKH, value_BTKH = self.project(x_BSD, context)
        if cache is not None:
            cache = cache.update(key_BTKH, value_BTKH, jnp.asarray(context.first_slot))
            if context.mask is not None:
                key_BTKH, value_BTKH = cache.read()
        y_BSNH = attend(query_BSNH, key_BTKH, value_BTKH, self.with_sinks(context), dropout)
        return self.output(self._gated(y_BSNH, x_BSD)), cache

    def with_sinks(self, context: AttentionContext) -> AttentionContext:
        """Return the context with the sinks of the heads that this device attends with."""
        if self.sink is None:
            return context
        sink_N, parts = self.sink[...], collectives.axis_size(CONTEXT)
        own = len(sink_N) // parts
        sink_N = jax.lax.dynamic_slice_in_dim(sink_N, collectives.axis_index(CONTEXT) * own, own)
        return context._replace(scoring=dataclasses.replace(context.scoring, sink_N=sink_N))

    def _gated(self, y_BSNH: Array, x_BSD: Array) -> Array:
        """Return the heads' outputs times their gates, of one number per head or element."""
        if self.gate is None:
            return y_BSNH
        gate = self.gate(collectives.to_varying(x_BSD, TENSOR)).astype(jnp.float32)
        gate = gate if gate.ndim == y_BSNH.ndim else gate[..., None]
        return (y_BSNH * jax.nn.sigmoid(gate)).astype(y_BSNH.dtype)

    def project(self, x_BSD: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
        """Return query_BSNH, key_BTKH and value_BTKH of this device's heads, as attention compares
        them: normalized and rotated."""
        x_BSD = collectives.to_varying(x_BSD, TENSOR)
        query_BSNH = apply_norm(self.query_norm, self.query(x_BSD))
        key_BTKH = self._for_own_heads(apply_norm(self.key_norm, self.key(x_BSD)))
        value_BSKH = self.value(x_BSD)
        if context.value_embedding is not None:
            value_BSKH = context.value_embedding.added_to(value_BSKH, x_BSD)
        value_BTKH = self._for_own_heads(value_BSKH)
        if context.rotary is not None:
            query_BSNH, key_BTKH = context.rotary(query_BSNH), context.rotary(key_BTKH)
        return query_BSNH, key_BTKH, value_BTKH

    def _for_own_heads(self, key_BTKH: Array) -> Array:
        """Return the keys or values for this device's query heads. With fewer key/value heads than
        devices along the tensor axis, each device computes all and selects one."""
        parts = collectives.axis_size(TENSOR)
        if self.n_kv_heads % parts == 0:
            return key_BTKH
        own = collectives.axis_index(TENSOR) * self.n_kv_heads // parts
        return jax.lax.dynamic_slice_in_dim(key_BTKH, own, 1, axis=-2)


def attend(
    query_BSNH: Array,
    key_BTKH: Array,
    value_BTKH: Array,
    context: AttentionContext,
    dropout: Dropout = NO_DROPOUT,
) -> Array:
    """Return y_BSNH of this device's tokens, by the fastest kernel for causal attention without
    dropout, or plainly."""
    query, key, value = map(from_tokens_to_heads, (query_BSNH, key_BTKH, value_BTKH))
    length, heads = query.shape[1:3]
    first_head = collectives.axis_index(TENSOR, CONTEXT) * heads
    dropout = dropout.per_head(first_head + jnp.arange(heads))
    scoring, mask = context.scoring, context.mask
    with jax.named_scope("attention"):
        if mask is None and dropout.keys is None:
            kernel = causal_kernel(query, scoring)
            width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
            if missing and kernel is not blockwise_attention:  # others need equal widths
                value = jnp.pad(value, ((0, 0),) * 3 + ((0, missing),))
            y_BSNH = kernel.causal_attention(query, key, value, scoring)[..., :width]
        else:
            mask = scoring.mask(length) if mask is None else mask
            y_BSNH = plain_attention(query, key, value, mask, dropout, *scoring.of_scores)
    return from_heads_to_tokens(y_BSNH)


def from_tokens_to_heads(x_BSNH: Array) -> Array:
    """Return this device's heads of all tokens from all heads of its tokens: an all-to-all over the
    context axis (Jacobs et al. 2023, section 3.1). With fewer key/value heads than devices, several
    devices get the same head. Outside attention, devices along that axis have different tokens."""
    copies = max(collectives.axis_size(CONTEXT) // x_BSNH.shape[2], 1)
    repeated = x_BSNH if copies == 1 else jnp.repeat(x_BSNH, copies, axis=2)
    return collectives.all_to_all(repeated, CONTEXT, split=2, joined=1)


def from_heads_to_tokens(y_BSNH: Array) -> Array:
    """Return all heads of this device's tokens from its heads of all tokens."""
    return collectives.all_to_all(y_BSNH, CONTEXT, split=1, joined=2)


def causal_kernel(query_BSNH: Array, scoring: Scoring) -> ModuleType:
    """Return the module with the fastest `causal_attention` for these queries on the target device,
    or the one that `scoring` names; but in plans for another device `blockwise_attention`, which
    keeps as much for the backward pass. Raises UserError if the named one can't."""
    if not target_device.is_compiled():
        return blockwise_attention
    if scoring.kernel != AUTO:
        return _named_kernel(scoring.kernel, query_BSNH, scoring)
    return next(KERNELS[name] for name in _FASTEST if _can(name, query_BSNH, scoring))


def check_kernel(config: ModelConfig, train: OptimizationConfig, dtype: jnp.dtype) -> None:
    """Raise UserError if the target device or the model can't have a run's `attention_kernel`."""
    if train.attention_kernel == AUTO or not config.n_layers:
        return
    query = jax.ShapeDtypeStruct((1, 1, config.n_heads, config.query_width), dtype)
    scoring = _scoring(config, "global", kernel=train.attention_kernel)
    extra: Any = query
    is_separate = getattr(train, "documents", None) == "separate"
    scoring = dataclasses.replace(
        scoring,
        starts_BS=extra if is_separate else None,
        sink_N=extra if config.attention_sinks else None,
    )
    _named_kernel(train.attention_kernel, query, scoring)


def _named_kernel(
    name: AttentionKernel, query_BSNH: Array | jax.ShapeDtypeStruct, scoring: Scoring
) -> ModuleType:
    if _can(name, query_BSNH, scoring):
        return KERNELS[name]
    raise UserError(
        f'train.json: attention_kernel: "{name}" can\'t be used here: it needs {_NEEDS[name]};'
        " remove it"
    )


def _can(name: AttentionKernel, query_BSNH: Array | jax.ShapeDtypeStruct, scoring: Scoring) -> bool:
    """Return whether a kernel has what `scoring` asks for, and the target device runs it for these
    queries."""
    if name == "blockwise":
        return True
    lacks = {
        "cudnn": (scoring.soft_cap, scoring.starts_BS, scoring.sink_N),
        "mosaic": (scoring.sink_N,),
    }
    has_all = all(extra is None for extra in lacks.get(name, ()))
    is_supported: bool = KERNELS[name].supports(query_BSNH)
    return has_all and is_supported and (scoring.is_causal or name == "cudnn")


def plain_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Dropout = NO_DROPOUT,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_N: Array | None = None,
) -> Array:
    """Return softmax(query · keyᵀ · scale) · value (Vaswani et al. 2017, equation 1), in the dtype
    of query. The softmax is computed in float32.

    Args:
        query: query_BSNH, or query_SNH without a batch.
        key: key_BTKH, or without B; each key head serves N ÷ K consecutive query heads.
        value: value_BTKH, or without B; H may differ from that of queries and keys.
        mask: true where a query may attend to a key, broadcast to BNST.
        dropout: applied to the attention weights, with one random key per element of their leading
            axes.
        scale: None for 1 ÷ √H.
        soft_cap: bound on the absolute value of scores; None for no bound.
        sink_N: score of each head's sink; None for no sinks."""
    weights = attention_weights(query, key, mask, scale, soft_cap, sink_N)
    weights = save_for_backward(dropout(weights).astype(value.dtype))
    heads, kv_heads = query.shape[-2], key.shape[-2]
    weights = weights.reshape(*weights.shape[:-3], kv_heads, heads // kv_heads, *weights.shape[-2:])
    y = jnp.einsum("...kgst,...tkh->...skgh", weights, value, preferred_element_type=jnp.float32)
    return save_for_backward(y.reshape(*query.shape[:-1], -1).astype(query.dtype))


def attention_weights(
    query: Array,
    key: Array,
    mask: Array | None,
    scale: float | None,
    soft_cap: float | None,
    sink_N: Array | None = None,
) -> Array:
    """Return weights_BNST, float32, or without B; arguments as for `plain_attention`."""
    *_, heads, width = query.shape
    kv_heads = key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("...skgh,...tkh->...kgst", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(*scores.shape[:-4], heads, *scores.shape[-2:])
    scores = apply_soft_cap(scores * (width**-0.5 if scale is None else scale), soft_cap)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    if sink_N is None:
        return jax.nn.softmax(scores)
    sinks = jnp.broadcast_to(sink_N[:, None, None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]


def apply_soft_cap(x: Array, cap: float | None) -> Array:
    """Return cap · tanh(x ÷ cap), close to x if x is small (Riviere et al. 2024, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def causal_mask(length: int, window: int | None = None) -> Array:
    """Return mask_ST, true where position t is at most s, and less than `window` before it."""
    return Scoring(1.0, window).mask(length)


def _scoring(
    config: ModelConfig,
    kind: LayerKind,
    starts_BS: Array | None = None,
    kernel: AttentionKernelOrAuto = AUTO,
) -> Scoring:
    window = config.sliding_window if kind == "sliding" else None
    scale, is_causal = config.attention_scale, not config.bidirectional
    return Scoring(scale, window, config.attention_soft_cap, starts_BS, is_causal, kernel=kernel)


def sequence_contexts(
    config: ModelConfig,
    length: int,
    starts_BS: Array | None = None,
    kernel: AttentionKernelOrAuto = AUTO,
) -> dict[LayerKind, AttentionContext]:
    """Return the context of each layer kind for full sequences, of which this device has `length`
    tokens; `starts_BS` is as for `GPT.forward`, `kernel` as for `Scoring`."""
    positions = own_positions(length, starts_BS)
    starts_BT = None if starts_BS is None else collectives.all_gather(starts_BS, CONTEXT, joined=1)
    return {
        kind: AttentionContext(
            _scoring(config, kind, starts_BT, kernel), rotary_for(config, kind, positions)
        )
        for kind in dict.fromkeys(config.repeated_kinds)
    }


def cache_contexts(
    config: ModelConfig, first_slot: Array, length: int, slots: int, padding_B: Array
) -> dict[LayerKind, AttentionContext]:
    """Return the context of each layer kind for `length` tokens that are added to a cache.

    Args:
        first_slot: slot of the first token, for all rows or per row.
        slots: size of the cache.
        padding_B: padding slots at the start of each row; the next token has position 0."""
    query_BS = jnp.atleast_1d(first_slot)[:, None] + jnp.arange(length)
    key_T = jnp.arange(slots)
    positions_BS = jnp.maximum(query_BS - padding_B[:, None], 0)
    distance_B1ST = query_BS[:, None, :, None] - key_T
    not_padding_B11T = (key_T >= padding_B[:, None])[:, None, None]
    contexts: dict[LayerKind, AttentionContext] = {}
    for kind in dict.fromkeys(config.repeated_kinds):
        scoring, rotary = _scoring(config, kind), rotary_for(config, kind, positions_BS)
        mask = scoring.is_seen(distance_B1ST) & not_padding_B11T
        contexts[kind] = AttentionContext(scoring, rotary, mask, first_slot)
    return contexts
