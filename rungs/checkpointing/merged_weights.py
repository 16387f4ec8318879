"""Saved weights with their low-rank additions (LoRA) merged in."""

from pathlib import Path

import numpy as np

from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.model.lora import DOWN, LOW_RANK_NAMES, UP


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
