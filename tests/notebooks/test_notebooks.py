"""The notebooks run from start to end; their own assertions check what they show."""

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

from tests.support.committed_runs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
SECONDS_PER_CELL = 300
"""On a busy machine; each notebook takes less than 90 seconds on a quiet one."""


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    notebook = jupytext.read(path)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources=place
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
