"""The device check in short: each kernel beside its plain form, then drivers and libraries."""

from collections.abc import Iterator

from benchmarks.gpu_parts.check_figures import converted
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from rungs.checks import device as check
from rungs.checks import kernels
from rungs.parallel import jax_setup
from rungs.parallel.sharding import one_device


def figures(setting: Setting) -> Iterator[Figure]:
    jax_setup.enable_compilation_cache()
    for dtype in ("bfloat16",) if setting.rehearse else ("bfloat16", "float32"):
        yield from converted(kernels.checks([dtype]))
    yield from (one for one in converted(check.machine(one_device())) if not _is_private(one))


def _is_private(figure: Figure) -> bool:
    """Return whether this is a setting of the machine, which may have its paths."""
    return figure.name == "system" or figure.name.isupper()
