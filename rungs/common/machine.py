"""What this machine has and allows: cores, memory, open files. A system that doesn't say counts as
one without a limit."""

from __future__ import annotations  # `command.py` also starts on an older Python

import contextlib
import math
import os
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


def memory_bytes() -> float:
    """Return the memory of this machine or container in bytes; infinity if unknown."""
    if not hasattr(os, "sysconf"):
        return math.inf
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # not a container, or no limit
        limit = min(limit, int(_CGROUP_LIMIT.read_text("utf-8")))
    return limit


def allow_open_files(wanted: int) -> float:
    """Let this process open this many files at once, if it may. Return how many it can."""
    if sys.platform == "win32":
        return math.inf
    import resource

    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few < wanted and few < most:
        few = min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    return few


def limits_file_size() -> bool:
    """Return whether files of this process may not grow beyond a limit (`ulimit -f`)."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def set_malloc(arena_max: int, mmap_max: int, trim_threshold: int) -> None:
    """Set parameters of glibc's malloc, if this process has it; mallopt(3) has their defaults."""
    import ctypes  # not needed by `--help`

    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_ARENA_MAX, arena_max)
        libc.mallopt(_MMAP_MAX, mmap_max)
        libc.mallopt(_TRIM_THRESHOLD, trim_threshold)
