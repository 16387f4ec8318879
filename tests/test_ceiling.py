"""The package stays small enough to read. To raise the ceiling, say why in the commit."""

import tomllib

from tests.support.committed_runs import ROOT


def test_the_code_has_no_more_lines_than_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = [*ROOT.glob("*.py"), *(ROOT / "rungs").rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= project["tool"]["rungs"]["max-lines"], "shorten something, or raise the ceiling"
