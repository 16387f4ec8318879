"""Low-rank adaptation (LoRA, Hu et al. 2021): added to a model, and merged into its weights."""

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from errors import UserError
from layers import Linear, LowRank, LowRankParam
from model import GPT
from train_config import ATTENTION_TARGETS, LoraConfig
from weights_file import Weights

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


class MergedWeights(Weights):
    """Weights as they would be without LoRA: each product of low rank is added to the kernel it
    stands beside."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lora = self.header.train.lora if self.header.train else None

    def names(self) -> set[str]:
        """Names of all tensors but the low-rank ones of the training they are from."""
        if self._lora is None:
            return super().names()
        return {name for name in super().names() if not name.endswith(LOW_RANK_NAMES)}

    def refuse_other_than(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """As that of `Weights`, also where a product of low rank is not of its kernel's shape."""
        super().refuse_other_than(shapes)
        low_rank = {name for name in super().names() if name.endswith(LOW_RANK_NAMES)}
        kernels = {name.removesuffix(DOWN).removesuffix(UP) + "kernel" for name in low_rank}
        if misfits := sorted(name for name in kernels if not self._product_fits(name)):
            lines = [
                f"{self.path}: tensor {name}: its low-rank product misfits" for name in misfits
            ]
            raise UserError("\n".join(lines))

    def _product_fits(self, name: str) -> bool:
        """Whether the two tensors beside a kernel are there, and of the shapes that it needs."""
        assert self._lora is not None
        down, up = (name.removesuffix("kernel") + end for end in LOW_RANK_NAMES)
        if not {name, down, up} <= super().names():
            return False
        into, out, rank = self.shape(down), self.shape(up), self._lora.rank
        stack = self.shape(name)[:1]
        is_of_rank = into[-1:] == out[1:2] == (rank,) and into[:1] == out[:1] == stack
        return is_of_rank and self.shape(name) == into[:-1] + out[2:]

    def array(self, name: str) -> np.ndarray:
        """One tensor, merged in float32, in the type it is stored in."""
        kernel = super().array(name)
        beside = name.removesuffix("kernel")
        if self._lora is None or beside + DOWN not in super().names():
            return kernel
        down, up = super().array(beside + DOWN), super().array(beside + UP)
        stack, rank = len(kernel), down.shape[-1]
        added = down.reshape(stack, -1, rank) @ up.reshape(stack, rank, -1)
        scale = np.float32(self._lora.alpha / self._lora.rank)
        merged: np.ndarray = kernel.astype(np.float32) + scale * added.reshape(kernel.shape)
        return merged.astype(kernel.dtype)


def _targeted(model: GPT, lora: LoraConfig) -> Iterator[Linear]:
    if model.blocks is not None:
        for target in lora.targets:
            in_attention = target in ATTENTION_TARGETS
            part = model.blocks.attention if in_attention else model.blocks.feed_forward
            yield getattr(part, target)
