"""GPT-2's step with microbatches of 32, beside PyTorch with the same."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import TorchSide, compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import BASE

TORCH = {
    "PyTorch, flash attention": TorchSide("flash", [32]),
    "PyTorch, cuDNN attention": TorchSide("cudnn", [32]),
}
"""PyTorch chooses one of the two itself; the figures say which."""


def figures(setting: Setting) -> Iterator[Figure]:
    return compare(setting, [BASE], TORCH)
