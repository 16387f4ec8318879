"""The step of a Llama of 1.1 billion parameters, with the matmuls of its blocks in FP8.

A process of its own: XLA's flags are others.
"""

from collections.abc import Iterator

from benchmarks.gpu_parts import llama
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting

CHANGES = {"matmul_dtype": "float8", "compute_dtype": "bfloat16"}


def figures(setting: Setting) -> Iterator[Figure]:
    return llama.step_figures(setting, CHANGES)
