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
# # Look inside: an induction head
#
# A model that reads the beginning of a name again continues it by looking at what came after it the
# last time. An attention head that does this is an *induction head*
# ([Olsson et al. 2022](https://arxiv.org/abs/2209.11895)). It needs a second head in the layer
# below, which tells each token what came before it. We train a model of two layers of attention on
# random tokens that repeat, find both heads in its attention maps, and switch heads off.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tools import losses_of, make_run, run_command, work_folder

import rungs

WORK = work_folder("look")
VOCAB, LENGTH = 64, 64

# %% [markdown]
# ## 1. Train a model on repetitions
#
# Random tokens can't be predicted, but their repetition can. The length of what is repeated differs
# from block to block: if it were always the same, a head could look back by that distance, without
# looking at the tokens.


# %%
def repetitions(count: int, random: np.random.Generator) -> np.ndarray:
    """Return tokens: blocks of 8 to 16 different ones, each three times."""
    lengths = random.integers(8, 17, size=count // 24 + 1)
    blocks = [np.tile(random.permutation(VOCAB)[:length], 3) for length in lengths]
    return np.concatenate(blocks)[:count].astype(np.uint16)


random = np.random.default_rng(0)
dataset = WORK / "datasets" / "repetitions"
dataset.mkdir(parents=True)
for split, count in (("train", 3_500_000), ("validation", 32_768)):
    save_file({"tokens": repetitions(count, random)}, dataset / f"{split}.safetensors")

run = make_run(
    WORK / "induction",
    train={
        "dataset": "repetitions",
        "max_steps": 1600,
        "microbatch_size": 32,
        "optimizer": "muon",
        "learning_rate": 0.03,
        "beta2": 0.95,
        "checkpoint_interval": 400,
        "validation_tokens": 16_384,
    },
    model={
        "vocab_size": VOCAB,
        "context_length": LENGTH,
        "emb_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "positions": "rope",
        "norm": "rms_norm",
        "feed_forward": "none",
        "init": "truncated_normal",
    },
)
run_command("train.py", run, "--quiet", "--datasets-dir", WORK / "datasets")
losses = losses_of(run)
plt.plot(np.convolve(losses, np.ones(20) / 20, mode="valid"))
plt.axhline(np.log(VOCAB), color="0.7", linestyle=":", label="ln of the vocabulary")
plt.xlabel("step")
plt.ylabel("loss in nats")
plt.legend()
plt.show()

# %% [markdown]
# ## 2. What it does with a repetition
#
# 16 random tokens, twice. `rungs.look` returns the loss of each token. The first time the model can
# only guess; the second time it knows.

# %%
PERIOD = 16
random = np.random.default_rng(1)
half_BS = np.stack([random.permutation(VOCAB)[:PERIOD] for _ in range(64)])
tokens_BS = np.concatenate([half_BS, half_BS], axis=1)
model = rungs.load_model(run)
seen = rungs.look(model, tokens_BS)
plt.plot(np.arange(1, 2 * PERIOD), seen.losses_BS.mean(axis=0), marker="o")
plt.axvline(PERIOD, color="0.7", linestyle=":")
plt.xlabel("token")
plt.ylabel("loss in nats, mean of 64 texts")
plt.show()


def repeated_loss(seen: rungs.Look) -> float:
    """Return the mean loss of the second half, without its first token, which nothing predicts."""
    return float(seen.losses_BS[:, PERIOD:].mean())


print("first half:", seen.losses_BS[:, : PERIOD - 1].mean(), "second half:", repeated_loss(seen))
assert repeated_loss(seen) < 1.5 < 3.5 < seen.losses_BS[:, : PERIOD - 1].mean()

# %% [markdown]
# ## 3. Find the heads
#
# An induction head attends from a token of the second half to the token *after* the same token in
# the first half. Its *induction score* is how much, on average. A *previous-token* head attends to
# the token before.

# %%
weights_LNST = seen.layers.weights_LBNST.mean(axis=1)
second_S = np.arange(PERIOD, 2 * PERIOD)
every_S = np.arange(1, 2 * PERIOD)
induction_LN = weights_LNST[:, :, second_S, second_S - PERIOD + 1].mean(axis=-1)
previous_LN = weights_LNST[:, :, every_S, every_S - 1].mean(axis=-1)
figure, panels = plt.subplots(1, 2)
for panel, title, scores_LN in zip(
    panels, ("induction", "previous token"), (induction_LN, previous_LN), strict=True
):
    panel.imshow(scores_LN, vmin=0, vmax=1)
    panel.set(title=title, xlabel="head", ylabel="layer", xticks=range(4), yticks=range(2))
    for (layer, head), score in np.ndenumerate(scores_LN):
        panel.text(head, layer, f"{score:.2f}", ha="center", color="w" if score < 0.6 else "k")
plt.show()

induction = max(np.ndindex(induction_LN.shape), key=lambda place: induction_LN[place])
previous = max(np.ndindex(previous_LN.shape), key=lambda place: previous_LN[place])
print(f"the induction head is layer {induction[0]} head {induction[1]}")
print(f"the previous-token head is layer {previous[0]} head {previous[1]}")
assert induction[0] == 1
assert previous[0] == 0
assert induction_LN[induction] > 0.4

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 4.5))
for panel, (layer, head) in zip(panels, (previous, induction), strict=True):
    panel.imshow(seen.layers.weights_LBNST[layer, 0, head], cmap="Blues", vmin=0, vmax=1)
    panel.set(title=f"layer {layer} head {head}", xlabel="attends to", ylabel="token")
