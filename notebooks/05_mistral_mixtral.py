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
# # Mistral and Mixtral
#
# Mistral 7B ([Jiang et al. 2023](https://arxiv.org/abs/2310.06825)) is Llama with a sliding window
# in every layer. Mixtral ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088)) replaces the
# feed-forward layer by eight *experts*, of which a router picks two for each token: many
# parameters, few of them used at a time. We write the experts from scratch, compare both models
# with `transformers`, and watch what the router does while a model trains.

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
    random_batches,
    run_command,
    show_differences,
    show_generation,
    text_tokens,
    work_folder,
)

import rungs

# %% [markdown]
# ## 1. Import

# %%
work = work_folder("mistral")
for name in ("mistral", "mixtral"):
    run_command("pretrained.py", "import", FIXTURES / name, work / name)
mistral, model = rungs.load_model(work / "mistral"), rungs.load_model(work / "mixtral")
config = model.config
print(json.dumps(config.model_dump(mode="json", exclude_defaults=True), indent=2))

# %%
# needs the network, 15 GB, `hf auth login`, and the terms accepted on the model's page
LOAD_FROM_HUB = False

if LOAD_FROM_HUB:
    run_command("pretrained.py", "import", "mistralai/Mistral-7B-v0.1", "runs/mistral")
    run_command("generate.py", "runs/mistral", "The best way to learn is", "--new-tokens", 40)

# %% [markdown]
# ## 2. The window
#
# The only thing that Mistral adds to Llama is a mask: a query attends to its own token and to
# those of the window before it. Keys and values of older tokens are never needed again, so the
# cache of a long text *could* be as small as the window; Rungs keeps all of it.

# %%
length, window = 24, mistral.config.sliding_window
behind_ST = np.arange(length)[:, None] - np.arange(length)
mask_ST = (behind_ST >= 0) & (behind_ST < window)
plt.imshow(mask_ST, cmap="Blues")
plt.xlabel("key")
plt.ylabel("query")
plt.title(f"a window of {window} tokens")
plt.show()

# %% [markdown]
# ## 3. Experts from scratch
#
# For each token the router gives every expert a score. The two highest are chosen, and a softmax
# over their scores weights what these experts compute. All others do nothing for this token.


# %%
def experts(x_MD: jax.Array, layer: int) -> tuple[jax.Array, jax.Array]:
    """Return the output of each token, and the experts it was sent to."""
    part = model.blocks.feed_forward
    router_DE = part.router.kernel[...][layer]
    gate_EDF, up_EDF, down_EFD = (p.kernel[...][layer] for p in (part.gate, part.up, part.down))
    scores_MK, chosen_MK = jax.lax.top_k(x_MD @ router_DE, config.experts_per_token)
    weights_MK = jax.nn.softmax(scores_MK)
    y_MD = jnp.zeros_like(x_MD)
    for expert in range(config.n_experts):
        inner_MF = jax.nn.silu(x_MD @ gate_EDF[expert]) * (x_MD @ up_EDF[expert])
        weight_M = jnp.where(chosen_MK == expert, weights_MK, 0).sum(axis=-1)
        y_MD += weight_M[:, None] * (inner_MF @ down_EFD[expert])
    return y_MD, chosen_MK


vectors_MD = jax.random.normal(jax.random.key(0), (64, config.emb_dim))
found_MD, chosen_MK = experts(vectors_MD, layer=0)
graph, stacked = nnx.split(model.blocks.feed_forward)
first_layer = nnx.merge(graph, jax.tree.map(lambda array: array[0], stacked))
ours_BSD, routing = first_layer(vectors_MD[None])
assert jnp.allclose(found_MD, ours_BSD[0], atol=1e-6)
print("tokens per expert:", routing.counts_E)
assert (routing.counts_E == jnp.bincount(chosen_MK.ravel(), length=config.n_experts)).all()

