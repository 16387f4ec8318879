"""Which processor a benchmark ran on: two of the same name can differ by a factor of two."""

import os
import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_KEYS = ("model name", "cpu family", "model")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Return the processor's name, family and model, as far as the system says them, and how many
    cores this process may use."""
    values: dict[str, str] = {}
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            values.setdefault(key.strip(), value.strip())
    name, family, model = (values.get(key) for key in _KEYS)
    kind = f", family {family}, model {model}" if family and model else ""
    return f"{name or platform.processor() or platform.machine()}{kind}; {cores()} cores"
