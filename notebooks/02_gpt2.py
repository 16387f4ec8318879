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
# # GPT-2
#
# GPT-2 ([Radford et al.
# 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf))
# is the plainest of the families: learned positions, LayerNorm, attention with biases, a GELU
# feed-forward layer, and an output head that is the embedding once more. In this notebook we write
# its forward pass from scratch, import published weights, compare every hidden state with
# `transformers`, generate, and switch off one component after the other.

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
#
# The weights here are a committed miniature with GPT-2's architecture and random weights, so that
# the notebook needs no network. The real ones are imported the same way.

# %%
work = work_folder("gpt2")
run_command("pretrained.py", "import", FIXTURES / "gpt2", work / "gpt2")
model = rungs.load_model(work / "gpt2")
config = model.config
print(json.dumps(config.model_dump(mode="json", exclude_defaults=True), indent=2))

# %%
LOAD_FROM_HUB = False  # needs the network and disk space for the weights

if LOAD_FROM_HUB:
    run_command("pretrained.py", "import", "openai-community/gpt2", "runs/gpt2")
    run_command("generate.py", "runs/gpt2", "The best way to learn is", "--new-tokens", 40)

# %% [markdown]
# ## 2. From scratch
#
# Arrays are named with their axes: B batch, S sequence, T attended positions, D width, N heads, H
# head size, F feed-forward width, V vocabulary. Every layer's parameters are stacked along a
# leading axis, so `[layer]` picks those of one.


# %%
def layer_norm(norm: object, x_BSD: jax.Array, layer: int | None = None) -> jax.Array:
    scale, bias = norm.scale[...], norm.bias[...]
    if layer is not None:
        scale, bias = scale[layer], bias[layer]
    centred = x_BSD - x_BSD.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + config.norm_epsilon) * scale + bias


def attention(x_BSD: jax.Array, layer: int) -> jax.Array:
    part = model.blocks.attention
    query_BSNH, key_BTNH, value_BTNH = (
        jnp.einsum("bsd,dnh->bsnh", x_BSD, p.kernel[...][layer]) + p.bias[...][layer]
        for p in (part.query, part.key, part.value)
    )
    scores_BNST = jnp.einsum("bsnh,btnh->bnst", query_BSNH, key_BTNH)
    scores_BNST /= np.sqrt(query_BSNH.shape[-1])
    causal_ST = jnp.tril(jnp.ones(scores_BNST.shape[-2:], bool))
    weights_BNST = jax.nn.softmax(jnp.where(causal_ST, scores_BNST, -jnp.inf))
    y_BSNH = jnp.einsum("bnst,btnh->bsnh", weights_BNST, value_BTNH)
    output = part.output
    return jnp.einsum("bsnh,nhd->bsd", y_BSNH, output.kernel[...][layer]) + output.bias[...][layer]


def feed_forward(x_BSD: jax.Array, layer: int) -> jax.Array:
    part = model.blocks.feed_forward
    inner_BSF = x_BSD @ part.up.kernel[...][layer] + part.up.bias[...][layer]
    inner_BSF = jax.nn.gelu(inner_BSF, approximate=True)
    return inner_BSF @ part.down.kernel[...][layer] + part.down.bias[...][layer]


def gpt2(tokens_BS: jax.Array) -> jax.Array:
    embedding_VD = model.token_embedding.embedding[...]
    x_BSD = embedding_VD[tokens_BS]
    x_BSD += model.position_embedding.embedding[...][: tokens_BS.shape[1]]
    for layer in range(config.n_layers):
        x_BSD += attention(layer_norm(model.blocks.attention_norm, x_BSD, layer), layer)
        x_BSD += feed_forward(layer_norm(model.blocks.feed_forward_norm, x_BSD, layer), layer)
    return layer_norm(model.final_norm, x_BSD) @ embedding_VD.T


expected = activations_of_transformers(FIXTURES / "gpt2")
tokens_BS = jnp.asarray(expected["tokens"])
logits_BSV = gpt2(tokens_BS)
print("from scratch against Rungs:", float(jnp.abs(logits_BSV - model(tokens_BS)).max()))
assert jnp.allclose(logits_BSV, model(tokens_BS), atol=1e-5)

# %% [markdown]
# ## 3. Against transformers

# %%
show_differences(model, expected)

# %% [markdown]
# ## 4. Text, and the key/value cache
#
# Generating a token needs the keys and values of all tokens before it. They don't change, so they
# are kept: with the cache a new token costs one row of each matmul instead of the whole sequence
# again. The tokens are the same.

# %%
show_generation(model, expected)

# %%
lengths = np.arange(1, 65)
plt.plot(lengths, lengths, label="with a cache")
plt.plot(lengths, np.cumsum(lengths), label="without")
plt.yscale("log")
plt.xlabel("tokens generated")
plt.ylabel("rows that each matmul has computed")
plt.legend()
plt.show()

# %% [markdown]
# ## 5. What each component does
#
# Train the model with one component switched off at a time, on the documentation of Rungs, for a
# few seconds each. Two hundred steps show what a component does for the start of training, not for
# its end. [The ladder](../runs/README.md) compares whole runs.

# %%
small = functools.partial(
    rungs.ModelConfig, vocab_size=512, context_length=64, emb_dim=64, n_layers=2, n_heads=4
)
means = compare_briefly(
    {
        "GPT-2": small(),
        "no positions": small(positions="none"),
        "no feed-forward layer": small(feed_forward="none"),
        "no LayerNorm": small(norm="none"),
        "no residual connection": small(residual=False),
    }
)
assert means["no residual connection"] > means["GPT-2"]
assert means["no LayerNorm"] > means["GPT-2"]

# %% [markdown]
# Without residual connections and without LayerNorm the model hardly learns in this time: both are
# there to make training work. Without the feed-forward layer it learns more slowly. Learned
# positions cost something at first: attention can use the table only once it has been learned.
#
# Next: [Llama](03_llama.py) replaces most of these parts.
