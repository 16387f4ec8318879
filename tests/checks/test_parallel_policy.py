"""The parallel check of reinforcement learning, on a run whose texts have turns."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rungs.common import run_log
from rungs.objectives.policy import PolicyObjective
from rungs.parallel import collectives
from rungs.parallel.sharding import DATA
from rungs.run.folder import RunFolder
from smoke_tests import test_parallel as script
from tests.support.tiny_reinforcement import write_start
from tests.support.turns import UNREPEATABLE, make_run_with_turns


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(script, "_restart_with", lambda _: None)
    monkeypatch.setattr(run_log, "log_to_terminal", lambda: None)
    start = write_start(tmp_path / "start")
    return make_run_with_turns(tmp_path / "run", start, UNREPEATABLE)


def check(run: RunFolder) -> tuple[int, dict[tuple[str, ...], list[str]]]:
    """Return the exit code, and from mode and devices to verdict and differences of texts,
    log-probabilities and gradient. Nothing is written into the run folder."""
    before = {*run.path.rglob("*")}
    result = CliRunner().invoke(script.main, [str(run.path), "--devices", "2"])
    assert {*run.path.rglob("*")} == before
    form = r"^(\w+) +(\d) +(ok|FAILED) +(\S+) (\S+) (\S+)"
    found = re.findall(form, result.stdout, re.MULTILINE)
    return result.exit_code, {row[:2]: [*row[2:]] for row in found}


@pytest.mark.long
def test_texts_with_turns_and_their_gradient_are_those_of_one_device(run: RunFolder) -> None:
    code, rows = check(run)
    assert code == 0
    assert rows.keys() == {("dp", "2"), ("fsdp", "2")}
    assert all(verdict == "ok" and differing == "0" for verdict, differing, *_ in rows.values())


@pytest.mark.long
def test_a_wrong_gradient_is_found(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PolicyObjective.loss

    def loss(*args: Any) -> Any:
        loss, aux = original(*args)
        return loss * collectives.axis_size(DATA), aux

    monkeypatch.setattr(PolicyObjective, "loss", loss)
    code, rows = check(run)
    assert code == 1
    assert [row[0] for row in rows.values()] == ["FAILED", "FAILED"]
    assert [row[3] for row in rows.values()] == ["1.0e+00", "1.0e+00"]
