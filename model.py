"""One decoder, `GPT`, that reads top to bottom as a transformer; its architecture is data.

Arrays are named with their axes:
    B batch, S sequence, T attended positions, D emb_dim, N attention heads, H head_dim,
    F feed-forward width, V vocabulary, L layers.

Each parameter is an `nnx.Param` declared with two pieces of metadata that the optimizer and the
mesh go by: `axes`, the names of its axes (the stacked layers' axis left out), and `inputs`, how
many of them a product sums over (0 for biases and norms).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from model_config import ModelConfig

Axes = dict[str, int]
Initializer = Callable[[Array, tuple[int, ...], int], Array]
"""From key, shape and the number of input axes to a parameter's first value."""


class Dropout(NamedTuple):
    """Dropout by explicit key, so that no mask depends on anything but step, microbatch, layer."""

    rate: float
    key: Array | None = None

    def fold(self, number: int | Array) -> "Dropout":
        """Another dropout, with masks of its own for each `number`."""
        return (
            self if self.key is None else Dropout(self.rate, jax.random.fold_in(self.key, number))
        )

    def __call__(self, x: Array) -> Array:
        """Zero each element with probability `rate`, scale the others by 1/(1 − rate)."""
        if self.key is None or not self.rate:
            return x
        kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


NO_DROPOUT = Dropout(0.0)


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
        self.final_norm = make_norm(config) if config.norm_placement == "before" else None
        self.head = Linear(width, vocabulary, init(), head_key, bias=False)

    def __call__(
        self,
        tokens_BS: Array,
        dropout: Dropout = NO_DROPOUT,
        compute_dtype: jnp.dtype = jnp.float32,
    ) -> Array:
        """Logits of the token at each position's target.

        Args:
            tokens_BS: token ids, integers below `vocab_size`; S at most `context_length`.
            dropout: applied after the embedding and inside the blocks.
            compute_dtype: type of activations and products.

        Returns:
            logits_BSV, float32.
        """
        embedded_BSD = self.embed(tokens_BS).astype(compute_dtype)
        return self.decode(dropout.fold(0)(embedded_BSD), dropout)

    def decode(self, x_BSD: Array, dropout: Dropout = NO_DROPOUT) -> Array:
        """From embedded tokens x_BSD to logits_BSV, float32."""
        if self.blocks is not None:
            x_BSD = through_blocks(self.blocks, x_BSD, dropout)
        return self.head(normed(self.final_norm, x_BSD)).astype(jnp.float32)

    def embed(self, tokens_BS: Array) -> Array:
        """Token embeddings with their positions added: x_BSD."""
        x_BSD = self.token_embedding(tokens_BS)
        length = tokens_BS.shape[-1]
        if self.position_embedding is not None:
            return x_BSD + self.position_embedding(jnp.arange(length))
        if self.config.positions == "sinusoidal":
            return x_BSD + sinusoids(length, self.config.emb_dim)
        return x_BSD


