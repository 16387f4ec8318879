"""A run folder restored from its mirror: completely, only where it has no checkpoints."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import CheckpointMeta
from rungs.common.errors import RunFailure, UserError
from rungs.integrations.mirror_folder import MirrorFolder
from rungs.integrations.mirroring import Copier, restore_if_empty
from rungs.run.folder import RunFolder
from tests.support.mirrors import Failing, files_of, save
from tests.support.written_checkpoints import flip_byte


@pytest.fixture
def mirrored(run: RunFolder, failing: str) -> RunFolder:
    """A run that was copied to the mirror."""
    Copier(run, MirrorFolder(failing), -1).copy(everything=True)
    return run


def restore(run: RunFolder, url: str | Path) -> None:
    restore_if_empty(run, str(url), lambda _: None)


def steps(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)]


@pytest.mark.parametrize("url", ["file://", "file:///", "local:///", "s3://"])
def test_a_url_without_a_folder_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"names no folder, as with a variable"):
        MirrorFolder(url)


def test_a_run_folder_that_is_gone_is_restored(mirrored: RunFolder, mirror: Path) -> None:
    expected = files_of(mirrored.path)
    shutil.rmtree(mirrored.path)
    restore(mirrored, mirror)
    assert files_of(mirrored.path) == expected
    assert list_checkpoints(mirrored.checkpoints)[-1].damage() == []


def test_a_restored_run_goes_on_with_its_mirror(mirrored: RunFolder, failing: str) -> None:
    shutil.rmtree(mirrored.path)
    restore(mirrored, failing)
    save(mirrored, 3)
    uploads = Failing.left
    Copier(mirrored, MirrorFolder(failing), -1).copy(everything=True)
    only_new = len(files_of(mirrored.checkpoints / "20260103Z000000-step-000003"))
    assert uploads - Failing.left == only_new


def test_a_mirror_that_lost_its_record_is_refused(mirrored: RunFolder, mirror: Path) -> None:
    (mirror / "mirror.json").unlink()
    shutil.rmtree(mirrored.path)
    with pytest.raises(UserError, match=r"has checkpoints but no mirror\.json"):
        restore(mirrored, mirror)
    assert not mirrored.path.exists()
    shutil.copytree(mirror / "checkpoints", mirrored.checkpoints)
    assert steps(mirrored) == [1, 2]


def test_configs_and_files_of_the_user_are_kept(mirrored: RunFolder, mirror: Path) -> None:
    shutil.rmtree(mirrored.checkpoints)
    for name in ("train.json", "verifier.py", "metrics.jsonl"):
        (mirrored.path / name).write_text("of this machine")
    restore(mirrored, mirror)
    assert steps(mirrored) == [1, 2]
    for name in ("train.json", "verifier.py"):
        assert (mirrored.path / name).read_text() == "of this machine"
    assert mirrored.metrics.read_text() == "metrics.jsonl"


def test_a_folder_with_checkpoints_is_left_as_it_is(mirrored: RunFolder, mirror: Path) -> None:
    mirrored.metrics.write_text("newer")
    before = files_of(mirrored.path)
    restore(mirrored, mirror)
    assert files_of(mirrored.path) == before


def test_whenever_the_connection_breaks_the_next_start_restores_the_rest(
    mirrored: RunFolder, failing: str
) -> None:
    expected = files_of(mirrored.path)
    downloads = 0
    while True:
        shutil.rmtree(mirrored.path, ignore_errors=True)
        Failing.left = downloads
        try:
            restore(mirrored, failing)
            break
        except RunFailure:
            downloads += 1
        assert 1 not in steps(mirrored) or 2 in steps(mirrored)  # the newest comes first
        Failing.left = 10**9
        restore(mirrored, failing)
        assert files_of(mirrored.path) == expected
    assert downloads == len(expected)


def test_what_is_not_complete_there_is_left_out(mirrored: RunFolder, mirror: Path) -> None:
    (list_checkpoints(mirror / "checkpoints")[-1].folder / "meta.json").unlink()
    shutil.rmtree(mirrored.path)
    restore(mirrored, mirror)
    assert steps(mirrored) == [1]


@pytest.mark.parametrize("file", ["meta.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_left_out_and_the_run_goes_on_with_its_mirror(
    file: str, mirrored: RunFolder, mirror: Path, messages: pytest.LogCaptureFixture
) -> None:
    flip_byte(list_checkpoints(mirror / "checkpoints")[-1].folder / file)
    shutil.rmtree(mirrored.path)
    restore(mirrored, mirror)
    assert steps(mirrored) == [1]
    assert f"is damaged ({file}); not restored" in messages.text
    save(mirrored, 3)
    Copier(mirrored, MirrorFolder(str(mirror)), -1).copy(everything=True)
    there = list_checkpoints(mirror / "checkpoints")
    assert [checkpoint.step for checkpoint in there] == [1, 3]
    assert (mirror / "aside" / "20260102Z000000-step-000002" / file).exists()


def test_a_run_never_starts_over_because_all_checkpoints_there_are_damaged(
    mirrored: RunFolder, mirror: Path
) -> None:
    for checkpoint in list_checkpoints(mirror / "checkpoints"):
        flip_byte(checkpoint.folder / "model.safetensors")
    shutil.rmtree(mirrored.path)
    for _ in range(2):
        with pytest.raises(UserError, match="none of its checkpoints is valid"):
            restore(mirrored, mirror)


def test_a_kill_while_files_are_restored_loses_no_newer_metrics(
    mirrored: RunFolder, failing: str
) -> None:
    shutil.rmtree(mirrored.path)
    Failing.left = 5
    with pytest.raises(RunFailure):
        restore(mirrored, failing)
    assert steps(mirrored) == []
    assert not mirrored.metrics.exists()
    Failing.left = 10**9
    restore(mirrored, failing)
    save(mirrored, 3)
    mirrored.metrics.write_text("newer")
    restore(mirrored, failing)
    assert mirrored.metrics.read_text() == "newer"


def test_a_mirror_without_a_checkpoint_restores_nothing(tmp_path: Path, mirror: Path) -> None:
    run = RunFolder(tmp_path / "run")
    restore(run, mirror)
    assert not run.path.exists()


def test_a_new_run_can_take_over_a_mirror_without_checkpoints(run: RunFolder, mirror: Path) -> None:
    first = RunFolder(run.path.with_name("first"))
    first.path.mkdir()
    Copier(first, MirrorFolder(str(mirror)), -1).copy(everything=True)
    Copier(run, MirrorFolder(str(mirror)), -1).copy(everything=True)
    assert files_of(mirror) == files_of(run.path)


def test_a_config_that_does_not_fit_is_refused_before_anything_is_written(
    mirrored: RunFolder, mirror: Path
) -> None:
    shutil.rmtree(mirrored.checkpoints)
    before = files_of(mirrored.path)

    def refuse(saved: CheckpointMeta) -> None:
        assert saved.global_step == 2
        raise UserError("other keys")

    with pytest.raises(UserError, match="other keys"):
        restore_if_empty(mirrored, str(mirror), refuse)
    assert files_of(mirrored.path) == before


def test_an_unreachable_mirror_stops_only_a_run_without_checkpoints(
    mirrored: RunFolder, failing: str, messages: pytest.LogCaptureFixture
) -> None:
    Failing.left = -1
    restore(mirrored, failing)
    assert "no route to host; training goes on without it for now" in messages.text
    shutil.rmtree(mirrored.path)
    with pytest.raises(RunFailure, match="it may have checkpoints that are not here"):
        restore(mirrored, failing)
    assert not mirrored.path.exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftps3://bucket/run", "Protocol not known: ftps3"),
        ("oci://bucket/run", "ocifs"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, message: str, run: RunFolder) -> None:
    with pytest.raises(UserError, match=message):
        restore(run, url)


@pytest.mark.parametrize("place", ["run/mirror", "."])
def test_a_mirror_and_its_run_are_not_inside_each_other(
    place: str, run: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="inside"):
        restore(run, tmp_path / place)


def test_a_folder_of_the_mirror_that_can_not_be_read_is_not_empty(
    mirrored: RunFolder, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would start over."""
    shutil.rmtree(mirrored.path)
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if Path(path).name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"cannot be read: .* Permission denied"):
        restore(mirrored, mirror)


def test_a_disk_that_fills_up_while_a_run_is_restored(
    mirrored: RunFolder, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(mirrored.path)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(MirrorFolder, "download", fail)
        with pytest.raises(RunFailure, match=r"No space left on device .* free some space"):
            restore(mirrored, mirror)
    restore(mirrored, mirror)
    assert steps(mirrored) == [1, 2]