plt.show()

# %% [markdown]
# ## 4. Where the right answer comes from
#
# The logit of the next token is a sum of what each part of the model adds to it. Of a repeated
# token, most should come from the induction head. A logit means something only next to those of
# other tokens, so we subtract what the parts add to a token that doesn't come.

# %%
wrong_BS = np.random.default_rng(2).integers(VOCAB, size=tokens_BS.shape)
right, wrong = seen.contributions, rungs.look(model, tokens_BS, wrong_BS).contributions
places = np.s_[:, PERIOD:-1]
added_LN = (right.heads_LBNS - wrong.heads_LBNS)[..., PERIOD:-1].mean(axis=(1, 3))
others = {
    "embedding": (right.embedding_BS - wrong.embedding_BS)[places].mean(),
    "biases": (right.biases_BS - wrong.biases_BS)[places].mean(),
}
bars = others | {f"layer {n} head {m}": added for (n, m), added in np.ndenumerate(added_LN)}
plt.barh(list(bars), list(bars.values()))
plt.gca().invert_yaxis()
plt.xlabel("logit of the token that comes, less that of another")
plt.show()
assert added_LN.argmax() == np.ravel_multi_index(induction, added_LN.shape)

# %% [markdown]
# ## 5. Switch heads off
#
# What a head adds may be of no use, or another part may stand in for it. So we let it return zeros,
# one head at a time, and measure the loss of the repeated tokens.


# %%
@nnx.jit
def losses_of_texts(model: rungs.GPT) -> jax.Array:
    return model.losses(jnp.asarray(tokens_BS[:, :-1]), jnp.asarray(tokens_BS[:, 1:]))


def loss_without(layer: int, head: int) -> float:
    """Return the loss of repeated tokens with a head that returns zeros."""
    ablated = rungs.patch(model, {f"layer {layer} head {head}": jnp.zeros_like})
    return float(losses_of_texts(ablated)[:, PERIOD:].mean())


heads = list(np.ndindex(2, 4))
without = {place: loss_without(*place) for place in heads}
plt.bar([f"layer {layer} head {head}" for layer, head in heads], list(without.values()))
plt.axhline(repeated_loss(seen), color="k", linestyle=":", label="with all heads")
plt.axhline(np.log(VOCAB), color="0.7", linestyle=":", label="guessing")
plt.xticks(rotation=45, ha="right")
plt.ylabel("loss of repeated tokens, nats")
plt.legend()
plt.show()

# a head of the same layer that does not look for repetitions
other = min(((1, head) for head in range(4)), key=lambda place: induction_LN[place])
for name, place in (("the induction head", induction), ("another head", other)):
    print(f"without {name}, layer {place[0]} head {place[1]}: {without[place]:.2f} nats")
assert without[induction] > repeated_loss(seen) + 0.5
assert abs(without[other] - repeated_loss(seen)) < 0.1
