"""GPT-2's step with one microbatch, beside PyTorch with the largest that fits."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import TorchSide, compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting

OURS = "microbatches of 96"
TORCH = {"PyTorch, faster attention": TorchSide("fastest", [96, 48, 32])}


def figures(setting: Setting) -> Iterator[Figure]:
    return compare(setting, [OURS], TORCH)
