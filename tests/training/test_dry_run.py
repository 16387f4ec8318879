"""`--dry-run`, `--profile`, which writes a trace and a table of the step's parts and nothing else,
and the options of the log."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rungs.cli import train as train_command
from rungs.common.errors import UserError
from tests.support.starting import go, refusal
from tests.support.tiny_run import make_run, train


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_it_takes_a_step_and_writes_nothing(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = contents(tmp_path)
    result = train(run, datasets_dir, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path) == before
    assert "24 steps are left" in result.stderr
    assert go(run, datasets_dir) == 0
    loss = json.loads(run.metrics.read_text().splitlines()[0])["train_loss"]
    assert f"the first step has loss {loss:.4f}" in result.stderr


def test_what_is_wrong_is_found(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", dataset="absent")
    assert "absent" in refusal(run, datasets_dir, dry_run=True)


@pytest.mark.long
def test_messages_as_json(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=128)
    result = train(run, datasets_dir, "--json-log")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert {"time", "level", "message"} == set(lines[0])
    messages = [line["message"] for line in lines]
    if messages[-1].startswith("drawing the charts"):  # the wait for it is long on a busy machine
        messages.pop()
    assert messages[-1].startswith("finished after step 0")
    assert "INFO finished" in run.log.read_text()


@pytest.mark.long
def test_it_writes_a_trace_and_a_table_and_changes_nothing(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    assert go(run, datasets_dir) == 0
    before = contents(run.path)
    done = train(run, datasets_dir, "--profile", "3", "--fresh")
    assert done.returncode == 0, done.stderr
    after = contents(run.path)
    new = after.keys() - before.keys()
    assert {path: after[path] for path in before} == before
    assert all(Path(path).is_relative_to(run.profile) for path in new)
    assert {Path(path).name.partition(".")[2] for path in new} >= {"xplane.pb", "trace.json.gz"}
    assert (run.profile / "parts.txt").read_text() == done.stdout
    check_table(done.stdout)


def check_table(text: str) -> None:
    rows = [line.rsplit("  ", 2) for line in text.splitlines()]
    names = [row[0].strip() for row in rows]
    for part in ("attention kernel", "attention projections", "feed-forward", "head and loss"):
        assert part in names
    assert "optimizer" in names
    assert names[-3:] == ["sum of kernels", "data, on the host", "a step, by the clock"]


@pytest.mark.parametrize("option", [("--dry-run",), ("--mirror", "copies"), ("--supervise",)])
def test_options_that_do_not_fit_are_refused(option: tuple[str, ...]) -> None:
    result = CliRunner().invoke(train_command.main, ["run", "--profile", "2", *option])
    assert isinstance(result.exception, UserError)
