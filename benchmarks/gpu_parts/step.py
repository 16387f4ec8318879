"""GPT-2's step, beside PyTorch with the largest microbatch that fits."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import TorchSide, compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import COMMITTED

SIZES = 96, 48, 32
TORCH = {
    "PyTorch, cuDNN attention": TorchSide("cudnn", SIZES),
    "PyTorch, flash attention": TorchSide("flash", SIZES),
}
"""PyTorch chooses one of the two itself; the figures say which. Ours are divided by the faster."""


def figures(setting: Setting) -> Iterator[Figure]:
    return compare(setting, [COMMITTED], TORCH)
