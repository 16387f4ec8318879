# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gemma
#
# Gemma 2 ([Gemma Team 2024](https://arxiv.org/abs/2408.00118)) starts from Llama's parts and adds
# four ideas: soft caps on attention scores and on logits, attention to a *window* of recent tokens
# in every other layer, norms before *and* after each sub-layer, and embeddings that are scaled by
# √D and used as the output head. We write it from scratch, compare it with `transformers`, and
# look at what each of them does.

# %%
import functools
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tools import (
    FIXTURES,
    activations_of_transformers,
    compare_briefly,
    run_command,
    show_differences,
    show_generation,
    work_folder,
)

import rungs

# %% [markdown]
# ## 1. Import

# %%
work = work_folder("gemma")
run_command("pretrained.py", "import", FIXTURES / "gemma2", work / "gemma2")
model = rungs.load_model(work / "gemma2")
config = model.config
print(json.dumps(config.model_dump(mode="json", exclude_defaults=True), indent=2))
kinds = list(config.layer_kinds())
print(kinds)

# %%
# needs the network, 5 GB, `hf auth login`, and the terms accepted on the model's page
LOAD_FROM_HUB = False

if LOAD_FROM_HUB:
    run_command("pretrained.py", "import", "google/gemma-2-2b", "runs/gemma2")
    run_command("generate.py", "runs/gemma2", "The best way to learn is", "--new-tokens", 40)

# %% [markdown]
# ## 2. From scratch
#
# A soft cap squeezes numbers into (−c, c): c · tanh(x / c). Near 0 it changes almost nothing,
# and no score can leave ±c, so scores can't grow without limit.


# %%
def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


scores = np.linspace(-150, 150)
plt.plot(scores, scores, color="0.8", label="no cap")
plt.plot(scores, soft_cap(scores, 50.0), label="cap 50, for attention scores")
plt.plot(scores, soft_cap(scores, 30.0), label="cap 30, for logits")
plt.legend()
plt.show()


