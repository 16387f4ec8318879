"""The multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2). Axes as in
`gpt.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.blocks import Block, Compute, keep_nothing, run_blocks
from rungs.model.feed_forward import Routing
from rungs.model.layers import Dropout, Linear, apply_norm, initializer, make_norm
from rungs.parallel.fsdp import no_gather

PREDICTION_KEY = 0x3D
"""Folded into a model's key for its prediction module."""


class PredictionModule(nnx.Module):
    """A layer, of the model's first kind with attention, on a projection of two normalized vectors:
    what predicted the next token, and that token's embedding. Token embedding and head are the
    model's."""

    def __init__(self, config: ModelConfig, model_key: Array) -> None:
        key, block_key = jax.random.split(jax.random.fold_in(model_key, PREDICTION_KEY))
        width, both = {"emb": config.emb_dim}, {"both": 2 * config.emb_dim}
        kind = next((kind for kind in config.layer_kinds() if kind != "delta_net"), "global")
        one = {"n_layers": 1, "n_dense_layers": 0, "value_embedding_every": None}
        self._layer = config.model_copy(update=one | {"layer_pattern": (kind,)})
        self.hidden_norm, self.embedding_norm = make_norm(config, width), make_norm(config, width)
        init = initializer(config, mup_power=0.5)
        self.projection = Linear(both, width, init, key, bias=False)
        self.blocks = nnx.vmap(functools.partial(Block, config))(jax.random.split(block_key, 1))
        self.final_norm = make_norm(config, width) if config.norm_placement != "after" else None

    def __call__(
        self, x_BSD: Array, known_BSD: Array, dropout: Dropout, compute: Compute, starts_BS: Any
    ) -> tuple[Array, Routing | None]:
        """Return what predicts the token after the next, before its norm, and the routing."""
        normed = apply_norm(self.hidden_norm, x_BSD), apply_norm(self.embedding_norm, known_BSD)
        x_BSD = self.projection(jnp.concatenate(normed, axis=-1))
        compute = compute._replace(gather=no_gather)  # gathered with all outside the model's blocks
        how = dropout, compute, keep_nothing, starts_BS
        x_BSD, _, routing = run_blocks(self.blocks, self._layer, x_BSD, *how)
        return x_BSD, routing
