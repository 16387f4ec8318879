"""Small Flax Linen models with the parameter paths and shapes of published ones.

Each computes logits from token ids by itself, in float32, so that an import can be compared with
it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, CONTEXT = 48, 24, 4, 2, 6, 40, 3, 16
NORMAL = nn.initializers.normal(0.3)


def attend(query: Array, key: Array, value: Array, scale: float) -> Array:
    """Causal attention of heads (B, S, N, H); a key head serves the same number of query heads."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, repeats, axis=2) for array in (key, value))
    scores = jnp.einsum("bsnh,btnh->bnst", query, key) * scale
    length = scores.shape[-1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), value)


def rotate(x: Array, theta: float) -> Array:
    """Rotary positions of heads (B, S, N, H), whose two halves are a point's coordinates."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Conv1D(nn.Module):
    """GPT-2's projection, with a kernel of (outputs, inputs)."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", NORMAL, (self.features, x.shape[-1]))
        return x @ kernel.T + self.param("bias", NORMAL, (self.features,))


class GPT2Attention(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        parts = jnp.split(Conv1D(3 * WIDTH, name="c_attn")(x), 3, axis=-1)
        query, key, value = (part.reshape(*x.shape[:2], HEADS, -1) for part in parts)
        y = attend(query, key, value, (WIDTH // HEADS) ** -0.5)
        return Conv1D(WIDTH, name="c_proj")(y.reshape(x.shape))


class GPT2FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        inner = jax.nn.gelu(Conv1D(HIDDEN, name="c_fc")(x), approximate=True)
        return Conv1D(WIDTH, name="c_proj")(inner)


def layer_norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, scale_init=NORMAL, bias_init=NORMAL, name=name)


class GPT2Block(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x + GPT2Attention(name="attn")(layer_norm("ln_1")(x))
        return x + GPT2FeedForward(name="mlp")(layer_norm("ln_2")(x))


class Numbered(nn.Module):
    """Blocks in order, called 0, 1, 2, …"""

    block: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for number in range(LAYERS):
            x = self.block(name=str(number))(x)
        return x


class GPT2Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        table = nn.Embed(VOCAB, WIDTH, name="wte")
        positions = nn.Embed(CONTEXT, WIDTH, name="wpe")(jnp.arange(tokens.shape[1]))
        x = Numbered(GPT2Block, name="h")(table(tokens) + positions)
        return layer_norm("ln_f")(x) @ table.embedding.T


class GPT2(nn.Module):
    """The paths of transformers' `FlaxGPT2LMHeadModel`, with tied embeddings."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        return GPT2Transformer(name="transformer")(tokens)


class RMSNorm(nn.Module):
    """Llama's, with its scale called weight."""

    leaf: str = "weight"
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param(self.leaf, NORMAL, (x.shape[-1],)) + self.offset
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def dense(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=NORMAL, name=name)


class LlamaAttention(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        def heads(number: int, name: str) -> Array:
            return dense(number * HEAD_DIM, name)(x).reshape(*x.shape[:2], number, HEAD_DIM)

        query = rotate(heads(HEADS, "q_proj"), 10_000.0)
        key = rotate(heads(KV_HEADS, "k_proj"), 10_000.0)
        y = attend(query, key, heads(KV_HEADS, "v_proj"), HEAD_DIM**-0.5)
        return dense(WIDTH, "o_proj")(y.reshape(*x.shape[:2], -1))


class LlamaFeedForward(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        gate = jax.nn.silu(dense(HIDDEN, "gate_proj")(x))
        return dense(WIDTH, "down_proj")(gate * dense(HIDDEN, "up_proj")(x))


class LlamaBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x + LlamaAttention(name="self_attn")(RMSNorm(name="input_layernorm")(x))
        return x + LlamaFeedForward(name="mlp")(RMSNorm(name="post_attention_layernorm")(x))


class LlamaModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(VOCAB, WIDTH, name="embed_tokens")(tokens)
        return RMSNorm(name="norm")(Numbered(LlamaBlock, name="layers")(x))


class Llama(nn.Module):
    """The paths of transformers' `FlaxLlamaForCausalLM`."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        return dense(VOCAB, "lm_head")(LlamaModel(name="model")(tokens))


class Einsum(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation: str, x: Array) -> Array:
        return jnp.einsum(equation, x, self.param("w", NORMAL, self.shape))


class GemmaAttention(nn.Module):
    kv_heads: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = (WIDTH, HEAD_DIM)
        if self.kv_heads == HEADS:
            all_three = Einsum((3, HEADS, *size), name="qkv_einsum")
            query, key, value = all_three("bsd,cndh->cbsnh", x)
        else:
            query = Einsum((HEADS, *size), name="q_einsum")("bsd,ndh->bsnh", x)
            both = Einsum((2, self.kv_heads, *size), name="kv_einsum")
            key, value = both("bsd,ckdh->cbskh", x)
        y = attend(rotate(query, 1e4), rotate(key, 1e4), value, HEAD_DIM**-0.5)
        output = Einsum((HEADS, HEAD_DIM, WIDTH), name="attn_vec_einsum")
        return output("bsnh,nhd->bsd", y)


class GemmaFeedForward(nn.Module):
    transposed: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (2, HIDDEN, WIDTH) if self.transposed else (2, WIDTH, HIDDEN)
        gating = self.param("gating_einsum", NORMAL, shape)
        gate, up = jnp.einsum("bsd,cfd->cbsf" if self.transposed else "bsd,cdf->cbsf", x, gating)
        down = self.param("linear", NORMAL, (HIDDEN, WIDTH))
        return (jax.nn.gelu(gate, approximate=True) * up) @ down


class GemmaBlock(nn.Module):
    kv_heads: int
    transposed: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        normed = RMSNorm("scale", 1.0, name="pre_attention_norm")(x)
        x = x + GemmaAttention(self.kv_heads, name="attn")(normed)
        normed = RMSNorm("scale", 1.0, name="pre_ffw_norm")(x)
        return x + GemmaFeedForward(self.transposed, name="mlp")(normed)


class Embedder(nn.Module):
    @nn.compact
    def __call__(self) -> Array:
        return self.param("input_embedding", NORMAL, (VOCAB, WIDTH))


class GemmaTransformer(nn.Module):
    kv_heads: int
    transposed: bool

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        table = Embedder(name="embedder")()
        x = table[tokens] * jnp.sqrt(float(WIDTH))
        for number in range(LAYERS):
            x = GemmaBlock(self.kv_heads, self.transposed, name=f"layer_{number}")(x)
        return RMSNorm("scale", 1.0, name="final_norm")(x) @ table.T


class Gemma(nn.Module):
    """The paths of Google's Gemma 1."""

    kv_heads: int = 1
    transposed: bool = False

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        return GemmaTransformer(self.kv_heads, self.transposed, name="transformer")(tokens)


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
}
CONFIGS = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_positions": CONTEXT,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_inner": HIDDEN,
    },
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **_SIZES},
}
"""The `config.json` of the models that are published with one."""
