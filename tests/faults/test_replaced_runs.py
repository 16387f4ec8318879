"""Another run that takes the place of the one that is trained stays as it is, and nothing is
written through links in a run folder."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rungs.checkpointing import manifest, optimizer_state
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.commands import start_command
from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.config import run_config
from rungs.integrations.mirror_folder import MirrorFolder
from rungs.integrations.mirroring import Copier
from rungs.reinforcement.rollout_files import RolloutFiles
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog, StepMetrics
from rungs.run.records import Event
from tests.faults.injected_faults import act_at_call
from tests.faults.short_runs import failure_message, short_run, train_here
from tests.support.tiny_run import assert_same_outcome, command

EVENT = Event(time="now", event="stop", step=1, text="")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def take_place(run: RunFolder) -> RunFolder:
    """Move a run away and put another one at its path."""
    moved = RunFolder(run.path.rename(run.path.with_name("moved")))
    short_run(run.path)
    (run.path / "train.lock").touch()
    return moved


def drop_lock(run: RunFolder) -> None:
    run.lock_file.unlink()
    run.lock_file.touch()


@pytest.mark.parametrize("lose", [take_place, drop_lock, lambda run: run.lock_file.unlink()])
def test_nothing_is_written_into_a_run_that_took_the_place(
    lose: Callable[[RunFolder], object], run: RunFolder, tmp_path: Path
) -> None:
    with run.lock() as own:
        own.check()
        log = MetricsLog(own.metrics, -1, StepMetrics, check=own.check)
        lose(run)
        before = contents(run.path)
        copier = Copier(own, MirrorFolder(str(tmp_path / "mirror")), -1)
        writes: list[Callable[[], object]] = [
            lambda: log.append(StepMetrics(0, 0, 1.0, 1.0, 1.0, False, 0, 1.0, 1.0)),
            lambda: records.append(own, [EVENT]),
            lambda: records.append(own, []),
            lambda: records.append(own, []),
            lambda: RolloutFiles(own.rollouts, check=own.check).write(own.rollouts / "a", []),
            lambda: copier.copy(everything=True),
        ]
        for write in writes:
            with pytest.raises(RunFailure, match="during training"):
                write()
        assert contents(run.path) == before
    assert contents(run.path) == before


def test_the_message_says_where_the_folder_is(run: RunFolder) -> None:
    with run.lock() as own:
        moved = take_place(run)
        with pytest.raises(RunFailure, match=f"was moved to {moved.path} during") as raised:
            own.check()
        assert "and another folder took its place" in str(raised.value)
        shutil.rmtree(run.path)
        with pytest.raises(RunFailure, match=f"was moved to {moved.path} during training; the"):
            own.check()
        shutil.rmtree(moved.path)
        with pytest.raises(RunFailure, match="was removed or moved during training; the"):
            own.check()


@pytest.mark.long
def test_a_suspended_trainer_whose_place_was_taken(
    datasets_dir: Path, uninterrupted: RunFolder, tmp_path: Path
) -> None:
    """The other run is trained to its end meanwhile, from the same configs."""
    run = short_run(tmp_path / "run", checkpoint_interval=1, min_train_tokens=11 * 2 * 16 * 50)
    trainer = subprocess.Popen(
        command(run, datasets_dir), stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
    )
    try:
        while len(list_checkpoints(run.checkpoints)) < 3:
            assert trainer.poll() is None
            time.sleep(0.05)
        trainer.send_signal(signal.SIGSTOP)
        moved = RunFolder(run.path.rename(tmp_path / "moved"))
        short_run(run.path)
        assert train_here(run, datasets_dir) == 0
        before = contents(run.path)
        trainer.send_signal(signal.SIGCONT)
        _, errors = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
    assert trainer.returncode == 1, errors
    assert f"error: {run.path}: the run folder was moved to {moved.path} during" in errors
    assert contents(run.path) == before
    assert_same_outcome(run, uninterrupted)
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(optimizer_state, "save_async", marks=pytest.mark.long),
        (manifest, "write_manifest"),
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_a_run_that_is_replaced_during_a_save(
    owner: ModuleType,
    name: str,
    run: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Orbax makes the folders that it needs, in whatever run is there."""
    monkeypatch.setattr(owner, name, getattr(owner, name))
    act_at_call(owner, name, 2, lambda *_: take_place(run))
    with run.lock() as own:
        message = failure_message(own, datasets_dir)
    assert "was moved to" in message
    assert not list(run.checkpoints.glob("*"))
    saved = list_checkpoints(run.path.with_name("moved") / "checkpoints")
    assert [checkpoint.step for checkpoint in saved] == [0]


