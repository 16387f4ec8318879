"""Set up JAX before it starts: compilation cache, memory, compiler flags, virtual CPU devices,
determinism. Once a backend runs, these settings have no effect, so import nothing that starts one.
"""

import contextlib
import ctypes
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import platformdirs

from rungs.config.optimization_config import OptimizationConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel import gpu_settings, numerics
from rungs.parallel.devices import cpu_device_count

TRUNCATED_ENTRY = r"Error reading persistent compilation cache entry for '(.+?)'"
WRITE_FAILURE = r"Error writing persistent compilation cache entry for '.+?': (.*)"
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # from <malloc.h>

log = logging.getLogger("rungs")


def prepare(
    train: OptimizationConfig,
    copy_bytes: Callable[[], int],
    recorded: ShardingConfig | None = None,
    processes: int = 1,
) -> None:
    """Set JAX up for a run; arguments as for `cpu_device_count`."""
    enable_compilation_cache()
    keep_freed_memory()
    gpu_settings.set_memory_share()
    gpu_settings.set_gpu_flags(train.microbatches_per_step)
    if train.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    with contextlib.suppress(RuntimeError):  # JAX has already started
        count = cpu_device_count(train, copy_bytes, recorded, processes)
        jax.config.update("jax_num_cpu_devices", count)


def settle(platform: str) -> None:
    """Undo what only helps on a CPU, once JAX has chosen a platform: cpu, gpu or tpu."""
    if platform != "cpu":
        _mallopt(arena_max=0, mmap_max=65_536, trim_threshold=128 * 1024)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory between steps instead of returning it to the system.

    Otherwise, on a CPU, the memory of each step is mapped and zeroed again, which took a fifth of
    the step. It must be set before JAX starts its threads, even if there turns out to be an
    accelerator: there it would keep the memory of every checkpoint's copy, so `settle` undoes it.
    """
    _mallopt(arena_max=1, mmap_max=0, trim_threshold=-1)


def _mallopt(arena_max: int, mmap_max: int, trim_threshold: int) -> None:
    """Set parameters of glibc's malloc; see mallopt(3), which has their defaults."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_ARENA_MAX, arena_max)
        libc.mallopt(_MMAP_MAX, mmap_max)
        libc.mallopt(_TRIM_THRESHOLD, trim_threshold)


def enable_compilation_cache() -> None:
    """Keep compiled code between starts, in the folder that JAX's environment variable names, else
    in the user's cache folder. Raises UserError if an environment variable asks for what Rungs
    can't do."""
    numerics.refuse_unusable()
    default = Path(platformdirs.user_cache_dir("rungs")) / "compiled"
    folder = Path(os.environ.get(CACHE_VARIABLE) or default)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _handle_cache_failures(folder)


def _handle_cache_failures(folder: Path) -> None:
    """Intercept JAX's warnings about the compilation cache; JAX then compiles without it. Truncated
    entries, left by a kill, are deleted: JAX never overwrites an entry, so it would warn at every
    start. A failed write is logged once."""
    show = warnings.showwarning
    has_warned = False

    def show_or_handle(message: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal has_warned
        if truncated := re.match(TRUNCATED_ENTRY, str(message)):
            with contextlib.suppress(OSError):
                for entry in folder.glob(f"{truncated[1]}-*"):
                    entry.unlink(missing_ok=True)
        elif failed := re.match(WRITE_FAILURE, str(message), re.DOTALL):
            if not has_warned:
                log.warning("%s: cannot write the compilation cache: %s", folder, failed[1])
            has_warned = True
        else:
            show(message, *args, **kwargs)

    warnings.showwarning = show_or_handle
