"""The sides that `train_speed.py` compares, and the peak of the machine."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.side_process import Side, failure
from benchmarks.training_speed.matmul_peak import MOST
from benchmarks.training_speed.speed_table import PYTORCH, REFERENCE, Shape
from rungs.common.machine import core_count

LEARNING_RATE = 1e-4
"""So low that the loss falls smoothly without a warm-up, and sides that do the same end alike."""
RUNGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, layers in a loop": {"dtype": "bfloat16", "unroll": 1},
    "bfloat16, a device per core": {"dtype": "bfloat16", "devices": -1},
    "bfloat16, both": {"dtype": "bfloat16", "unroll": 1, "devices": -1},
}
TORCH: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "compiled": False},
    "float32, compiled": {"dtype": "float32", "compiled": True},
    "bfloat16": {"dtype": "bfloat16", "compiled": False},
    "bfloat16, compiled": {"dtype": "bfloat16", "compiled": True},
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes glibc ask for transparent huge pages: fewer page faults for memory that each step allocates
again."""
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Makes JAX allocate an accelerator's memory as it needs it, not most of it at once."""
FOLDER = Path(__file__).parent
Peaks = dict[tuple[str, str], float]
"""FLOPs per second of the fastest matmul, by library and dtype."""


def all_sides(shape: Shape, batches: Path, weights: Path, torch: list[str] | None) -> list[Side]:
    """Return all sides, ours first.

    Args:
        batches: a NumPy file of int32 tokens (steps, A, B, S + 1).
        weights: a file of `initial_weights.py`.
        torch: the command that runs PyTorch's scripts; None leaves PyTorch out.
    """
    common = {
        **dataclasses.asdict(shape),
        "batches": str(batches),
        "weights": str(weights),
        "learning_rate": LEARNING_RATE,
        "threads": core_count(),
        "devices": "auto",
    }

    def side(name: str, script: list[str], own: dict[str, Any], extra: dict[str, str]) -> Side:
        return Side(name, [*script, json.dumps(common | own)], extra)

    ours = jax_script("rungs_side.py")
    sides = [side(f"Rungs {name}", ours, own, SHARED_MEMORY) for name, own in RUNGS.items()]
    sides.append(side(REFERENCE, jax_script("plain_jax_side.py"), {}, SHARED_MEMORY))
    if torch:
        theirs = [*torch, str(FOLDER / "torch_side.py")]
        sides += [side(f"{PYTORCH} {name}", theirs, own, {}) for name, own in TORCH.items()]
        if platform.libc_ver()[0] == "glibc":
            sides.append(Side(f"{sides[-1].name}, huge pages", sides[-1].command, HUGE_PAGES))
    return sides


def jax_script(name: str) -> list[str]:
    """Return the command that runs a script beside this one in this Python."""
    return [sys.executable, str(FOLDER / name)]


def measure_peaks(torch: list[str] | None, largest: int = MOST) -> Peaks:
    """Time large matmuls of each library.

    Args:
        largest: rows of the largest matrices.

    Raises:
        ClickException: a measuring process failed.
    """
    scripts = {"jax": jax_script("matmul_peak.py")}
    if torch:
        scripts["torch"] = [*torch, str(FOLDER / "matmul_peak.py")]
    peaks: Peaks = {}
    for library, script in scripts.items():
        command = [*script, library, f"{core_count()}", f"{largest}"]
        environment = {**os.environ, **SHARED_MEMORY}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            raise click.ClickException(failure(f"matmuls of {library}", ended.stderr))
        peaks |= {(library, dtype): flops for dtype, flops in json.loads(ended.stdout).items()}
    return peaks
