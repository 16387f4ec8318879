"""Low-rank adaptation (LoRA, Hu et al. 2021): added to a model."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from rungs.config.train_config import ATTENTION_TARGETS, LoraConfig
from rungs.model.gpt import GPT
from rungs.model.layers import Linear, LowRank, LowRankParam

LOW_RANK_NAMES = DOWN, UP = ("low_rank.down", "low_rank.up")


def add_low_rank(model: GPT, lora: LoraConfig, key: Array) -> None:
    """Put a product of low rank beside each targeted projection of the blocks; it is 0 at first."""
    for number, linear in enumerate(_targeted(model, lora)):
        kernel = linear.kernel
        inputs = kernel.inputs
        stack, *shape = kernel[...].shape
        into, out = shape[:inputs], shape[inputs:]
        sigma = 1 / math.sqrt(math.prod(into))
        down_key = jax.random.fold_in(key, number)
        linear.low_rank = LowRank(
            LowRankParam(
                sigma * jax.random.normal(down_key, (stack, *into, lora.rank)),
                axes=(*kernel.axes[:inputs], "rank"),
                inputs=inputs,
            ),
            LowRankParam(
                jnp.zeros((stack, lora.rank, *out), jnp.float32),
                axes=("rank", *kernel.axes[inputs:]),
                inputs=1,
            ),
            scale=lora.alpha / lora.rank,
        )


def _targeted(model: GPT, lora: LoraConfig) -> Iterator[Linear]:
    if model.blocks is not None:
        for target in lora.targets:
            in_attention = target in ATTENTION_TARGETS
            part = model.blocks.attention if in_attention else model.blocks.feed_forward
            yield getattr(part, target)
