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
# # Flax Linen and NNX in one model
#
# Rungs is written in Flax NNX, whose modules hold their parameters. Linen, the older interface of
# Flax, keeps them outside, in a tree that you pass to `apply`. `flax.nnx.bridge` wraps a module of
# either kind for the other, so that code on Linen can use a `GPT`, and a `GPT` can have blocks of
# Linen. Each direction is compared here with the same mathematics without a bridge.

# %%
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen, nnx
from flax.nnx import bridge
from jax import Array

import rungs
from rungs.model.gpt import GPT

CONFIG = rungs.ModelConfig(vocab_size=32, context_length=16, emb_dim=32, n_layers=2, n_heads=4)
TOKENS_BS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 16)))
TARGETS_BS = jnp.roll(TOKENS_BS, -1, axis=1)


def loss_of(logits_BSV: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, TARGETS_BS).mean()


# %% [markdown]
# ## 1. A `GPT` as a Linen module
#
# `ToLinen` makes the module when `init` runs and gives it `nnx.Rngs`, so a class is needed that
# takes those. A `GPT` takes one key: that of the stream `params`. `metadata_fn=None` leaves the
# parameters plain arrays.


# %%
class FromRngs(GPT):
    def __init__(self, config: rungs.ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs.params())


linen_gpt = bridge.ToLinen(FromRngs, args=(CONFIG,), metadata_fn=None)
variables = linen_gpt.init(jax.random.key(0), TOKENS_BS)
shapes = jax.tree_util.tree_leaves_with_path(variables["params"])
for path, array in shapes[:6]:
    print(jax.tree_util.keystr(path, simple=True, separator="."), array.shape)

# %% [markdown]
# The names are those of Rungs, with all layers in one array. So the same arrays fit a `GPT` without
# a bridge: its logits are the same bits, and the gradients the same up to rounding.

# %%
plain = GPT(CONFIG, jax.random.key(5))
nnx.update(plain, variables["params"])
logits_BSV = jax.jit(linen_gpt.apply)(variables, TOKENS_BS)
np.testing.assert_array_equal(logits_BSV, nnx.jit(lambda model: model(TOKENS_BS))(plain))

of_linen = jax.grad(lambda v: loss_of(linen_gpt.apply(v, TOKENS_BS)))(variables)["params"]
of_nnx = nnx.grad(lambda model: loss_of(model(TOKENS_BS)))(plain)
pairs = zip(jax.tree.leaves(of_linen), jax.tree.leaves(of_nnx), strict=True)
largest = max(float(abs(a - b).max()) for a, b in pairs)
print(f"largest difference of a gradient: {largest:.1e}")
assert largest < 1e-6

# %% [markdown]
# It can be part of a larger Linen module, and be trained with Optax as any other.


# %%
class Scaled(linen.Module):
    @linen.compact
    def __call__(self, tokens_BS: Array) -> Array:
        scale = self.param("scale", linen.initializers.ones, ())
        gpt = bridge.ToLinen(FromRngs, args=(CONFIG,), metadata_fn=None, name="gpt")
        return scale * gpt(tokens_BS)


def train_linen(steps: int) -> list[float]:
    module, rule = Scaled(), optax.adam(0.01)
    params = module.init(jax.random.key(0), TOKENS_BS)
    state = rule.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, Array]:
        loss, gradient = jax.value_and_grad(lambda p: loss_of(module.apply(p, TOKENS_BS)))(params)
        updates, state = rule.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


linen_losses = train_linen(40)
assert linen_losses[-1] < linen_losses[0] - 1

# %% [markdown]
# ## 2. Linen blocks in a `GPT`
#
# `ToNNX` wraps a Linen module. `lazy_init` makes its variables from an input; `params` become
# `nnx.Param`, and other collections types of their own: `batch_stats` becomes `nnx.BatchStat`. This
# block has such statistics and dropout, which our own don't have.


# %%
class LinenBlock(linen.Module):
    drop_rate: float = 0.1

    @linen.compact
    def __call__(self, x_BSD: Array, train: bool = False) -> Array:
        y_BSD = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x_BSD)
        y_BSD = linen.Dense(x_BSD.shape[-1])(linen.gelu(y_BSD))
        return x_BSD + linen.Dropout(self.drop_rate, deterministic=not train)(y_BSD)


class AroundLinen(nnx.Module):
    """Embedding, final norm and head of a `GPT` around Linen blocks."""

    def __init__(self, config: rungs.ModelConfig, rngs: nnx.Rngs) -> None:
        self.gpt = GPT(config.model_copy(update={"n_layers": 0}), rngs.params())
        x_BSD = jnp.zeros((1, config.context_length, config.emb_dim))
        blocks = (bridge.ToNNX(LinenBlock(), rngs) for _ in range(config.n_layers))
        self.blocks = nnx.List(block.lazy_init(x_BSD) for block in blocks)

    def __call__(self, tokens_BS: Array, train: bool = False) -> Array:
        x_BSD = self.gpt.embed(tokens_BS, jnp.arange(tokens_BS.shape[-1]))
        for block in self.blocks:
            x_BSD = block(x_BSD, train=train, mutable=["batch_stats"] if train else False)
        return self.gpt.unembed(x_BSD)


model = AroundLinen(CONFIG, nnx.Rngs(params=0, dropout=1))
first = model.blocks[0]
for kind in (nnx.Param, nnx.BatchStat):
    print(kind.__name__, jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(first, kind))))

# %% [markdown]
# Without `train` nothing changes, and the block computes what Linen computes from the same arrays.

# %%
norm, dense = first.BatchNorm_0, first.Dense_0
arrays = {
    "params": {
        "BatchNorm_0": {name: norm[name][...] for name in ("scale", "bias")},
        "Dense_0": {name: dense[name][...] for name in ("kernel", "bias")},
    },
    "batch_stats": {"BatchNorm_0": {name: norm[name][...] for name in ("mean", "var")}},
}
x_BSD = model.gpt.embed(TOKENS_BS, jnp.arange(16))
np.testing.assert_allclose(first(x_BSD), LinenBlock().apply(arrays, x_BSD), atol=1e-6)
assert not first.BatchNorm_0["mean"][...].any()
np.testing.assert_array_equal(model(TOKENS_BS), model(TOKENS_BS))

# %% [markdown]
# `nnx.Optimizer` trains the parameters; the statistics follow the batches.


# %%
def train_nnx(model: AroundLinen, steps: int) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model: AroundLinen, optimizer: nnx.Optimizer) -> Array:
        loss, gradient = nnx.value_and_grad(lambda m: loss_of(m(TOKENS_BS, train=True)))(model)
        optimizer.update(model, gradient)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


nnx_losses = train_nnx(model, 40)
assert nnx_losses[-1] < nnx_losses[0] - 1
assert np.abs(first.BatchNorm_0["mean"][...]).max() > 0

plt.figure(figsize=(6, 3.2))
plt.plot(linen_losses, label="GPT in a Linen module")
plt.plot(nnx_losses, label="Linen blocks in a GPT")
plt.xlabel("step")
plt.ylabel("loss in nats per token")
plt.legend()
plt.show()

# %% [markdown]
# `train.py` trains models of `model.json` only; train a mixture in a loop of your own, as above. To
# bring the weights of a Linen model of transformers to Rungs, convert them to safetensors with
# transformers 4: `AutoModelForCausalLM.from_pretrained(FOLDER, from_flax=True)` and
# `save_pretrained(NEW_FOLDER)`. `pretrained.py import` reads the result.
