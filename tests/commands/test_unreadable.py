"""Commands on files and folders that this user may not read, or that are not theirs to replace."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_script
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import make_dataset, make_run

WITHOUT_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Begins a command to which permissions apply even if root runs it."""
TRAIN = ("train.py", "run", "--datasets-dir", "datasets")


@pytest.mark.skipif(
    not os.geteuid() and shutil.which("setpriv") is None, reason="root may read all files"
)
@pytest.mark.parametrize(
    ("unreadable", "command"),
    [
        ("run/metrics.jsonl", ("plan.py", "run", "--datasets-dir", "datasets")),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("run/metrics.jsonl", ("charts.py", "run", "--page", "page.html")),
                ("run/checkpoints", ("checkpointing.py", "run")),
                ("run/checkpoints", ("generate.py", "run", "a")),
                ("datasets/tiny", TRAIN),
                ("datasets/tiny/train.safetensors", TRAIN),
            ]
        ),
    ],
)
def test_it_is_named(unreadable: str, command: tuple[str, ...], tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run")
    run.metrics.touch()
    run.checkpoints.mkdir()
    files = {path for path in tmp_path.rglob("*") if path.name != "train.lock"}
    (tmp_path / unreadable).chmod(0)
    begin = [] if os.geteuid() else WITHOUT_ROOT
    script, *arguments = command
    ended = subprocess.run(
        [*begin, sys.executable, str(ROOT / script), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    (tmp_path / unreadable).chmod(0o755)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert f"{unreadable}: cannot be read just now: Permission denied" in line
    assert {path for path in tmp_path.rglob("*") if path.name != "train.lock"} == files


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (("charts.py", "run", "--page", "run/train.json"), "a page"),
        (("mup.py", "check", "run", "--chart", "run/train.json"), "a chart"),
    ],
)
def test_output_does_not_replace_another_file(
    command: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    before = (run.path / "train.json").read_text()
    ended = run_script(*command)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == (
        f"error: run/train.json: is there and is not {what}; choose another name, or move it away\n"
    )
    assert (run.path / "train.json").read_text() == before
