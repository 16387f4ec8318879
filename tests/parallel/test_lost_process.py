"""A process of a run ends with one line if another one dies."""

from pathlib import Path

import jax
import pytest

from rungs.common import run_log
from rungs.common.errors import RunFailure
from rungs.parallel import processes


class Ended(Exception):
    """Instead of the end of the process."""


def fail_with(message: str, while_saving: bool = False) -> None:
    error = jax.errors.JaxRuntimeError(message)
    with processes.end_if_lost():
        if while_saving:
            raise RunFailure("the checkpoint could not be written") from error
        raise error


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(processes.os, "_exit", end)


@pytest.mark.usefixtures("no_exit")
@pytest.mark.parametrize("while_saving", [False, True])
def test_a_collective_without_its_partner_ends_with_one_line(
    while_saving: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_log.log, "handlers", [])
    run_log.log_to_file(tmp_path / "train.log")
    with pytest.raises(Ended, match="1"):
        fail_with("UNKNOWN: Gloo ReduceScatter failed: Connection reset by peer", while_saving)
    cause = "UNKNOWN: Gloo ReduceScatter failed: Connection reset by peer"
    assert capsys.readouterr().err == f"error: {processes.LOST_PROCESS} ({cause})\n"
    assert f"ERROR {processes.LOST_PROCESS}" in (tmp_path / "train.log").read_text()


@pytest.mark.usefixtures("no_exit")
def test_other_failures_of_jax_are_not_taken_for_it() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError):
        fail_with("INTERNAL: a bug in the compiler")
