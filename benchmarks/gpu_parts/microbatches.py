"""The step of `runs/gpt2-small`, and with smaller microbatches."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import COMMITTED, VARIANTS

SMALLER = [name for name in VARIANTS if name.startswith("microbatches of")]


def figures(setting: Setting) -> Iterator[Figure]:
    return compare(setting, [*SMALLER, COMMITTED], {})
