"""What an executed notebook has under its title and its script has not: how long it takes, links
that open it elsewhere, and a cell that gets Rungs there. `uv run notebooks/opening.py` writes it
anew into all notebooks, without executing them."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

REPOSITORY = ""
"""`owner/name` of the project on GitHub. A maintainer sets it before a release (CONTRIBUTING.md);
until then there are no links, and readers name their own copy."""
COPY = "YOUR-COPY-OF-RUNGS"
GET_RUNGS = """\
# In Colab and Kaggle this gets Rungs; in a clone it does nothing.
import os
import subprocess
import sys
from pathlib import Path

if not Path("tools.py").exists():
    clone = Path("rungs").resolve()
    if not clone.exists():
        subprocess.run(["git", "clone", "--depth=1", "{address}", clone], check=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", clone], check=True)
    sys.path[:0] = [str(clone / "notebooks"), str(clone)]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.chdir(clone / "notebooks")"""
_ID = "opening-"


def main() -> None:
    """Write the openings of all executed notebooks."""
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbformat.write(with_opening(notebook, path.stem), path)


def with_opening(notebook: NotebookNode, name: str) -> NotebookNode:
    """Return a notebook with a new opening behind its first cell. Its metadata say how many seconds
    of processor time its cells took."""
    address = f"https://github.com/{REPOSITORY}" if REPOSITORY else COPY
    opening = [
        new_markdown_cell(f"*{_duration(notebook.metadata.rungs.seconds)} {_places(name)}*"),
        new_code_cell(GET_RUNGS.format(address=address)),
    ]
    for number, cell in enumerate(opening):
        cell.id = f"{_ID}{number}"
    first, *others = without_opening(notebook).cells
    return NotebookNode({**notebook, "cells": [first, *opening, *others]})


def without_opening(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook with the cells of its script alone."""
    cells = [cell for cell in notebook.cells if not cell.get("id", "").startswith(_ID)]
    return NotebookNode({**notebook, "cells": cells})


def _duration(seconds: int) -> str:
    minutes = max(round(seconds / 60), 1)
    unit = "minute" if minutes == 1 else "minutes"
    return f"A CPU is enough: all cells together take about {minutes} {unit} of processor time."


def _places(name: str) -> str:
    if not REPOSITORY:
        return (
            "To run it in Colab or Kaggle, upload this notebook there, and put the address of your"
            " copy of Rungs into its first cell of code."
        )
    place = f"{REPOSITORY}/blob/main/notebooks/{name}.ipynb"
    colab = f"https://colab.research.google.com/github/{place}"
    kaggle = f"https://kaggle.com/kernels/welcome?src=https://github.com/{place}"
    return f"Open it in [Colab]({colab}) or [Kaggle]({kaggle}); its first cell of code gets Rungs."


if __name__ == "__main__":
    main()
