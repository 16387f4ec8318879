"""What every part of a GPU session is told."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Self

import click

ROOT = Path(__file__).parents[2]
GPT2_SMALL = ROOT / "runs/gpt2-small"
NEEDS_GPU = "RUNGS_BENCHMARK_NEEDS_GPU"
"""Environment variable that makes PyTorch's scripts end where PyTorch sees no GPU."""


class Setting(NamedTuple):
    """How to measure; travels to the process of each part as JSON."""

    rehearse: bool
    """With tiny shapes on a CPU, each thing once."""
    torch: list[str] | None
    """The command that runs scripts that need PyTorch; None leaves PyTorch out."""
    variants: list[str]
    """Of the step, for the part that compares them."""
    race: str | None = None
    """The folder with the race's dataset."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def as_json(self) -> str:
        return json.dumps(self._asdict())


class Torch(NamedTuple):
    """A PyTorch to compare with."""

    command: list[str] | None
    """Runs scripts that need PyTorch; None without one."""
    versions: dict[str, str]
    """Of the distributions in `TORCH_LIBRARIES`, as far as they are known."""


NO_TORCH = Torch(None, {})
TORCH_LIBRARIES = "torch", "transformers", "triton", "nvidia-cudnn-cu13"
_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def find_torch(python: str | None, rehearse: bool, without: bool) -> Torch:
    """Return the PyTorch of the Python that is named, of this one, or uv's, which downloads it.

    A rehearsal downloads nothing and does without. So does a measurement that is asked to.

    Raises:
        UsageError: the Python that is named has no PyTorch, or there is none to measure with.
    """
    if without:
        return NO_TORCH
    versions = _versions(python or sys.executable)
    if "torch" in versions:
        return Torch([python or sys.executable], versions)
    if python:
        raise click.UsageError(f"--torch-python {python}: has no PyTorch")
    if rehearse:
        return NO_TORCH
    if shutil.which("uv") is None:
        raise click.UsageError(
            "no PyTorch to compare with: name a Python that has it with --torch-python, or leave it"
            " out with --without-torch"
        )
    return Torch(["uv", "run", "--no-project", "--script"], {})


def _versions(python: str) -> dict[str, str]:
    command = [python, "-c", _VERSIONS, *TORCH_LIBRARIES]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(json.loads(shown))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}