# %% [markdown]
# The loop above computes every expert for every token and throws most of it away. On TPUs and
# recent NVIDIA GPUs Rungs sorts the tokens by expert and multiplies each group by its expert's
# weights, which is the work of two experts. On a CPU it does what the loop does, in three large
# matmuls, because that is faster there. No token is dropped either way, however uneven the groups.

# %% [markdown]
# ## 4. Against transformers

# %%
expected_mistral = activations_of_transformers(FIXTURES / "mistral")
show_differences(mistral, expected_mistral)
expected = activations_of_transformers(FIXTURES / "mixtral")
show_differences(model, expected)

# %% [markdown]
# ## 5. Generation
#
# Greedy tokens are those of `transformers`, and the same with the key/value cache and without it:
# [GPT-2](02_gpt2.ipynb) shows what the cache saves.

# %%
show_generation(model, expected)

# %% [markdown]
# ## 6. What the router learns
#
# A router that prefers one expert makes that one better, and prefers it more: without a
# counterweight most experts starve. The load-balancing loss ([Fedus et al.
# 2021](https://arxiv.org/abs/2101.03961), equation 4) is 1 if all experts get equally many tokens,
# and more otherwise. We train with and without it, and plot the share of each expert.


# %%
def shares_while_training(balance_weight: float, steps: int = 150) -> np.ndarray:
    """Return the share of the tokens that each expert of the first layer gets at each step."""
    small = rungs.ModelConfig(
        vocab_size=512,
        context_length=64,
        emb_dim=64,
        n_layers=2,
        n_heads=4,
        positions="rope",
        norm="rms_norm",
        feed_forward="swiglu",
        ffn_dim=64,
        n_experts=4,
        experts_per_token=1,
        ffn_bias=False,
        attention_output_bias=False,
    )
    trained = rungs.GPT(small, jax.random.key(0))
    optimizer = nnx.Optimizer(trained, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(trained: rungs.GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        def loss(trained: rungs.GPT) -> tuple[jax.Array, jax.Array]:
            total, routing = trained.summed_loss(batch[:, :-1], batch[:, 1:])
            mean = total / batch[:, 1:].size
            return mean + balance_weight * routing.balance_loss.mean(), routing.counts_E[0]

        (_, counts_E), gradient = nnx.value_and_grad(loss, has_aux=True)(trained)
        optimizer.update(trained, gradient)
        return counts_E / counts_E.sum()

    batches = random_batches(text_tokens(512), length=64, steps=steps)
    return np.stack([step(trained, optimizer, batch) for batch in batches])


figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), sharey=True)
spread = {}
for axis, weight in zip(axes, (0.0, 0.1), strict=True):
    shares = shares_while_training(weight)
    spread[weight] = float(shares[-20:].mean(axis=0).max())
    axis.stackplot(np.arange(len(shares)), shares.T)
    axis.set_title(f"weight of the balancing loss: {weight}")
    axis.set_xlabel("step")
axes[0].set_ylabel("share of the tokens, by expert")
plt.show()
print("largest share at the end:", spread)
assert spread[0.1] < spread[0.0]

# %% [markdown]
# ## 7. What each component does
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
    n_kv_heads=2,
    attention_output_bias=False,
    ffn_bias=False,
    positions="rope",
    norm="rms_norm",
    feed_forward="swiglu",
)
means = compare_briefly(
    {
        "Mixtral, 4 experts of width 86, 2 per token": small(
            ffn_dim=86, n_experts=4, experts_per_token=2
        ),
        "one feed-forward layer of width 172": small(ffn_dim=172),
        "and a window of 8 (Mistral)": small(ffn_dim=172, sliding_window=8),
    }
)
assert max(means.values()) < 6  # all of them learn

# %% [markdown]
# Per token the first two *use* equally many feed-forward weights (on a CPU all four experts are
# computed). Experts need more steps before they differ enough to pay off. The window helps at once:
# nearby tokens are the first thing that a model learns to use.
