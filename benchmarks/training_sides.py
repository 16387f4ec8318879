"""The sides of `train_speed.py`: which there are, and each as a process that trains when told."""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import click

from benchmarks.speed_table import PYTORCH, REFERENCE, Shape

LEARNING_RATE = 1e-3
OURS: dict[str, dict[str, Any]] = {
    "rungs float32": {"dtype": "float32"},
    "rungs bfloat16": {"dtype": "bfloat16"},
    "rungs bfloat16, unrolled": {"dtype": "bfloat16", "is_unrolled": True},
    "rungs bfloat16, one device": {"dtype": "bfloat16", "devices": 1},
    "rungs bfloat16, one device, unrolled": {
        "dtype": "bfloat16",
        "devices": 1,
        "is_unrolled": True,
    },
}
BFLOAT16_COMPILED = {"dtype": "bfloat16", "compiled": True}
THEIRS: dict[str, dict[str, Any]] = {
    f"{PYTORCH} float32": {"dtype": "float32", "compiled": False},
    f"{PYTORCH} float32, compiled": {"dtype": "float32", "compiled": True},
    f"{PYTORCH} bfloat16": {"dtype": "bfloat16", "compiled": False},
    f"{PYTORCH} bfloat16, compiled": BFLOAT16_COMPILED,
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has glibc ask for transparent huge pages, so that memory which is taken anew for each step costs
fewer page faults."""
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Has JAX take of an accelerator's memory what it needs, not most of it at once."""
FOLDER = Path(__file__).parent
LAST_LINES = 15
Peaks = dict[str, dict[str, float]]
"""FLOP per second of the fastest matrix product, by library and type."""


class SidePlan(NamedTuple):
    """How a side is started."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


def plans(shape: Shape, batches: Path, torch: list[str] | None) -> list[SidePlan]:
    """All sides, ours first.

    Args:
        batches: int32 tokens (steps, A, B, S + 1), a file of NumPy's.
        torch: what runs PyTorch's script; None leaves it out.
    """
    common = {
        **dataclasses.asdict(shape),
        "batches": str(batches),
        "learning_rate": LEARNING_RATE,
        "threads": cores(),
        "devices": "auto",
    }

    def plan(name: str, script: list[str], own: dict[str, Any], extra: dict[str, str]) -> SidePlan:
        return SidePlan(name, [*script, json.dumps(common | own)], extra)

    ours, plain = jax_script("our_training.py"), jax_script("plain_loop.py")
    found = [plan(name, ours, own, SHARED_MEMORY) for name, own in OURS.items()]
    found.append(plan(REFERENCE, plain, {}, SHARED_MEMORY))
    if torch:
        script = [*torch, str(FOLDER / "torch_training.py")]
        found += [plan(name, script, own, {}) for name, own in THEIRS.items()]
        if platform.libc_ver()[0] == "glibc":
            name = f"{PYTORCH} bfloat16, compiled, huge pages"
            found.append(plan(name, script, BFLOAT16_COMPILED, HUGE_PAGES))
    return found


def jax_script(name: str) -> list[str]:
    """What runs a script beside this one in this Python."""
    return [sys.executable, str(FOLDER / name)]


def peaks(torch: list[str] | None) -> Peaks:
    """Measure matrix products by each library.

    Raises:
        ClickException: a process that measures ended otherwise.
    """
    scripts = {"jax": jax_script("matmul_peak.py")}
    if torch:
        scripts["torch"] = [*torch, str(FOLDER / "matmul_peak.py")]
    found = {}
    for library, script in scripts.items():
        command = [*script, library, str(cores())]
        ended = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **SHARED_MEMORY}
        )
        if ended.returncode:
            raise click.ClickException(last_words(f"matrix products, {library}", ended.stderr))
        found[library] = json.loads(ended.stdout)
    return found


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def started(plan: SidePlan) -> Iterator["Side"]:
    """A side's process, which ends with the context."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            plan.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **plan.environment},
        )
        try:
            yield Side(plan.name, process, errors)
        finally:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


class Side(NamedTuple):
    """A process that trains when it is told to."""

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]
    """What it has written to stderr."""

    def turn(self, steps: int) -> tuple[float, float]:
        """Train so many steps.

        Returns:
            Seconds from asking to the answer, and the last step's loss.

        Raises:
            ClickException: the process ended.
        """
        assert self.process.stdin
        assert self.process.stdout
        begin = time.perf_counter()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        seconds = time.perf_counter() - begin
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise click.ClickException(last_words(self.name, self.errors.read()))
        _, loss = json.loads(line)
        return seconds, loss


def last_words(name: str, errors: str) -> str:
    """What to say of a process that ended too early."""
    return "\n".join([f"{name}: its process ended:", *errors.splitlines()[-LAST_LINES:]])
