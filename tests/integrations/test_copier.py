"""What is copied to a mirror, in which order, and what is deleted there."""

import shutil
from pathlib import Path

import pytest

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import UserError
from rungs.integrations.mirror_folder import MirrorFolder
from rungs.integrations.mirroring import Copier
from rungs.run.folder import RunFolder
from tests.support.mirrors import Failing, files_of, save, saved_run


def copy(run: RunFolder, mirror: Path | str, keep: int = -1) -> None:
    """Copy as a new process would."""
    Copier(run, MirrorFolder(str(mirror)), keep).copy(everything=True)


def names(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def test_a_mirror_has_the_files_of_the_run(run: RunFolder, mirror: Path) -> None:
    (run.path / "train.lock").touch()
    (run.aside / "then" / "checkpoints").mkdir(parents=True)
    (run.aside / "then" / "metrics.jsonl").touch()
    (run.checkpoints / ".20260103Z000000-step-000003").mkdir()
    (run.checkpoints / ".20260103Z000000-step-000003" / "model.safetensors").touch()
    copy(run, mirror)
    not_copied = ("train.lock", "aside/", "checkpoints/.")
    expected = {name: body for name, body in files_of(run.path).items() if not_copied}
    expected = {name: expected[name] for name in expected if not name.startswith(not_copied)}
    assert files_of(mirror) == expected
    assert all(checkpoint.damage() == [] for checkpoint in list_checkpoints(mirror / "checkpoints"))
    assert not (run.path / ".mirror").exists()


def test_only_what_changed_is_uploaded_again(run: RunFolder, failing: str, mirror: Path) -> None:
    copy(run, failing)
    Failing.left = 0
    copy(run, failing)  # nothing to upload
    run.metrics.write_text("more")
    (run.path / "verifier.py").unlink()
    Failing.left = 1
    copy(run, failing)
    assert Failing.left == 0
    assert (mirror / "metrics.jsonl").read_text() == "more"
    assert not (mirror / "verifier.py").exists()


def test_whenever_the_connection_breaks_every_checkpoint_there_is_complete(
    tmp_path: Path, failing: str, mirror: Path
) -> None:
    run = saved_run(tmp_path / "run", steps=1)
    uploads = 0
    while True:
        shutil.rmtree(mirror, ignore_errors=True)
        (run.path / "mirror.json").unlink(missing_ok=True)
        Failing.left = uploads
        copier = Copier(run, MirrorFolder(failing), keep=-1)
        try:
            copier.copy(everything=True)
            break
        except ConnectionError:
            uploads += 1
        for checkpoint in list_checkpoints(mirror / "checkpoints"):
            assert checkpoint.damage() == []
            assert (mirror / "metrics.jsonl").exists()
        Failing.left = 10**9
        copier.copy(everything=True)
        assert files_of(mirror) == files_of(run.path)
    assert uploads > 8


def test_the_newest_checkpoint_is_copied_first(run: RunFolder, failing: str, mirror: Path) -> None:
    per_checkpoint = len(files_of(list_checkpoints(run.checkpoints)[0].folder))
    Failing.left = 1 + 6 + per_checkpoint
    with pytest.raises(ConnectionError):
        copy(run, failing)
    assert names(mirror / "checkpoints") == [2]


def test_a_checkpoint_that_is_deleted_while_it_is_copied_arrives(
    run: RunFolder, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, deleted = MirrorFolder.upload, []

    def delete_first(self: MirrorFolder, folder: Path, what: str) -> None:
        for path in (folder / "checkpoints").glob("2*"):
            shutil.rmtree(run.checkpoints / path.name)
            deleted.append(path.name)
        upload(self, folder, what)

    monkeypatch.setattr(MirrorFolder, "upload", delete_first)
    copy(run, mirror)
    assert len(deleted) == 2
    assert names(run.checkpoints) == []
    assert names(mirror / "checkpoints") == [1, 2]
    assert all(checkpoint.damage() == [] for checkpoint in list_checkpoints(mirror / "checkpoints"))


def test_what_broke_off_is_deleted_there(run: RunFolder, mirror: Path) -> None:
    copy(run, mirror)
    older = list_checkpoints(run.checkpoints)[0].folder.name
    (mirror / "checkpoints" / older / "meta.json").unlink()
    shutil.rmtree(run.checkpoints / older)
    copy(run, mirror)
    assert {path.name for path in (mirror / "checkpoints").glob("2*")} == {
        list_checkpoints(run.checkpoints)[0].folder.name
    }


def test_what_retention_deletes_is_deleted_there(tmp_path: Path, mirror: Path) -> None:
    run = saved_run(tmp_path / "run", steps=5)
    copy(run, mirror)
    checkpoint_folder.delete_old(run.checkpoints, keep=2)
    copy(run, mirror, keep=2)
    assert names(mirror / "checkpoints") == names(run.checkpoints) == [1, 4, 5]


def test_what_is_lost_here_stays_there(tmp_path: Path, mirror: Path) -> None:
    run = saved_run(tmp_path / "run", steps=3)
    copier = Copier(run, MirrorFolder(str(mirror)), 2)
    copier.copy(everything=True)
    shutil.rmtree(run.checkpoints)
    save(run, 4)
    copier.copy(everything=True)
    assert names(mirror / "checkpoints") == [1, 3, 4]


def test_what_is_moved_aside_is_moved_there(run: RunFolder, mirror: Path) -> None:
    copy(run, mirror)
    aside = run.aside / "then" / "checkpoints"
    aside.mkdir(parents=True)
    newest = list_checkpoints(run.checkpoints)[-1].folder
    newest.rename(aside / newest.name)
    save(run, 3)
    copy(run, mirror)
    assert names(mirror / "checkpoints") == [1, 3]
    assert names(mirror / "aside") == [2]
    assert list_checkpoints(mirror / "aside")[0].damage() == []


def refusal(run: RunFolder, mirror: Path) -> str:
    before = files_of(mirror)
    with pytest.raises(UserError) as error:
        copy(run, mirror)
    assert files_of(mirror) == before
    return str(error.value)


def test_the_mirror_of_another_run_is_refused(run: RunFolder, mirror: Path, tmp_path: Path) -> None:
    copy(saved_run(tmp_path / "other"), mirror)
    assert "is the mirror of another run" in refusal(run, mirror)


def test_a_mirror_that_another_run_has_begun_meanwhile_is_left_to_it(
    run: RunFolder, mirror: Path, tmp_path: Path
) -> None:
    """Both began before either had a checkpoint there."""
    slow = Copier(saved_run(tmp_path / "slow", steps=0), MirrorFolder(str(mirror)), -1)
    slow.copy(everything=True)
    copy(run, mirror)
    before = files_of(mirror)
    save(RunFolder(tmp_path / "slow"), 9)
    with pytest.raises(UserError, match="is the mirror of another run by now"):
        slow.copy(everything=True)
    assert files_of(mirror) == before


def test_a_mirror_that_is_ahead_is_refused(run: RunFolder, mirror: Path) -> None:
    newer = save(run, 3)
    copy(run, mirror)
    shutil.rmtree(newer)
    assert f"has {newer.name}, which is newer" in refusal(run, mirror)


@pytest.mark.parametrize("place", ["me:hunter22@host", "host:runs/a", "s3:/bucket", "file:runs"])
def test_a_place_elsewhere_without_a_scheme_is_refused_and_not_shown(place: str) -> None:
    with pytest.raises(UserError, match="has ':' but is no URL; write s3://") as error:
        MirrorFolder(place)
    assert place not in str(error.value)


@pytest.mark.parametrize("place", ["./runs:a/b", "a/b:c", "file:///a:b", "/a:b"])
def test_a_folder_with_a_colon_is_a_place(place: str) -> None:
    assert MirrorFolder(place).local_path is not None


def test_a_folder_that_is_not_a_mirror_is_refused(run: RunFolder, mirror: Path) -> None:
    mirror.mkdir(parents=True)
    (mirror / "thesis.tex").touch()
    assert "has files but is not a mirror (thesis.tex)" in refusal(run, mirror)


def test_a_damaged_record_is_refused(run: RunFolder, mirror: Path) -> None:
    copy(run, mirror)
    (mirror / "mirror.json").write_text("{")
    assert "mirror.json: damaged" in refusal(run, mirror)