class Block(nnx.Module):
    """Attention, then feed-forward, each with its norm, dropout and residual sum."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        attention_key, feed_forward_key = jax.random.split(key)
        self.residual = config.residual
        self.norm_first = config.norm_placement == "before"
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, attention_key)
        if config.feed_forward == "none":
            self.feed_forward_norm = self.feed_forward = None
        else:
            self.feed_forward_norm = make_norm(config)
            self.feed_forward = FeedForward(config, feed_forward_key)

    def __call__(self, x_BSD: Array, dropout: Dropout = NO_DROPOUT) -> Array:
        attend = functools.partial(self.attention, dropout=dropout.fold(0))
        x_BSD = self._sublayer(x_BSD, attend, self.attention_norm, dropout.fold(1))
        if self.feed_forward is None:
            return x_BSD
        return self._sublayer(x_BSD, self.feed_forward, self.feed_forward_norm, dropout.fold(2))

    def _sublayer(
        self,
        x_BSD: Array,
        part: Callable[[Array], Array],
        norm: "LayerNorm | None",
        dropout: Dropout,
    ) -> Array:
        part_input = normed(norm, x_BSD) if self.norm_first else x_BSD
        y_BSD = dropout(part(part_input))
        y_BSD = x_BSD + y_BSD if self.residual else y_BSD
        return y_BSD if self.norm_first else normed(norm, y_BSD)


def stacked_blocks(config: ModelConfig, key: Array) -> Block:
    """All blocks as one module whose parameters have a leading axis L."""
    make = nnx.vmap(functools.partial(Block, config))
    return make(jax.random.split(key, config.n_layers))


def through_blocks(blocks: Block, x_BSD: Array, dropout: Dropout) -> Array:
    """One block after the other: a scan over the stacked blocks, so compiled once."""
    graph, stacked = nnx.split(blocks)

    def through(carry: tuple[Array, Array], layer: nnx.State) -> tuple[tuple[Array, Array], None]:
        x_BSD, number = carry
        return (nnx.merge(graph, layer)(x_BSD, dropout.fold(number)), number + 1), None

    (x_BSD, _), _ = jax.lax.scan(through, (x_BSD, jnp.asarray(1)), stacked)
    return x_BSD


class Attention(nnx.Module):
    """Multi-head causal self-attention (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        keys = jax.random.split(key, 4)
        width = {"emb": config.emb_dim}
        heads = {"heads": config.n_heads or 1, "head_dim": config.head_dim}
        init = functools.partial(initializer, config)
        self.query = Linear(width, heads, init(), keys[0], config.qkv_bias)
        self.key = Linear(width, heads, init(), keys[1], config.qkv_bias)
        self.value = Linear(width, heads, init(), keys[2], config.qkv_bias)
        self.output = Linear(heads, width, init(into_residual=True), keys[3])

    def __call__(self, x_BSD: Array, dropout: Dropout = NO_DROPOUT) -> Array:
        mask_ST = causal_mask(x_BSD.shape[-2])
        y_BSNH = attention(self.query(x_BSD), self.key(x_BSD), self.value(x_BSD), mask_ST, dropout)
        return self.output(y_BSNH)


class FeedForward(nnx.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        up_key, down_key = jax.random.split(key)
        width, hidden = {"emb": config.emb_dim}, {"ffn": config.hidden_dim}
        init = functools.partial(initializer, config)
        self.up = Linear(width, hidden, init(), up_key)
        self.down = Linear(hidden, width, init(into_residual=True), down_key)
        self.tanh_form = config.feed_forward == "gelu_tanh"

    def __call__(self, x_BSD: Array) -> Array:
        return self.down(jax.nn.gelu(self.up(x_BSD), approximate=self.tanh_form))


class Linear(nnx.Module):
    """y = x · kernel + bias, over named axes: the last axes of x are `inputs`, those of y
    `outputs`. Products are summed in float32 and rounded to the type of x."""

    def __init__(
        self, inputs: Axes, outputs: Axes, init: Initializer, key: Array, bias: bool = True
    ) -> None:
        self.kernel = matrix(inputs, outputs, init, key)
        self.bias = vector(outputs, 0.0) if bias else None

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...].astype(x.dtype)
        summed = self.kernel.inputs
        y = jax.lax.dot_general(
            x,
            kernel,
            ((tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed))), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


class Embedding(nnx.Module):
    """A table with one row of `width` for each index."""

    def __init__(self, rows: Axes, width: Axes, init: Initializer, key: Array) -> None:
        self.embedding = matrix(rows, width, init, key)

    def __call__(self, indices: Array) -> Array:
        return self.embedding[...][indices]


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + ε) · scale + bias over the last axis (Ba et al. 2016), computed
    in float32."""

    def __init__(self, width: Axes, epsilon: float) -> None:
        self.scale = vector(width, 1.0)
        self.bias = vector(width, 0.0)
        self.epsilon = epsilon

    def __call__(self, x_BSD: Array) -> Array:
        x = x_BSD.astype(jnp.float32)
        mean = x.mean(axis=-1, keepdims=True)
        variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(x_BSD.dtype)


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Dropout = NO_DROPOUT,
) -> Array:
    """Scaled dot-product attention: softmax(query · keyᵀ / √H) · value (Vaswani et al. 2017,
    equation 1), the softmax in float32.

    Args:
        query: query_BSNH, or query_SNH without a batch.
        key, value: key_BTNH and value_BTNH, or without B.
        mask: true where a query may attend to a key; any shape that broadcasts to BNST.
        dropout: applied to the attention weights.

    Returns:
        Of query's shape and type.
    """
    scores = jnp.einsum("...snh,...tnh->...nst", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = dropout(jax.nn.softmax(scores)).astype(value.dtype)
    y = jnp.einsum("...nst,...tnh->...snh", weights, value, preferred_element_type=jnp.float32)
    return y.astype(query.dtype)


def causal_mask(length: int) -> Array:
    """mask_ST, true where position t is not after position s."""
    return jnp.tril(jnp.ones((length, length), bool))


def sinusoids(length: int, width: int) -> Array:
    """Fixed position vectors x_SD: sines in the first half of D, cosines in the second, of
    wavelengths from 2π to 10,000 · 2π (Vaswani et al. 2017, section 3.5)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def make_norm(config: ModelConfig) -> LayerNorm | None:
    """The norm the config names, or none."""
    if config.norm == "none":
        return None
    return LayerNorm({"emb": config.emb_dim}, config.norm_epsilon)


def normed(norm: LayerNorm | None, x_BSD: Array) -> Array:
    """x through the norm, where there is one."""
    return x_BSD if norm is None else norm(x_BSD)


def matrix(inputs: Axes, outputs: Axes, init: Initializer, key: Array) -> nnx.Param:
    """A float32 parameter that a product with x sums over the `inputs` axes of."""
    shape = (*inputs.values(), *outputs.values())
    return nnx.Param(init(key, shape, len(inputs)), axes=(*inputs, *outputs), inputs=len(inputs))


def vector(axes: Axes, value: float) -> nnx.Param:
    """A float32 parameter that is added or multiplied, every element `value` at first."""
    values = jnp.full(tuple(axes.values()), value, jnp.float32)
    return nnx.Param(values, axes=tuple(axes), inputs=0)


def initializer(config: ModelConfig, into_residual: bool = False) -> Initializer:
    """How the config starts a weight matrix.

    Args:
        into_residual: the matrix writes into the residual stream; GPT-2 starts those smaller, so
            that the sum of 2·n_layers of them keeps its size (Radford et al. 2019, section 2.3).
    """
    if config.init == "truncated_normal":
        return glorot_truncated_normal
    scale = 0.02 / math.sqrt(2 * config.n_layers) if into_residual else 0.02
    return lambda key, shape, _: scale * jax.random.normal(key, shape)


def glorot_truncated_normal(key: Array, shape: tuple[int, ...], inputs: int) -> Array:
    """Normal with σ² = 2/(in + out), cut at ±3σ (after Glorot & Bengio 2010)."""
    fan_in, fan_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    sigma = math.sqrt(2 / (fan_in + fan_out))
    return sigma * jax.random.truncated_normal(key, -3, 3, shape)
