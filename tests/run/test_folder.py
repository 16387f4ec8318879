"""Run folders: found by name, locked by one process."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.run.folder import RunFolder, find_run
from tests.support.tiny_run import make_run


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/old"))


def test_a_run_is_found_by_path_or_by_name() -> None:
    assert find_run("runs/old") == find_run("old") == Path("runs/old")
    with pytest.raises(UserError, match=r"new: no such run folder.*existing runs: old"):
        find_run("new")


@pytest.mark.parametrize("name", ["olt", "runs/odl", "elsewhere/olds"])
def test_a_misspelt_run_is_answered_with_the_one_that_was_meant(name: str) -> None:
    with pytest.raises(UserError) as raised:
        find_run(name)
    assert str(raised.value) == f"{name}: no such run folder, here or in runs/; did you mean old?"


def test_one_process_holds_the_lock_and_a_stale_lock_does_not_count() -> None:
    run = RunFolder(Path("runs/old"))
    run.lock_file.write_text("process 1 on another-host\n")  # as a killed process leaves it
    with (
        run.lock(),
        pytest.raises(UserError, match=rf"by process {os.getpid()} on {socket.gethostname()};"),
    ):
        run.lock().__enter__()
    with run.lock():
        pass


def test_a_refused_start_leaves_no_lock_file() -> None:
    run = RunFolder(Path("runs/old"))
    with pytest.raises(UserError, match="no"), run.lock():
        raise UserError("no")
    assert not run.lock_file.exists()


def test_files_of_users_are_not_unfinished() -> None:
    run = RunFolder(Path("runs/old"))
    for name in (".todo.new", ".x.0123456789abcdef.new", ".metrics.jsonl.0123abcd.new"):
        (run.path / name).touch()
    assert [path.name for path in run.unfinished_files] == [".metrics.jsonl.0123abcd.new"]


def test_a_file_system_without_locks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"old: cannot be written to: No locks available"):
        RunFolder(Path("runs/old")).lock().__enter__()


def link_checkpoints(run: Path, target: Path) -> RunFolder:
    (run / "checkpoints").symlink_to(target)
    return RunFolder(run)


def test_checkpoints_may_be_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    run = link_checkpoints(Path("runs/old"), tmp_path / "disk")
    for _ in range(2):
        with run.lock():
            pass
    run = RunFolder(run.path.rename("runs/moved"))
    with run.lock():
        pass


@pytest.mark.parametrize("is_moved", [False, True])
def test_two_runs_never_share_their_checkpoints(is_moved: bool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    first = link_checkpoints(Path("runs/old"), tmp_path / "disk")
    with first.lock():
        pass
    second = link_checkpoints(make_run(Path("runs/new")).path, tmp_path / "disk")
    if is_moved:  # which the note doesn't know of, but its link went along
        first.checkpoints.unlink()
        with second.lock():
            pass
        return
    with pytest.raises(
        UserError, match=r"checkpoints: is a link to the checkpoints of .*/runs/old;"
    ):
        second.lock().__enter__()
    assert not second.lock_file.exists()


def test_checkpoints_are_not_those_in_another_run_folder() -> None:
    (Path("runs/old") / "checkpoints").mkdir()
    run = link_checkpoints(make_run(Path("runs/new")).path, Path("../old/checkpoints"))
    with pytest.raises(UserError, match="is a link to the checkpoints of"):
        run.lock().__enter__()
    assert not list(Path("runs/old/checkpoints").iterdir())


def test_a_disk_that_is_not_there_is_no_new_run(tmp_path: Path) -> None:
    run = link_checkpoints(Path("runs/old"), tmp_path / "unmounted")
    with pytest.raises(UserError, match="unmounted, which is not there; mount its disk"):
        run.lock().__enter__()
