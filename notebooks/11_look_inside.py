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
# below, which tells each token what came before it. We train a model of two layers of attention,
# with one head each, on random tokens that repeat, find both in its attention maps, and switch them
# off.

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
        "n_heads": 1,
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


def twice(period: int) -> np.ndarray:
    """Return 64 texts of random tokens, all different, and then the same once more."""
    random = np.random.default_rng(1)
    half_BS = np.stack([random.permutation(VOCAB)[:period] for _ in range(64)])
    return np.concatenate([half_BS, half_BS], axis=1)


tokens_BS = twice(PERIOD)
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
# The head in layer 0 should tell each token what came some tokens before it: it looks back by the
# same distance in every text. The induction head, in layer 1, finds the token to which its own was
# told, so it looks back by the length of the repetition less that distance. We measure how far both
# look in texts that repeat after 12 tokens and after 16.


# %%
def looks_back(period: int) -> np.ndarray:
    """Return how much the two layers attend to each distance, on average in the second half."""
    weights_LBNST = rungs.look(model, twice(period)).layers.weights_LBNST
    weights_LST = weights_LBNST[:, :, 0].mean(axis=1)
    second_S = np.arange(period, 2 * period)
    by_distance = [weights_LST[:, second_S, second_S - back] for back in range(period)]
    return np.stack(by_distance, axis=-1).mean(axis=1)


short_LK, long_LK = looks_back(12), looks_back(PERIOD)
figure, panels = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for layer, panel in enumerate(panels):
    panel.plot(short_LK[layer], marker="o", label="repeated after 12 tokens")
    panel.plot(long_LK[layer], marker="o", label=f"repeated after {PERIOD}")
    panel.set(title=f"layer {layer}", xlabel="tokens back", xticks=range(0, PERIOD, 3))
panels[0].set_ylabel("attention")
panels[0].legend()
plt.show()

(told, short), (_, long) = short_LK.argmax(axis=1), long_LK.argmax(axis=1)
distance = PERIOD - long
print(f"layer 0 looks {told} back; layer 1 looks {short} back of 12, {long} back of {PERIOD}")
assert long - short == PERIOD - 12
assert min(short_LK[0, distance], long_LK[0, distance]) > 0.3
assert min(short_LK[1, short], long_LK[1, long]) > 0.8

# %% [markdown]
# Descriptions of large models say 1 for the distance in layer 0, and call that a *previous-token
# head*. Training may find another, as it did when this was executed. The pair works with any that
# is shorter than the repetition.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 4.5))
for layer, panel in enumerate(panels):
    panel.imshow(seen.layers.weights_LBNST[layer, 0, 0], cmap="Blues", vmin=0, vmax=1)
    panel.set(title=f"layer {layer}, one text", xlabel="attends to", ylabel="token")
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
bars = others | {f"layer {layer}": added for layer, [added] in enumerate(added_LN)}
plt.barh(list(bars), list(bars.values()))
plt.gca().invert_yaxis()
plt.xlabel("logit of the token that comes, less that of another")
plt.show()
assert max(bars, key=bars.get) == "layer 1"

# %% [markdown]
# ## 5. Switch heads off
#
# What a head adds may be of no use, or another part may stand in for it. So we let it return zeros,
# and measure the loss of the repeated tokens. Without either head they are as hard as new ones.


# %%
@nnx.jit
def losses_of_texts(model: rungs.GPT) -> jax.Array:
    return model.losses(jnp.asarray(tokens_BS[:, :-1]), jnp.asarray(tokens_BS[:, 1:]))


def halves(model: rungs.GPT) -> tuple[float, float]:
    """Return the losses of the first half and of the repeated tokens."""
    losses_BS = losses_of_texts(model)
    return float(losses_BS[:, : PERIOD - 1].mean()), float(losses_BS[:, PERIOD:].mean())


models = {"all heads": model} | {
    f"without layer {layer}": rungs.patch(model, {f"layer {layer} head 0": jnp.zeros_like})
    for layer in range(2)
}
first, repeated = zip(*map(halves, models.values()), strict=True)
place = np.arange(len(models))
plt.bar(place - 0.2, first, 0.4, label="first half")
plt.bar(place + 0.2, repeated, 0.4, label="repeated tokens")
plt.axhline(np.log(VOCAB), color="0.7", linestyle=":", label="guessing")
plt.xticks(place, list(models))
plt.ylabel("loss in nats")
plt.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.12))
plt.show()
for name, *both in zip(models, first, repeated, strict=True):
    print(f"{name}: first half {both[0]:.2f}, repeated tokens {both[1]:.2f} nats")
assert min(repeated[1:]) > repeated[0] + 0.5
