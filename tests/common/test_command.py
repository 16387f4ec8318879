"""Imports run without garbage collection, which is as it was before afterwards."""

from rungs.common.command import importing

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_pauses(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no working directory")
def test_a_deleted_working_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    leave = 'cd "$0" && rmdir ../gone && exec "$@"'
    script = Path(__file__).parents[2] / "train.py"
    ended = subprocess.run(
        ["sh", "-c", leave, str(tmp_path / "gone"), sys.executable, str(script), "name"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    why = "the working directory can't be used: it was deleted; change to another"
    assert ended.stderr == f"error: {why}\n"


def test_what_was_imported_is_not_searched_again() -> None:
    gc.unfreeze()
    try:
        with importing():
            kept: list[list[int]] = [[] for _ in range(1000)]
        assert gc.get_freeze_count() > len(kept)
    finally:
        gc.unfreeze()


def test_matplotlib_is_imported_whatever_backend_the_environment_names() -> None:
    code = "from rungs.common.command import begin_command; begin_command(); import matplotlib"
    environment = os.environ | {"MPLBACKEND": "nonsense"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_low_limit_of_open_files_is_raised_or_reported() -> None:
    def plan(limits: str) -> subprocess.CompletedProcess[str]:
        shell = f'{limits}; exec "{sys.executable}" plan.py runs/layers'
        return subprocess.run(["sh", "-c", shell], text=True, capture_output=True)

    refused = plan("ulimit -n 24")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: only 24 files may be open at once, which libraries fail with; allow more with"
        " ulimit -n 256\n"
    )
    assert plan("ulimit -S -n 24; ulimit -H -n 256").returncode == 0


def ended(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, *command], env=environment, text=True, capture_output=True
    )


@pytest.mark.parametrize("place", [("--chat", ""), ("", "--chat"), ("--", ""), ("a", "")])
def test_a_prompt_may_be_empty(place: tuple[str, ...]) -> None:
    result = ended("generate.py", "no/such/run", *place)
    assert result.stderr.startswith("error: no/such/run: ")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("charts.py", "--page", "", "runs/layers"), "--page"),
        (("evaluate.py", "runs/layers", "--tasks="), "--tasks"),
        (("mup.py", "check", "runs/layers", "--chart", ""), "--chart"),
        (("train.py", "runs/layers", "--mirror", ""), "--mirror"),
        (("download_dataset.py", "--text", "a", "--name", "b", "--tokenizer", ""), "--tokenizer"),
        (("checkpointing.py", ""), "argument 1"),
        (("generate.py", "", "a prompt"), "argument 1"),
        (("generate.py", "runs/layers", "", "--chat", "--system", ""), "--system"),
        (("generate.py", "runs/layers", "--chat", "", "--prompts-file="), "--prompts-file"),
        (("generate.py", "--chat", ""), "argument 2"),
    ],
)
def test_an_empty_value_does_not_count_as_none(command: tuple[str, ...], name: str) -> None:
    result = ended(*command)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {name}: the value is empty")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", "runs/layers", "https://me:hunter2@h/x?token=hunter3"),
        ("train.py", "runs/layers", "--max-restarts", "https://me:hunter2@h/x?token=hunter3"),
        ("mup.py", "check", "runs/layers", "--widths", "https://me:hunter2@h/x?token=hunter3"),
    ],
)
def test_what_click_quotes_has_no_secrets(command: tuple[str, ...]) -> None:
    result = ended(*command)
    assert result.returncode == 2
    assert "https://***@h/x?***" in result.stderr
    assert "hunter" not in result.stderr


def test_a_file_that_can_not_be_used_is_one_line(tmp_path: Path) -> None:
    code = (
        "import click; from rungs.common.command import run_command\n"
        f"run_command(click.command(lambda: open({str(tmp_path / 'gone')!r})))"
    )
    result = ended("-c", code)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'gone'}: No such file or directory; ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["plan.py"], "missing argument 'RUN'"),
        (["plan.py", "runs/layers", "--devic", "h100"], "no such option"),
        (["plan.py", "runs/layers", "--device"], "option '--device' requires an argument"),
        (["plan.py", "runs/layers", "--price-per-hour", "nan"], "invalid value for '--price-per-"),
        (["pretrained.py", "impor", "x"], "no such command 'impor'"),
        (["config.py", "a\nb"], "got unexpected extra argument (a b)"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], begins: str) -> None:
    refused = ended(*arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {begins}")
    assert line.endswith(f" (see {arguments[0]} --help)")
