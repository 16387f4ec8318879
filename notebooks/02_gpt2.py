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
# `transformers`, generate, write the loop that trains it, and switch off one component after the
# other.

# %%
import functools
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from tools import (
    FIXTURES,
    activations_of_transformers,
    compare_briefly,
    run_command,
    show_differences,
    show_generation,
    text_tokens,
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
# ## 4. Tokens, and the key/value cache
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
# ## 5. Training
#
# Everything above had random weights. Here is what gives a model better ones: a loss, its gradient,
# an update, and again with other text. The text is the documentation of Rungs, as token ids of a
# BPE with 512 tokens.

# %%
small = functools.partial(
    rungs.ModelConfig, vocab_size=512, context_length=64, emb_dim=64, n_layers=2, n_heads=4
)
tokens = text_tokens(512)
learner = rungs.GPT(small(), jax.random.key(0))
STEPS = 200

# The learning rate rises for 20 steps, the warm-up, and then falls along a cosine.
schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, STEPS // 10, STEPS)
# A gradient longer than 1 is scaled down; AdamW makes a step of it.
rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
# The optimizer keeps the state of the rule: two moments for each parameter.
optimizer = nnx.Optimizer(learner, rule, wrt=nnx.Param)


def loss(model: rungs.GPT, batch_BS: jax.Array) -> jax.Array:
    """Return the mean of −ln(probability of the right token), in nats."""
    inputs_BS, targets_BS = batch_BS[:, :-1], batch_BS[:, 1:]  # each target is the next token
    log_probs_BSV = jax.nn.log_softmax(model(inputs_BS))
    return -jnp.take_along_axis(log_probs_BSV, targets_BS[..., None], axis=-1).mean()


@nnx.jit
def step(model: rungs.GPT, optimizer: nnx.Optimizer, batch_BS: jax.Array) -> jax.Array:
    """Update the model once, and return the loss before."""
    value, gradient = nnx.value_and_grad(loss)(model, batch_BS)  # one pass forward, one backward
    optimizer.update(model, gradient)
    return value


losses, draws = [], np.random.default_rng(0)
for _ in range(STEPS):
    # A batch is 16 sequences from random places of the text, with one token more for the targets.
    starts = draws.integers(0, len(tokens) - 65, 16)
    batch_BS = np.stack([tokens[start : start + 65] for start in starts])
    losses.append(step(learner, optimizer, jnp.asarray(batch_BS)))

plt.plot(losses)
plt.axhline(np.log(512), color="0.7", linestyle=":", label="guessing: ln 512")
plt.xlabel("step")
plt.ylabel("loss in nats")
plt.legend()
plt.show()
assert abs(losses[0] - np.log(512)) < 0.2
assert losses[-1] < losses[0] - 2

# %% [markdown]
# `train.py` does the same, and besides that what a long run needs: validation, checkpoints,
# resuming, several devices. From here on the notebooks import this loop from
# [tools.py](tools.py).

# %% [markdown]
# ## 6. What each component does
#
# Train the model with one component switched off at a time, on the same text, for a few seconds
# each. Two hundred steps show what a component does for the start of training, not for its end.
# [The ladder](../runs/README.md) compares whole runs.

# %%
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
# Next: [Llama](03_llama.ipynb) replaces most of these parts.
