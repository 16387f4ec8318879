"""Our `GPT` as a Flax Linen module, and Linen modules inside our `GPT`, through `flax.nnx.bridge`
(https://flax.readthedocs.io/en/stable/guides/bridge_guide.html)."""

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx import bridge
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.gpt import GPT
from rungs.model.layers import NO_DROPOUT, Dropout

DROPOUT = "dropout"
"""The random stream for dropout, named as in Linen's `Dropout`."""


class LinenGPT(linen.Module):
    """A `GPT` as a Linen module, alone or inside another.

    `init` and `apply` are Linen's. The collection `params` is a plain tree of arrays with the names
    and shapes of our parameters. The same key gives other initial values than `GPT`, as Linen
    derives its own keys. `apply` with a `drop_rate` above 0 needs `rngs={"dropout": key}`."""

    config: ModelConfig
    drop_rate: float = 0.0
    """Probability with which `apply` zeroes an element, below 1."""

    @linen.compact
    def __call__(self, tokens_BS: Array, deterministic: bool = True) -> Array:
        """Return logits_BSV, float32; `deterministic` turns dropout off."""
        dropout = NO_DROPOUT
        if self.drop_rate and not deterministic:
            rows_B = jnp.arange(len(tokens_BS))
            dropout = Dropout.of(self.drop_rate, self.make_rng(DROPOUT), rows_B)
        model = bridge.ToLinen(_GPTFromRngs, args=(self.config,), metadata_fn=None, name="gpt")
        logits_BSV: Array = model(tokens_BS, dropout)
        return logits_BSV


class _GPTFromRngs(GPT):
    """A `GPT` that takes its key from the `params` stream of `Rngs`, as the bridge requires."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs.params())


class GPTAroundLinen(nnx.Module):
    """Embedding, final norm and head of a `GPT` around Linen blocks, each from x_BSD to x_BSD.

    The blocks' `params` become `nnx.Param`s, and their other collections the variable types that
    the bridge chooses: `batch_stats` becomes `nnx.BatchStat`. Train it with `nnx.Optimizer`:
    `train.py` only trains models of `model.json`.

    Args:
        config: of embedding, norm and head; `n_layers` is the number of blocks.
        block: a Linen module.
        rngs: with the streams `params` and those of the block, such as `dropout`.
        mutable: the collections that a call updates, such as `batch_stats`."""

    def __init__(
        self,
        config: ModelConfig,
        block: linen.Module,
        rngs: nnx.Rngs,
        mutable: tuple[str, ...] = (),
    ) -> None:
        self.mutable = mutable
        self.gpt = GPT(config.model_copy(update={"n_layers": 0}), rngs.params())
        x_BSD = jnp.zeros((1, config.context_length, config.emb_dim))
        self.blocks = nnx.List(
            bridge.ToNNX(block.clone(), rngs).lazy_init(x_BSD) for _ in range(config.n_layers)
        )

    def __call__(self, tokens_BS: Array, **arguments: Any) -> Array:
        """Return logits_BSV, float32. The arguments are passed to the blocks."""
        x_BSD = self.gpt.embed(tokens_BS, jnp.arange(tokens_BS.shape[-1]))
        for block in self.blocks:
            x_BSD = block(x_BSD, mutable=list(self.mutable) or False, **arguments)
        return self.gpt.unembed(x_BSD)
