"""The notebooks run from start to end; their own assertions check what they show. Next to each lies
the notebook that `execute.py` made of it."""

import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat import NotebookNode

from notebooks import execute
from tests.support.committed_runs import ROOT

SCRIPTS = execute.scripts([])
MAKE = "make it anew: uv run notebooks/execute.py"
LOCAL = re.compile(r"/(?:home|root|Users|work|mnt|opt|usr)/|site-packages|\x1b|\r")
"""Paths of a machine, colours of a terminal, and redrawn lines."""


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs(script: Path) -> None:
    assert outputs_of(execute.executed(script))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_executed_notebook_is_of_the_current_script(script: Path) -> None:
    notebook, source = read(script), jupytext.read(script)
    assert notebook.metadata.rungs.source == execute.checksum(script), f"{MAKE} {script.stem}"
    assert sources_of(notebook) == sources_of(source), f"{MAKE} {script.stem}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_executed_notebook_ran_once_from_start_to_end(script: Path) -> None:
    notebook = read(script)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = outputs_of(notebook)
    assert outputs
    assert "error" not in {output.output_type for output in outputs}
    assert "stderr" not in {output.get("name") for output in outputs}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_executed_notebook_is_of_no_machine(script: Path) -> None:
    notebook = read(script)
    for output in outputs_of(notebook):
        text = output.get("text") or output.data.get("text/plain", "")
        assert not LOCAL.search(text)
        assert str(ROOT) not in text
    assert set(notebook.metadata) == {"kernelspec", "language_info", "rungs"}
    assert not any(cell.metadata for cell in notebook.cells)
    assert script.with_suffix(".ipynb").stat().st_size < 500_000


def test_a_changed_helper_makes_notebooks_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = next(path for path in SCRIPTS if "from tools import" in path.read_text())
    before = execute.checksum(script)
    changed = tmp_path / "tools.py"
    changed.write_text("changed = True\n")
    monkeypatch.setattr(execute, "TOOLS", changed)
    assert execute.checksum(script) != before


def test_a_name_that_no_notebook_has_is_refused() -> None:
    assert [path.stem for path in execute.scripts(["07", "11"])] == [
        "07_many_devices",
        "11_look_inside",
    ]
    with pytest.raises(SystemExit, match="no notebook's name begins with 99"):
        execute.scripts(["07", "99"])


def read(script: Path) -> NotebookNode:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def sources_of(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]
