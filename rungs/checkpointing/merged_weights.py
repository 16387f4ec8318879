"""Saved weights with LoRA merged in."""

from pathlib import Path

import numpy as np

from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.model.lora import DOWN, LOW_RANK_NAMES, UP


class MergedWeights(Weights):
    """Weights without LoRA tensors: each low-rank matmul is added to its kernel."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lora = self.header.train.lora if self.header.train else None

    def names(self) -> set[str]:
        """Return the names of all tensors but the low-rank ones."""
        if self._lora is None:
            return super().names()
        return {name for name in super().names() if not name.endswith(LOW_RANK_NAMES)}

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """As for `Weights`; also raise UserError if low-rank tensors do not fit their kernel."""
        super().check_tensors(shapes)
        low_rank = {name for name in super().names() if name.endswith(LOW_RANK_NAMES)}
        kernels = {name.removesuffix(DOWN).removesuffix(UP) + "kernel" for name in low_rank}
        lines = [
            f"{self.path}: tensor {name}: its low-rank tensors do not have matching shapes"
            for name in sorted(kernels)
            if not self._low_rank_fits(name)
        ]
        if lines:
            raise UserError("\n".join(lines))

    def _low_rank_fits(self, kernel: str) -> bool:
        """Return whether both low-rank tensors of a kernel exist and match its shape."""
        assert self._lora is not None
        down, up = (kernel.removesuffix("kernel") + end for end in LOW_RANK_NAMES)
        if not {kernel, down, up} <= super().names():
            return False
        into, out, rank = self.shape(down), self.shape(up), self._lora.rank
        stack = self.shape(kernel)[:1]
        is_of_rank = into[-1:] == out[1:2] == (rank,) and into[:1] == out[:1] == stack
        return is_of_rank and self.shape(kernel) == into[:-1] + out[2:]

    def array(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        """Return one tensor or a part of its first axes, merged in float32, in the dtype it is
        stored in. A kernel with a low-rank addition has parts along its first axis only."""
        kernel = super().array(name, part)
        prefix = name.removesuffix("kernel")
        if self._lora is None or prefix + DOWN not in super().names():
            return kernel
        assert len(part) <= 1
        down, up = super().array(prefix + DOWN, part), super().array(prefix + UP, part)
        stack, rank = len(kernel), down.shape[-1]
        added = down.reshape(stack, -1, rank) @ up.reshape(stack, rank, -1)
        scale = np.float32(self._lora.alpha / self._lora.rank)
        merged: np.ndarray = kernel.astype(np.float32) + scale * added.reshape(kernel.shape)
        return merged.astype(kernel.dtype)
