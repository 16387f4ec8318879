"""Output that cannot be written, or that nobody reads, ends a command without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT

COMMANDS = ("config.py --help", "plan.py runs/a-to-a --device h100", "model.py runs/a-to-a")
FULL = Path("/dev/full")


def _run(command: str, stdout: int, unbuffered: bool) -> subprocess.CompletedProcess[str]:
    script, *arguments = command.split()
    return subprocess.run(
        [sys.executable, ROOT / script, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""},
    )


@pytest.mark.long
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line(command: str, unbuffered: bool) -> None:
    with FULL.open("wb") as full:
        ended = _run(command, full.fileno(), unbuffered)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "error: the output could not be written: No space left on device\n"
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        "config.py --help",
        "train.py --like runs/a-to-a --grid seed=0,1 --into grid --datasets-dir d",
        "download_dataset.py --text text --name x --vocab-size 257 --datasets-dir d",
    ],
)
def test_output_that_is_closed_is_one_line_before_anything_is_done(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("some text. " * 99)
    script, *arguments = command.split()
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, str(ROOT / script)]
    ended = subprocess.run(
        [*closing, *arguments], stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert ended.returncode == 2
    assert ended.stderr == "error: stdout is closed, so nothing can be printed; leave out >&-\n"


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "command",
    [COMMANDS[0], *(pytest.param(command, marks=pytest.mark.long) for command in COMMANDS[1:])],
)
def test_a_closed_pipe_ends_a_command_silently(command: str, unbuffered: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = _run(command, writing, unbuffered)
    os.close(writing)
    assert ended.returncode == 141
    assert not ended.stderr
