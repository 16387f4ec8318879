"""The variants that `--variant` names, beside the step that they change."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import COMMITTED


def figures(setting: Setting) -> Iterator[Figure]:
    others = [variant for variant in setting.variants if variant != COMMITTED]
    return compare(setting, [COMMITTED, *others], {})
