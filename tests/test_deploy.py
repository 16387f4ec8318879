"""The Dockerfile and the SkyPilot task. Neither an image registry nor a cloud is needed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT

TASK = ROOT / "deploy" / "skypilot.yaml"
DOCKERFILE = ROOT / "Dockerfile"
FAKE_UV = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in *train.py*) echo step >> "$BUCKET/runs/$RUN/metrics.jsonl" ;; esac
"""


def section(name: str) -> str:
    """Return a shell script of the task."""
    found = re.search(rf"^{name}: \|\n((?:  .*\n|\n)+)", TASK.read_text(), re.MULTILINE)
    assert found
    return found[1]


def run_on_new_machine(folder: Path, bucket: Path) -> list[str]:
    """Run setup and job of the task in a new folder; return the arguments that uv was given."""
    shutil.copytree(ROOT / "runs" / "layers", folder / "runs" / "layers")
    uv = folder / ".uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(FAKE_UV)
    uv.chmod(0o755)
    (folder / "install_uv.py").touch()
    script = (section("setup") + section("run")).replace("/bucket", str(bucket))
    variables = {
        "RUN": "layers",
        "EXTRA": "cuda",
        "BUCKET": str(bucket),
        "LOG": str(folder / "log"),
    }
    environment = {**os.environ, **variables}
    subprocess.run(["bash", "-u", "-c", script], cwd=folder, env=environment, check=True)
    return (folder / "log").read_text().splitlines()


def test_a_new_machine_resumes_the_run_of_the_bucket_with_the_same_command(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    first = run_on_new_machine(tmp_path / "first", bucket)
    run = bucket / "runs" / "layers"
    (run / "train.json").write_text("edited")
    assert run_on_new_machine(tmp_path / "second", bucket) == first
    assert first == ["sync --extra cuda", f"run --extra cuda train.py {run}"]
    assert (run / "metrics.jsonl").read_text() == "step\n" * 2
    assert (run / "train.json").read_text() == "edited"


def test_the_variables_of_the_task_exist() -> None:
    run, extra = re.findall(r"^  (?:RUN|EXTRA): (\S+)", TASK.read_text(), re.MULTILINE)
    assert (ROOT / "runs" / run / "train.json").is_file()
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


def test_versions_are_pinned_and_programs_do_not_run_as_root() -> None:
    text = DOCKERFILE.read_text()
    images = re.findall(r"^FROM (\S+)|--from=(\S+)", text, re.MULTILINE)
    assert images
    assert all(re.search(r":\d+\.\d+", first or other) for first, other in images)
    assert re.search(r"\buv(==|:)\d+\.\d+\.\d+", text)
    assert text.index("\nUSER 1000\n") < text.index("uv sync")


@pytest.mark.parametrize(
    "needed",
    [
        "README.md",
        "LICENSE",
        "rungs/model/gpt.py",
        "smoke_tests/test_device.py",
        "runs/layers/train.json",
    ],
)
def test_the_image_gets_what_it_needs(needed: str) -> None:
    path, text = Path(needed), (ROOT / ".dockerignore").read_text()
    assert (ROOT / path).is_file()
    left_out = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in left_out for one in (path, *path.parents) if one.match(line)]
