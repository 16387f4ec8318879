"""The pages in `docs/tasks` do what they say: their files are written and their commands run, in a
copy of the checkout whose runs are short."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT

PAGES = ROOT / "docs" / "tasks"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/.-]+\.(?:py|toml))\n")
SHORT = {"min_train_tokens": 16_384, "validation_tokens": 2_048}
ONLY_READ = {
    "fine-tune-and-chat",
    "move-to-8-gpus",
    "add-a-layer",
    "add-a-metric",
    "add-a-verifier",
}
"""Pages whose commands need the network, GPUs, the tests themselves or minutes of training. That
their options exist is tested with those of all pages."""

UV = """#!{python}
import os, subprocess, sys

arguments = sys.argv[1:]
assert arguments.pop(0) == "run"
while arguments[0] == "--with-editable":
    package, arguments = arguments[1], arguments[2:]
    target = os.path.abspath("installed")
    install = ["{uv}", "pip", "install", "-q", "--offline", "--python", "{python}"]
    subprocess.run([*install, "--target", target, package], check=True)
    os.environ["PYTHONPATH"] = target
os.execv("{python}", ["{python}", *arguments])
"""
"""In place of uv, which would make another environment."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The commands with the package and short runs."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    for name in ("rungs", "schemas", "smoke_tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for run in ROOT.glob("runs/*/train.json"):
        copy = tmp_path / run.relative_to(ROOT).parent
        copy.mkdir(parents=True)
        shutil.copy(run.parent / "model.json", copy)
        (copy / "train.json").write_text(json.dumps(json.loads(run.read_text()) | SHORT))
    (tmp_path / "books").mkdir()
    for page in ROOT.glob("docs/*.md"):
        shutil.copy(page, tmp_path / "books" / f"{page.stem}.txt")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable, uv=shutil.which("uv")))
    uv.chmod(0o755)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [p for p in sorted(PAGES.glob("*.md")) if p.stem not in ONLY_READ], ids=lambda p: p.stem
)
def test_commands_run(page: Path, checkout: Path) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    for _, text in blocks:
        if named := FILE.match(text):
            path = checkout / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    commands = [text for kind, text in blocks if kind == "sh"]
    assert commands
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=checkout,
        env=os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
