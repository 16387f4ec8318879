"""Add LoRA adapters to a model (low-rank adaptation, Hu et al. 2021). Axes as in `gpt.py`."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from rungs.config.optimization_config import ATTENTION_TARGETS, LoraConfig
from rungs.model.gpt import GPT
from rungs.model.layers import Linear, LowRank, LowRankParam

LOW_RANK_NAMES = DOWN, UP = ("low_rank.down", "low_rank.up")


def add_lora(model: GPT, lora: LoraConfig, key: Array) -> None:
    """Add an adapter to each targeted projection of the blocks, in place. It outputs 0 at first."""
    assert model.blocks is not None
    for number, target in enumerate(lora.targets):
        in_attention = target in ATTENTION_TARGETS
        part = model.blocks.attention if in_attention else model.blocks.feed_forward
        linear: Linear = getattr(part, target)
        kernel = linear.kernel
        inputs = kernel.inputs
        layers, *shape = kernel[...].shape
        fan_in, fan_out = shape[:inputs], shape[inputs:]
        of_layers = {key: value for key, value in kernel.get_metadata().items() if key == "layers"}
        sigma = 1 / math.sqrt(math.prod(fan_in))
        down_key = jax.random.fold_in(key, number)
        linear.low_rank = LowRank(
            LowRankParam(
                sigma * jax.random.normal(down_key, (layers, *fan_in, lora.rank)),
                axes=(*kernel.axes[:inputs], "rank"),
                inputs=inputs,
                **of_layers,
            ),
            LowRankParam(
                jnp.zeros((layers, lora.rank, *fan_out), jnp.float32),
                axes=("rank", *kernel.axes[inputs:]),
                inputs=1,
                **of_layers,
            ),
            scale=lora.alpha / lora.rank,
        )