@pytest.mark.parametrize("name", ["aside", "failed-steps", "rollouts"])
def test_a_file_in_the_place_of_a_folder_is_refused(name: str, run: RunFolder) -> None:
    (run.path / name).touch()
    with pytest.raises(UserError, match=f"{name}: is a file, but must be a folder"), run.lock():
        pass


@pytest.mark.parametrize("name", ["train.lock", "length.jsonl", "samples.jsonl", "train.log"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused(name: str, run: RunFolder) -> None:
    path = run.path / name
    for make, kind in ((path.mkdir, "a folder"), (lambda: os.mkfifo(path), "a pipe or a device")):
        make()
        message = rf"{name}: is {kind}, but must be a file; move it"
        with pytest.raises(UserError, match=message), run.lock():
            pass
        disk.remove(path)


# Links


@pytest.mark.parametrize(
    "name",
    [
        *("train.lock", "holder.lock", "train.log", "events.jsonl", "metrics.jsonl", "samples.md"),
        *("samples.jsonl", "evaluations.jsonl", "rollouts", "trackers", "aside", "failed-steps"),
        "trackers/wandb",
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_in_the_place_of_what_training_writes_is_refused(
    name: str, is_there: bool, run: RunFolder, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.write_text("mine")
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).symlink_to(target)
    before = sorted(run.path.rglob("*"))
    with pytest.raises(UserError, match=f"{name}: is a link, and a run writes nothing outside"):
        run.lock().__enter__()
    with pytest.raises(UserError, match=f"{name}: is a link"):
        start_command.hold_run(run, run_config.load_run(run.path), None, dry=True).__enter__()
    assert sorted(run.path.rglob("*")) == before
    assert target.exists() == is_there
    assert not is_there or target.read_text() == "mine"


def test_links_that_appear_later_are_not_followed(run: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    run.events.symlink_to(target)
    with pytest.raises(
        RunFailure, match=r"events.jsonl: events could not be written: it is a link"
    ):
        records.append(run, [EVENT])
    run.metrics.symlink_to(target)
    disk.replace_file(run.metrics, "ours")
    assert run.metrics.read_text() == "ours"
    assert not run.metrics.is_symlink()
    assert target.read_text() == "mine"


def test_a_pipe_is_not_waited_for(run: RunFolder) -> None:
    os.mkfifo(run.events)
    with pytest.raises(RunFailure, match="could not be written: not a regular file"):
        records.append(run, [EVENT])


@pytest.mark.usefixtures("no_charts")
def test_a_run_full_of_links_writes_nothing_outside(
    run: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    """Names of temporary files and folders, and charts, which are replaced."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("mine")
    names = "metrics.jsonl.new", ".holder.lock.new", "mirror.json", ".mirror.json", "loss-chart.png"
    for name in names:
        (run.path / name).symlink_to(target / "file")
    for name in (".mirror", ".sampling", ".restoring"):
        (run.path / name).symlink_to(target)
    with run.lock() as own:
        assert train_here(own, datasets_dir) == 0
    assert contents(target) == {str(target / "file"): b"mine"}


def test_a_mirror_gets_nothing_that_links_point_to(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run.path / "notes.txt").symlink_to(tmp_path / "secret")
    Copier(run, MirrorFolder(str(tmp_path / "mirror")), -1).copy(everything=True)
    assert not (tmp_path / "mirror" / "notes.txt").exists()
    assert json.loads((tmp_path / "mirror" / "train.json").read_text())
