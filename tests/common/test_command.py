"""Commands: errors in one line each, exit codes, imports without garbage collection."""

from rungs.common.command import importing

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_script


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_pauses_and_what_was_imported_is_not_searched_again(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    try:
        with importing():
            kept: list[list[int]] = [[] for _ in range(1000)]
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() > len(kept)
    finally:
        gc.enable()
        gc.unfreeze()


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], text=True, capture_output=True)


def running(body: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments of Python that run a command with this body."""
    code = "import click, os, sys; from rungs.common.command import run_command\n"
    return ("-c", code + f"run_command(click.command(lambda: {body}))", *arguments)


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        (("charts.py", "--page", "", "runs/layers"), "--page: the value is empty"),
        (("evaluate.py", "runs/layers", "--tasks="), "--tasks: the value is empty"),
        (("checkpointing.py", ""), "argument 1: the value is empty"),
        (("plan.py",), "missing argument 'RUN'"),
        (("plan.py", "runs/layers", "--devic", "h100"), "no such option"),
        (("plan.py", "runs/layers", "--price-per-hour", "nan"), "invalid value for '--price-per-"),
        (("train.py", "runs/layers", "https://me:hunter2@h/x"), "DATASETS: https://***@h/x: no"),
    ],
)
def test_a_wrong_argument_is_one_line(command: tuple[str, ...], begins: str) -> None:
    refused = run_script(*command)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {begins}")
    assert "hunter2" not in line


@pytest.mark.parametrize("place", [("--", ""), ("a", "")])
def test_a_prompt_may_be_empty(place: tuple[str, ...]) -> None:
    refused = run_script("generate.py", "no/such/run", *place)
    assert refused.stderr.startswith("error: no/such/run: ")


def test_a_file_that_can_not_be_used_is_one_line(tmp_path: Path) -> None:
    result = ended(*running(f"open({str(tmp_path / 'gone')!r})"))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'gone'}: No such file or directory; ")


def test_output_that_nobody_reads_ends_the_command() -> None:
    command = [sys.executable, *running("[print('x' * 9999) for _ in range(999)]")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr
        assert process.stderr.read() == b""


def test_a_bug_keeps_its_traceback() -> None:
    result = ended(*running("1 / 0"))
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
