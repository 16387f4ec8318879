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
# # Llama
#
# Llama ([Touvron et al. 2023](https://arxiv.org/abs/2302.13971)) changes five parts of GPT-2:
# positions become rotations (RoPE), LayerNorm becomes RMSNorm, the feed-forward layer gets a gate
# (SwiGLU), biases go, and the head has weights of its own. Later versions share keys and values
# among heads (grouped-query attention). OpenLLaMA is an open reproduction with the same
# architecture. We write it from scratch, compare it with `transformers`, and look at what Llama 3
# did to RoPE.

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
from rungs.config.model_config import RopeScaling
from rungs.model.positions import rotary_frequencies

# %% [markdown]
# ## 1. Import

# %%
work = work_folder("llama")
run_command("pretrained.py", "import", FIXTURES / "llama", work / "llama")
model = rungs.load_model(work / "llama")
config = model.config
print(json.dumps(config.model_dump(mode="json", exclude_defaults=True), indent=2))

# %%
LOAD_FROM_HUB = False  # needs the network and disk space for the weights

if LOAD_FROM_HUB:
    run_command("pretrained.py", "import", "openlm-research/open_llama_3b_v2", "runs/open-llama")
    run_command("generate.py", "runs/open-llama", "The best way to learn is", "--new-tokens", 40)

# %% [markdown]
# ## 2. From scratch
#
# A rotary position turns each pair of elements of queries and keys by an angle that grows with the
# position. Elements i and i + H/2 are a pair. The score of a query and a key then depends only on
# how far apart they are ([Su et al. 2021](https://arxiv.org/abs/2104.09864)).


