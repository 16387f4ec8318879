"""Show the model of a run: as it is built, `uv run model.py runs/a-to-a`, or what it does with a
text, `uv run model.py runs/layers --look "def main():"`.

In Python, `from model import GPT` gives the model itself.
"""

from typing import Any

import rungs
from rungs.cli import run


def __getattr__(name: str) -> Any:
    """Import `GPT` when it is asked for: JAX takes seconds to import."""
    return getattr(rungs, name)


if __name__ == "__main__":
    run("model")
