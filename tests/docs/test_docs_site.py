"""The docs site: its pages, and how links between them are written."""

import json
import tomllib
from pathlib import Path

import pytest

import rungs
from docs_site import build
from tests.support.committed_runs import ROOT


def nav_pages(node: object) -> list[str]:
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [page for child in children for page in nav_pages(child)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation() -> None:
    config = tomllib.loads((ROOT / "docs_site" / "zensical.toml").read_text())
    pages = {page.as_posix() for page in build.sources().values()}
    reference = {"reference/index.md", "reference/rungs.md"}
    assert set(nav_pages(config["project"]["nav"])) == pages | reference


def test_the_site_is_of_this_version() -> None:
    config = tomllib.loads((ROOT / "docs_site" / "zensical.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert config["site_name"] == f"Rungs {version}"
    assert config["site_dir"] == f"site/{version}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[plan](planning.md#cost)", "[plan](planning.md#cost)"),
        ("[the ladder](../runs/README.md)", "[the ladder](ladder.md)"),
        ("[code](../rungs/optim/optimizers.py)", "code"),
        ("![loss](images/ladder-curves.png)", "![loss](images/ladder-curves.png)"),
        ("[web](https://example.org/a)", "[web](https://example.org/a)"),
        ("```\n[x](y.py)\n```", "```\n[x](y.py)\n```"),
    ],
)
def test_links_are_rewritten(text: str, expected: str) -> None:
    assert build.with_own_links(text, ROOT / "docs" / "training.md", build.sources()) == expected


def test_the_reference_names_every_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PAGES", tmp_path)
    build.write_reference()
    text = (tmp_path / "reference" / "model.md").read_text()
    assert "::: rungs.model.gpt\n" in text
    public = (tmp_path / "reference" / "rungs.md").read_text().splitlines()
    assert [line for line in public if line.endswith(".load_model")] == [
        "::: rungs.checkpointing.load.load_model"
    ]
    assert sum(line.startswith("::: ") for line in public) == len(rungs.__all__)
    start = (tmp_path / "reference" / "index.md").read_text()
    assert "- [`rungs.step`](step.md): The compiled steps and the state they update.\n" in start
    assert "split into training and held-out items, and what answers" in start
    assert "from Python, begin with [the names of `import rungs`](rungs.md)" in start


def test_without_the_group_of_the_docs_a_line_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(build, "PAGES", tmp_path)
    with pytest.raises(SystemExit, match=r"zensical is not installed.*uv run --group docs"):
        build.main()
    assert tmp_path.exists()


def test_task_pages_fit_two_screens() -> None:
    for page in (ROOT / "docs" / "tasks").glob("*.md"):
        if page.stem != "use-from-python":  # cells of one notebook, for several tasks
            assert len(page.read_text(encoding="utf-8").splitlines()) <= 80, page


def test_a_notebook_is_a_page_with_its_outputs(tmp_path: Path) -> None:
    code = {"cell_type": "code", "id": "1", "metadata": {}, "execution_count": 1}
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": "3\n"},
        {"output_type": "stream", "name": "stdout", "text": "\n"},
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBO\n"}},
    ]
    cells = [
        {"cell_type": "markdown", "id": "0", "metadata": {}, "source": "# Sums"},
        {**code, "source": "print(1 + 2)", "outputs": outputs},
        {**code, "source": "get_rungs()", "outputs": [], "execution_count": None},
    ]
    path = tmp_path / "01_sums.ipynb"
    path.write_text(
        json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})
    )
    title, source, printed, drawn, origin = build.text_of(path).split("\n\n")
    assert title == "# Sums"
    assert source == "``` { .python }\nprint(1 + 2)\n```"
    assert printed == "``` { .text .output }\n3\n```"
    assert 'src="data:image/png;base64,iVBO"' in drawn
    assert "`notebooks/01_sums.py`" in origin
    assert '<a href="01_sums.ipynb" download>' in origin