# %%
def rotate(x_BSNH: jax.Array) -> jax.Array:
    half = x_BSNH.shape[-1] // 2
    frequencies_R = config.rope_theta ** (-jnp.arange(half) / half)
    angles_SR = jnp.arange(x_BSNH.shape[1])[:, None] * frequencies_R
    cos, sin = jnp.cos(angles_SR)[:, None], jnp.sin(angles_SR)[:, None]
    first, second = x_BSNH[..., :half], x_BSNH[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(scale_D: jax.Array, x_BSD: jax.Array) -> jax.Array:
    return (
        x_BSD / jnp.sqrt(jnp.square(x_BSD).mean(-1, keepdims=True) + config.norm_epsilon) * scale_D
    )


def attention(x_BSD: jax.Array, layer: int) -> jax.Array:
    part = model.blocks.attention
    query_BSNH, key_BTKH, value_BTKH = (
        jnp.einsum("bsd,dnh->bsnh", x_BSD, p.kernel[...][layer])
        for p in (part.query, part.key, part.value)
    )
    query_BSNH, key_BTKH = rotate(query_BSNH), rotate(key_BTKH)
    shared_by = config.n_heads // config.n_kv_heads  # query heads for each key head
    key_BTNH, value_BTNH = (jnp.repeat(x, shared_by, axis=2) for x in (key_BTKH, value_BTKH))
    scores_BNST = jnp.einsum("bsnh,btnh->bnst", query_BSNH, key_BTNH)
    scores_BNST /= np.sqrt(query_BSNH.shape[-1])
    causal_ST = jnp.tril(jnp.ones(scores_BNST.shape[-2:], bool))
    weights_BNST = jax.nn.softmax(jnp.where(causal_ST, scores_BNST, -jnp.inf))
    y_BSNH = jnp.einsum("bnst,btnh->bsnh", weights_BNST, value_BTNH)
    return jnp.einsum("bsnh,nhd->bsd", y_BSNH, part.output.kernel[...][layer])


def feed_forward(x_BSD: jax.Array, layer: int) -> jax.Array:
    part = model.blocks.feed_forward
    gate_BSF = jax.nn.silu(x_BSD @ part.gate.kernel[...][layer])
    return (gate_BSF * (x_BSD @ part.up.kernel[...][layer])) @ part.down.kernel[...][layer]


def llama(tokens_BS: jax.Array) -> jax.Array:
    x_BSD = model.token_embedding.embedding[...][tokens_BS]
    blocks = model.blocks
    for layer in range(config.n_layers):
        x_BSD += attention(rms_norm(blocks.attention_norm.scale[...][layer], x_BSD), layer)
        x_BSD += feed_forward(rms_norm(blocks.feed_forward_norm.scale[...][layer], x_BSD), layer)
    return rms_norm(model.final_norm.scale[...], x_BSD) @ model.head.kernel[...]


expected = activations_of_transformers(FIXTURES / "llama")
tokens_BS = jnp.asarray(expected["tokens"])
logits_BSV = llama(tokens_BS)
print("from scratch against Rungs:", float(jnp.abs(logits_BSV - model(tokens_BS)).max()))
assert jnp.allclose(logits_BSV, model(tokens_BS), atol=1e-5)

# %%
# scores depend on the distance only
vectors = jax.random.normal(jax.random.key(0), (2, config.head_width))
query, key = (rotate(jnp.tile(v, (1, 16, 1, 1)).reshape(1, 16, 1, -1))[0, :, 0] for v in vectors)
scores_ST = query @ key.T
diagonals = [jnp.diagonal(scores_ST, offset) for offset in range(-15, 16)]
assert max(float(d.max() - d.min()) for d in diagonals) < 1e-4
plt.imshow(scores_ST)
plt.title("one query and one key at 16 × 16 positions: equal along diagonals")
plt.xlabel("position of the key")
plt.ylabel("position of the query")
plt.colorbar()
plt.show()

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
# ## 5. Llama 3's RoPE
#
# Llama 3.1 stretched a context of 8,192 tokens to 131,072: it divides low frequencies by 8, leaves
# high ones alone, and blends those in between. Slow rotations had never made a full turn during
# training, so new angles would confuse the model; fast ones encode the distance of neighbours,
# which must not change. This is `rope_scaling` in `model.json`.

# %%
llama3 = functools.partial(  # Llama 3.1 8B
    rungs.ModelConfig,
    vocab_size=128_256,
    context_length=131_072,
    emb_dim=4096,
    n_layers=32,
    n_heads=32,
    positions="rope",
    rope_theta=500_000.0,
)
scaling = RopeScaling(
    type="llama3",
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_context_length=8192,
)
plain_R = rotary_frequencies(llama3(), "global")
scaled_R = rotary_frequencies(llama3(rope_scaling=scaling), "global")
plt.loglog(2 * np.pi / plain_R, scaled_R / plain_R)
plt.axvline(8192, color="0.7", linestyle=":", label="original context")
plt.xlabel("wavelength in tokens")
plt.ylabel("frequency after ÷ before")
plt.legend()
plt.show()
assert np.isclose((scaled_R / plain_R)[-1], 1 / 8)
assert np.isclose((scaled_R / plain_R)[0], 1)

# %% [markdown]
# ## 6. What each component does
#
# Train the model with one component switched off at a time, on the documentation of Rungs, for a
# few seconds each. Two hundred steps show what a component does for the start of training, not for
# its end. [The ladder](../runs/README.md) compares whole runs.

# %%
small = functools.partial(
    rungs.ModelConfig,
    vocab_size=512,
    context_length=64,
    emb_dim=64,
    n_layers=2,
    n_heads=4,
    attention_output_bias=False,
    ffn_bias=False,
)
llama_parts = {"positions": "rope", "norm": "rms_norm", "feed_forward": "swiglu", "ffn_dim": 172}
means = compare_briefly(
    {
        "Llama": small(**llama_parts),
        "learned positions": small(**llama_parts | {"positions": "learned"}),
        "LayerNorm": small(**llama_parts | {"norm": "layer_norm"}),
        "GELU": small(**llama_parts | {"feed_forward": "gelu_tanh", "ffn_dim": 256}),
        "one key head for four": small(**llama_parts, n_kv_heads=1),
    }
)
assert means["learned positions"] > means["Llama"]
