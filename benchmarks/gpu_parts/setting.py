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


class Setting(NamedTuple):
    """How to measure; travels to the process of each part as JSON."""

    rehearse: bool
    """With tiny shapes on a CPU, each thing once."""
    torch: list[str] | None
    """The command that runs scripts that need PyTorch; None leaves PyTorch out."""
    variants: list[str]
    """Of the step, for the part that compares them."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def as_json(self) -> str:
        return json.dumps(self._asdict())


def find_torch(python: str | None, rehearse: bool) -> list[str] | None:
    """Return the command that runs scripts that need PyTorch: of the Python that is named, of this
    one if it has PyTorch, or uv's, which downloads it; a rehearsal downloads nothing.

    Raises:
        UsageError: the Python that is named has no PyTorch.
    """
    if python:
        if not _has_torch(python):
            raise click.UsageError(f"--torch-python {python}: cannot import torch and transformers")
        return [python]
    if _has_torch(sys.executable):
        return [sys.executable]
    if rehearse or shutil.which("uv") is None:
        return None
    return ["uv", "run", "--no-project", "--script"]


def _has_torch(python: str) -> bool:
    needed = "u.find_spec('torch') and u.find_spec('transformers')"
    check = f"import importlib.util as u; exit(not ({needed}))"
    try:
        return subprocess.run([python, "-c", check], capture_output=True).returncode == 0
    except OSError:
        return False
