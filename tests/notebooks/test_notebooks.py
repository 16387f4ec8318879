"""The notebooks run from start to end; their own assertions check what they show. Next to each lies
the notebook that `execute.py` made of it."""

import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat import NotebookNode

from notebooks import execute, opening
from notebooks.opening import without_opening
from tests.support.committed_runs import ROOT

SCRIPTS = execute.scripts([])
MAKE = "make it anew: uv run notebooks/execute.py"
OPEN = "write what is under titles anew: uv run notebooks/opening.py"
LOCAL = re.compile(r"/(?:home|root|Users|work|mnt|opt|usr)/|site-packages|\x1b|\r")
"""Paths of a machine, colours of a terminal, and redrawn lines."""


BRIEFLY = """
import tools
tools.train_briefly.__defaults__ = 20, 3e-3, 0
tools.compare_briefly.__defaults__ = (20,)
# %%
"""
SHORTER: dict[str, list[tuple[str, str]]] = {
    **{name: [("# %%\n", f"# %%{BRIEFLY}")] for name in ("02_gpt2", "03_llama")},
    "04_gemma": [("steps=120", "steps=20")],
    "05_mistral_mixtral": [("# %%\n", f"# %%{BRIEFLY}"), ("steps: int = 150", "steps: int = 15")],
    "09_fine_tune_and_chat": [
        *(("draw_questions(4000)", "draw_questions(400)"), ('"epochs": 3', '"epochs": 1')),
        ('"epochs": 5', '"epochs": 1'),
    ],
    "10_reinforcement": [
        ('"runs/parity-pretrain",', '"runs/parity-pretrain", "--set", "min_train_tokens=64000",'),
        *(("steps=25", "steps=3"), ("(25)", "(3)"), ("(0, 24)", "(0, 2)")),
        *(("checkpoint_interval=12", "checkpoint_interval=1"), ("step-000013", "step-000001")),
        *(('"steps": 20', '"steps": 2'), ("(20)", "(2)")),
    ],
    "11_look_inside": [('"max_steps": 1600', '"max_steps": 20')],
}
"""What notebooks train so short here that it takes seconds, without what they assert of it."""
OF_TRAINING = re.compile(r"^assert .*([<>]|PERIOD|==\s\"layer).*\n", re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs(script: Path, tmp_path: Path) -> None:
    source = script.read_text()
    for old, new in SHORTER.get(script.stem, []):
        assert old in source
        source = source.replace(old, new, 1 if old.startswith("#") else -1)
    short = tmp_path / script.name
    short.write_text(OF_TRAINING.sub("", source) if script.stem in SHORTER else source)
    assert outputs_of(execute.executed(short))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_executed_notebook_is_of_the_current_script(script: Path) -> None:
    notebook, source = read(script), jupytext.read(script)
    assert notebook.metadata.rungs.source == execute.checksum(script), f"{MAKE} {script.stem}"
    assert sources_of(without_opening(notebook)) == sources_of(source), f"{MAKE} {script.stem}"
    assert notebook == opening.with_opening(notebook, script.stem), OPEN


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_executed_notebook_ran_once_from_start_to_end(script: Path) -> None:
    notebook = read(script)
    cells = without_opening(notebook).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
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


def test_an_opening_leads_to_places_where_the_notebook_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = read(SCRIPTS[0])
    notebook.metadata.rungs.seconds = 100
    monkeypatch.setattr(opening, "REPOSITORY", "someone/rungs")
    _, about, code, *_ = opening.with_opening(notebook, "01_first_run").cells
    place = "github.com/someone/rungs/blob/main/notebooks/01_first_run.ipynb"
    assert "about 2 minutes of processor time" in about.source
    assert f"(https://colab.research.google.com/{place.replace('.com', '', 1)})" in about.source
    assert f"(https://kaggle.com/kernels/welcome?src=https://{place})" in about.source
    assert '"https://github.com/someone/rungs"' in code.source


def test_the_first_cell_gets_rungs_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[object]] = []

    def run(command: list[object], **_: object) -> None:
        commands.append(command)
        if command[0] == "git":
            (tmp_path / "rungs/notebooks").mkdir(parents=True)
            (tmp_path / "rungs/notebooks/tools.py").touch()

    cell = opening.GET_RUNGS.format(address="https://example.org/rungs")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(tmp_path)
    exec(cell)
    clone, install = commands
    assert clone[:2] == ["git", "clone"]
    assert clone[-2:] == ["https://example.org/rungs", tmp_path / "rungs"]
    assert install[1:] == ["-m", "pip", "install", "-q", tmp_path / "rungs"]
    assert Path.cwd() == tmp_path / "rungs/notebooks"
    assert sys.path[:2] == [str(Path.cwd()), str(tmp_path / "rungs")]
    exec(cell)
    monkeypatch.chdir(tmp_path)
    exec(cell)
    assert len(commands) == 2


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
