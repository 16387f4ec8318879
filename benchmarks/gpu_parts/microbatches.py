"""The step of `runs/gpt2-small`, and with other microbatches."""

from collections.abc import Iterator

from benchmarks.gpu_parts.comparison import compare
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import COMMITTED, VARIANTS, config_of, parse_variant

SIZES = [name for name in VARIANTS if name.startswith("microbatches of")]


def figures(setting: Setting) -> Iterator[Figure]:
    committed = _config(COMMITTED, setting)
    same = [name for name in SIZES if _config(name, setting) == committed]
    if same:
        yield Figure(COMMITTED, [], note=f"the same as {same[0]}")
    yield from compare(setting, SIZES if same else [*SIZES, COMMITTED], {})


def _config(name: str, setting: Setting) -> object:
    return config_of(parse_variant(name)[1], setting)