# %%
def rotate(x_BSNH: jax.Array) -> jax.Array:
    half = x_BSNH.shape[-1] // 2
    frequencies_R = config.rope_theta ** (-jnp.arange(half) / half)
    angles_SR = jnp.arange(x_BSNH.shape[1])[:, None] * frequencies_R
    cos, sin = jnp.cos(angles_SR)[:, None], jnp.sin(angles_SR)[:, None]
    first, second = x_BSNH[..., :half], x_BSNH[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(scale_D: jax.Array, x_BSD: jax.Array) -> jax.Array:
    """Gemma's scales start at 0 and count from 1."""
    root = jnp.sqrt(jnp.square(x_BSD).mean(-1, keepdims=True) + config.norm_epsilon)
    return x_BSD / root * (1 + scale_D)


def mask_of(kind: str, length: int) -> jax.Array:
    """True where a query may attend to a key."""
    behind_ST = jnp.arange(length)[:, None] - jnp.arange(length)
    window = config.sliding_window if kind == "sliding" else length
    return (behind_ST >= 0) & (behind_ST < window)


def attention(x_BSD: jax.Array, layer: int, kind: str) -> jax.Array:
    part = model.blocks.attention
    query_BSNH, key_BTKH, value_BTKH = (
        jnp.einsum("bsd,dnh->bsnh", x_BSD, p.kernel[...][layer])
        for p in (part.query, part.key, part.value)
    )
    query_BSNH, key_BTKH = rotate(query_BSNH), rotate(key_BTKH)
    shared_by = config.n_heads // config.n_kv_heads
    key_BTNH, value_BTNH = (jnp.repeat(x, shared_by, axis=2) for x in (key_BTKH, value_BTKH))
    scores_BNST = jnp.einsum("bsnh,btnh->bnst", query_BSNH, key_BTNH)
    scores_BNST = soft_cap(
        scores_BNST / np.sqrt(config.query_pre_attn_scalar), config.attention_soft_cap
    )
    mask_ST = mask_of(kind, x_BSD.shape[1])
    weights_BNST = jax.nn.softmax(jnp.where(mask_ST, scores_BNST, -jnp.inf))
    y_BSNH = jnp.einsum("bnst,btnh->bsnh", weights_BNST, value_BTNH)
    return jnp.einsum("bsnh,nhd->bsd", y_BSNH, part.output.kernel[...][layer])


def feed_forward(x_BSD: jax.Array, layer: int) -> jax.Array:
    part = model.blocks.feed_forward
    gate_BSF = jax.nn.gelu(x_BSD @ part.gate.kernel[...][layer], approximate=True)
    return (gate_BSF * (x_BSD @ part.up.kernel[...][layer])) @ part.down.kernel[...][layer]


def normed(norm: object, layer: int, x_BSD: jax.Array) -> jax.Array:
    return rms_norm(norm.scale[...][layer], x_BSD)


def gemma(tokens_BS: jax.Array) -> jax.Array:
    embedding_VD, blocks = model.token_embedding.embedding[...], model.blocks
    x_BSD = embedding_VD[tokens_BS] * np.sqrt(config.emb_dim)
    for layer, kind in enumerate(kinds):
        y_BSD = attention(normed(blocks.attention_norm, layer, x_BSD), layer, kind)
        x_BSD += normed(blocks.attention_output_norm, layer, y_BSD)
        y_BSD = feed_forward(normed(blocks.feed_forward_norm, layer, x_BSD), layer)
        x_BSD += normed(blocks.feed_forward_output_norm, layer, y_BSD)
    x_BSD = rms_norm(model.final_norm.scale[...], x_BSD)
    return soft_cap(x_BSD @ embedding_VD.T, config.final_soft_cap)


expected = activations_of_transformers(FIXTURES / "gemma2")
tokens_BS = jnp.asarray(expected["tokens"])
logits_BSV = gemma(tokens_BS)
print("from scratch against Rungs:", float(jnp.abs(logits_BSV - model(tokens_BS)).max()))
assert jnp.allclose(logits_BSV, model(tokens_BS), atol=1e-5)

# %% [markdown]
# ### What a token can see
#
# In a sliding layer a token attends to the last few tokens only, so that its keys and values need
# little memory. But layers stack: each one passes on what the layer below has seen. We measure it
# with a gradient: how much does the last token's output change with each earlier token's
# embedding?


# %%
def influence(kinds: list[str]) -> np.ndarray:
    """Return, for each position, the gradient of the last position's output."""
    embedded_BSD = jax.random.normal(jax.random.key(0), (1, 24, config.emb_dim))

    def last(x_BSD: jax.Array) -> jax.Array:
        for layer, kind in enumerate(kinds):
            x_BSD = x_BSD + attention(x_BSD, layer, kind)
        return x_BSD[0, -1].sum()

    return np.abs(np.asarray(jax.grad(last)(embedded_BSD)))[0].max(-1)


window = config.sliding_window
one_by_one = influence(["sliding"] * config.n_layers)
alternating = influence(["sliding", "global", "sliding"])
plt.semilogy(np.maximum(one_by_one, 1e-9), marker="o", label="all layers sliding")
plt.semilogy(np.maximum(alternating, 1e-9), marker="o", label="the middle one global")
plt.axvline(23 - (window - 1) * config.n_layers, color="0.7", linestyle=":")
plt.xlabel("position")
plt.ylabel("influence on the last position")
plt.title(f"a window of {window} tokens and {config.n_layers} layers")
plt.legend()
plt.show()
reach = config.n_layers * (window - 1)
assert (one_by_one[: 23 - reach] == 0).all()
assert one_by_one[23 - reach] > 0
assert (alternating > 0).all()

# %% [markdown]
# ## 3. Against transformers

# %%
show_differences(model, expected)

# %% [markdown]
# ## 4. Generation
#
# Greedy tokens are those of `transformers`, and the same with the key/value cache and without it:
# [GPT-2](02_gpt2.ipynb) shows what the cache saves.

# %%
show_generation(model, expected)

# %% [markdown]
# ## 5. What each component does
#
# Train the model with one component switched off at a time, on the documentation of Rungs, for a
# few seconds each. So few steps show what a component does for the start of training, not for
# its end. [The ladder](../runs/README.md) compares whole runs.

# %%
small = functools.partial(
    rungs.ModelConfig,
    vocab_size=512,
    context_length=64,
    emb_dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    attention_output_bias=False,
    ffn_bias=False,
    positions="rope",
    norm="rms_norm_plus_one",
    feed_forward="geglu_tanh",
    ffn_dim=172,
)
parts = {
    "norm_placement": "around",
    "sliding_window": 16,
    "layer_pattern": ("sliding", "global"),
    "attention_soft_cap": 50.0,
    "final_soft_cap": 30.0,
    "tied_embeddings": True,
    "embedding_scale": "sqrt_emb_dim",
}


def without(*keys: str) -> rungs.ModelConfig:
    return small(**{key: value for key, value in parts.items() if key not in keys})


means = compare_briefly(
    {
        "Gemma 2": without(),
        "no soft caps": without("attention_soft_cap", "final_soft_cap"),
        "no windows": without("sliding_window", "layer_pattern"),
        "norms before only": without("norm_placement"),
        "a head of its own": without("tied_embeddings"),
        "embeddings not scaled": without("embedding_scale"),
    },
    steps=120,
)
assert max(means.values()) < 6  # all of them learn

# %% [markdown]
# Soft caps cost nothing here and change nothing: in so small a model no score comes near them. They
# are insurance for long runs. So are the norms after each layer, which limit what a layer can add:
# they make the start slower. Windows help at the start, because nearby tokens are the first thing
# that a model learns to use.
