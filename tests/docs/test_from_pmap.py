"""The page `docs/from-pmap.md`: its code prints what it says, and is that of notebook 07."""

import re
import subprocess
import sys

from tests.support.committed_runs import ROOT

PAGE = (ROOT / "docs" / "from-pmap.md").read_text(encoding="utf-8")
NOTEBOOK = (ROOT / "notebooks" / "07_many_devices.py").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_its_code_prints_what_it_says() -> None:
    command = [sys.executable, "-c", "\n".join(blocks("python"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rounded(done.stdout) == rounded("".join(blocks("text")))


def rounded(text: str) -> str:
    """Return a text whose fractions have three digits; further ones differ between versions."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", text)


def test_the_notebook_has_the_same_code() -> None:
    imports, *cells = blocks("python")
    for line in imports.splitlines():
        assert line.partition(" import ")[0] in NOTEBOOK
    for cell in cells:
        assert cell in NOTEBOOK
