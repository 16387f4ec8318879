"""What this machine has: cores and memory. A system that doesn't say counts as one without a
limit."""

import contextlib
import ctypes
import os
import platform
import sys
from pathlib import Path

_CPU_INFO, _CGROUP_LIMIT = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/memory.max")
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # from <malloc.h>


def core_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_description() -> str:
    """Return what Linux says about the cores, else an empty text."""
    return _CPU_INFO.read_text("utf-8", "replace") if _CPU_INFO.exists() else ""


def processor() -> str:
    """Return the processor's name, family and model, as far as the system says them, and how many
    cores this process may use: two of the same name can differ by a factor of two."""
    values: dict[str, str] = {}
    for line in cpu_description().splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    name, family, model = map(values.get, ("model name", "cpu family", "model"))
    kind = f", family {family}, model {model}" if family and model else ""
    return f"{name or platform.processor() or platform.machine()}{kind}; {core_count()} cores"


def memory_bytes() -> float:
    """Return the memory of this machine or container in bytes."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # not a container, or no limit
        limit = min(limit, int(_CGROUP_LIMIT.read_text("utf-8")))
    return limit


def set_malloc(arena_max: int, mmap_max: int, trim_threshold: int) -> None:
    """Set parameters of glibc's malloc, if this process has it; mallopt(3) has their defaults."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_ARENA_MAX, arena_max)
        libc.mallopt(_MMAP_MAX, mmap_max)
        libc.mallopt(_TRIM_THRESHOLD, trim_threshold)
