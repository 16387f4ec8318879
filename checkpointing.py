"""List the checkpoints of a run, check and average them: `uv run checkpointing.py runs/a-to-a`.

Exit code 1 if a checkpoint is damaged. In Python, `import rungs; rungs.load_model(path)`
gives the model of a run, a checkpoint or a weights file.
"""

from typing import Any

import rungs
from rungs.cli import run


def __getattr__(name: str) -> Any:
    """Import `load_model` when it is asked for: it needs JAX, and the command doesn't."""
    return getattr(rungs, name)


if __name__ == "__main__":
    run("checkpointing")
