"""What `docs/architecture.md` and the docstrings of packages say about where things are."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rungs.cli import train
from rungs.model.kernels import blockwise_attention
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import make_dataset, make_run

PAGE = ROOT / "docs" / "architecture.md"
LISTED = re.compile(r"\s*((?:\w+/?, )*\w+/?)\s{2,}\S")
STEP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)`, `(?P<function>[\w.]+)`", re.MULTILINE)
MOST_CALLS_TO_THE_GRADIENT, MOST_CALLS_TO_ATTENTION = 8, 11


@pytest.mark.parametrize(
    "package",
    sorted(path.parent for path in (ROOT / "rungs").rglob("__init__.py")),
    ids=lambda package: package.relative_to(ROOT).as_posix(),
)
def test_a_package_lists_exactly_its_files(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""
    listed = {
        name.strip("/")
        for line in text.splitlines()
        if (found := LISTED.match(line))
        for name in found[1].split(", ")
    }
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    assert modules | packages <= listed
    known = {path.stem for path in (ROOT / "rungs").rglob("*.py")}
    assert listed & known <= modules | packages | {package.name}


class Traced(Exception):
    """Raised when the calls are known."""


def test_the_way_of_a_batch_is_as_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []

    def kernel(*_: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT / "rungs") or file == ROOT / "train.py":
                place = file.relative_to(ROOT).as_posix()
                name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
                calls.insert(0, (place, name))
            frame = frame.f_back  # type: ignore[assignment]
        raise Traced

    monkeypatch.setattr(blockwise_attention, "causal_attention", kernel)
    make_dataset(tmp_path)
    run = make_run(tmp_path / "run", drop_rate=0.0)
    with pytest.raises(Traced):
        train.main([str(run.path), "--datasets-dir", str(tmp_path)], standalone_mode=False)
    calls.append(("rungs/model/kernels/blockwise_attention.py", "causal_attention"))
    section = PAGE.read_text().split("## The way of a batch")[1].split("\n## ")[0]
    assert [step.groups() for step in STEP.finditer(section)] == calls
    gradient = [name for _, name in calls].index("loss")
    assert gradient <= MOST_CALLS_TO_THE_GRADIENT
    assert len(calls) - gradient <= MOST_CALLS_TO_ATTENTION
