"""Kernels that a compiled step runs in attention, experts and loss, and what its compiler did for
want of memory or registers.

The parts of the model are `jax.named_scope`s, which XLA keeps in the names of operations.
"""

import collections
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

PARTS = "attention", "experts", "loss"
"""Named scopes."""
XLA = "XLA"
"""Name shown for a part that has no kernels."""
_MAKERS = {
    "__cudnn$fmha": "cuDNN",
    "__gpu$xla.gpu.triton": "Pallas for Triton",
    "tpu_custom_call": "Pallas for Mosaic",
}
"""Where a kernel comes from, by the start of its custom call's target."""
_CUSTOM_CALL = re.compile(
    r'custom_call_target="([^"]+)"(?:.|\n(?!\s*(?:ROOT )?%))*?op_name="([^"]*)"'
)
"""Attributes of a kernel may have several lines."""
_SPILL = re.compile(r"Registers are spilled to local memory in function '([^']+)'")


class Kernels(NamedTuple):
    """Kernels of a compiled step, and what its compiler did for want of memory or registers."""

    calls: dict[str, dict[str, int]]
    """Calls in the program's text, by part of the model and by where the kernel comes from; parts
    without any are absent."""
    rematerialized: int
    """Instructions that the compiler repeats to save memory."""
    spilled: list[str]
    """GPU kernels that keep values in memory because they need too many registers."""


def is_kernel(target: str) -> bool:
    """Return whether the custom calls of a target are kernels, whose FLOPs XLA does not know."""
    return target.startswith(tuple(_MAKERS))


def kernels_of(program: str, log: list[str]) -> Kernels:
    """Return what a compiler made of a step.

    Args:
        program: the HLO text of the compiled step.
        log: lines that the compiler wrote meanwhile.
    """
    calls: dict[str, collections.Counter[str]] = {}
    for target, op_name in _CUSTOM_CALL.findall(program):
        part = next((part for part in PARTS if re.search(rf"\b{part}\b", op_name)), None)
        maker = next((name for start, name in _MAKERS.items() if target.startswith(start)), None)
        if part and maker:
            calls.setdefault(part, collections.Counter())[maker] += 1
    return Kernels(
        {part: dict(counts) for part, counts in calls.items()},
        len(re.findall(r"^\s*(?:ROOT )?%?[\w.-]+\.remat[\w.]* =", program, re.MULTILINE)),
        sorted(set(_SPILL.findall("".join(log)))),
    )


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Yield a list that gets the lines that C++ code writes to standard error in this context."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            lines += log.readlines()
