"""GPT-2's step, beside PyTorch with the largest microbatch that fits."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import TorchSide, compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import COMMITTED

SIZES = 96, 48, 32
TORCH = {"PyTorch": TorchSide("default", SIZES)}
"""With the attention that PyTorch chooses itself; the figures say which."""


def figures(setting: Setting) -> Iterator[Figure]:
    return compare(setting, [COMMITTED], TORCH)
