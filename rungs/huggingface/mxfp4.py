"""Reads tensors in MXFP4 (Open Compute Project, Microscaling Formats 1.0): floats of 4 bits, one of
sign, two of exponent and one of mantissa, with a power of two for each 32 of them."""

import ml_dtypes
import numpy as np

from rungs.checkpointing.weights_file import TensorSpec, bits
from rungs.huggingface.tensors import TensorFolder

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of a tensor's two parts, as GPT-OSS has them."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
_SCALE_BIAS = 127


class Mxfp4Folder(TensorFolder):
    """A `TensorFolder` whose tensors in MXFP4 look like bfloat16, which holds them exactly, with
    their last two axes swapped: blocks are along the inputs, which GPT-OSS has first elsewhere."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._packed = dict[str, tuple[str, str]]()
        for name in [name for name in self.specs if name.endswith(BLOCKS)]:
            whole = name.removesuffix(BLOCKS)
            scales, spec = whole + SCALES, self.specs[name]
            if scales in self.specs and spec.dtype == "U8" and len(spec.shape) > 2:
                *leading, rows, blocks, size = spec.shape
                del self.specs[name], self.specs[scales]
                shape = *leading, blocks * 2 * size, rows
                self.specs[whole] = TensorSpec("bfloat16", shape)
                self._packed[whole] = name, scales

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        if name not in self._packed:
            return super().bits(name)
        return bits(unpack(*(super(Mxfp4Folder, self).bits(part) for part in self._packed[name])))


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return values in bfloat16 from blocks (…, outputs, n, 16) of two values a byte, the lower 4
    bits first, and scales (…, outputs, n): (…, inputs, outputs)."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    powers = scales.astype(np.int32)[..., None] - _SCALE_BIAS
    values = np.ldexp(_VALUES[pairs], powers).astype(ml_dtypes.bfloat16)
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
