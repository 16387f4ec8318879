"""JAX set up before it starts: compiled-code cache, virtual CPU devices, determinism.

Import nothing here that starts a backend; once one runs, these settings come too late.
"""

import contextlib
import ctypes
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import platformdirs

from rungs.config.train_config import ShardingConfig, TrainConfig
from rungs.parallel.devices import cpu_devices

TORN_ENTRY = r"Error reading persistent compilation cache entry for '(.+?)'"
UNWRITTEN_ENTRY = r"Error writing persistent compilation cache entry for '.+?': (.*)"
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of mallopt, as <malloc.h> numbers them."""

log = logging.getLogger("rungs")


def prepare(train: TrainConfig, recorded: ShardingConfig | None = None, processes: int = 1) -> None:
    """Set JAX up for a run.

    Args:
        recorded: mesh of the run's last checkpoint.
        processes: that train it together.
    """
    cache_compiled_code()
    keep_freed_memory()
    if train.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices it has
        jax.config.update("jax_num_cpu_devices", cpu_devices(train, recorded, processes))


def keep_freed_memory() -> None:
    """Have the C library keep what a step frees for the next, instead of giving it back to the
    system: on a CPU the pages of a step would be mapped, and zeroed, anew every time, which took a
    fifth of it. Only with glibc; see mallopt(3)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)):
            libc.mallopt(parameter, value)


def cache_compiled_code() -> None:
    """Keep compiled code between starts, in the user's cache folder unless JAX's own variable
    names another."""
    default = Path(platformdirs.user_cache_dir("rungs")) / "compiled"
    folder = Path(os.environ.get(CACHE_VARIABLE) or default)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _see_to_troubles(folder)


def _see_to_troubles(folder: Path) -> None:
    """Do without a cache that fails, where JAX warns of it; it compiles anew then.

    Entries that a kill left half-written are deleted: JAX never overwrites one, and so would warn
    of it at every start. A cache that cannot be written is told once.
    """
    show = warnings.showwarning
    has_told = False

    def show_or_mend(message: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal has_told
        if torn := re.match(TORN_ENTRY, str(message)):
            with contextlib.suppress(OSError):
                for entry in folder.glob(f"{torn[1]}-*"):
                    entry.unlink(missing_ok=True)
        elif failed := re.match(UNWRITTEN_ENTRY, str(message), re.DOTALL):
            if not has_told:
                log.warning("%s: compiled code is not kept for later starts: %s", folder, failed[1])
            has_told = True
        else:
            show(message, *args, **kwargs)

    warnings.showwarning = show_or_mend
