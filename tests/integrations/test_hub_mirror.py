"""A mirror in a repository of the Hugging Face hub, through a local server."""

import shutil
from collections.abc import Iterator

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import UserError
from rungs.integrations.mirror_folder import MirrorFolder
from rungs.integrations.mirroring import Copier, restore_if_empty
from rungs.run.folder import RunFolder
from tests.support.mirrors import files_of, save
from tests.support.writable_hub import WritableHub, writable_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    with writable_hub(monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize("url", ["hf://me/runs", "hf://me/runs/a/b"])
def test_a_run_is_mirrored_in_a_private_repository_and_restored(
    url: str, run: RunFolder, hub: WritableHub
) -> None:
    copier = Copier(run, MirrorFolder(url), keep=-1)
    copier.copy(everything=False)
    assert hub.private == {"me/runs"}
    assert len(hub.commits) == 1 + len(list_checkpoints(run.checkpoints))
    expected = files_of(run.path)
    shutil.rmtree(run.path)
    restore_if_empty(run, url, lambda _: None)
    assert files_of(run.path) == expected


@pytest.mark.usefixtures("hub")
def test_old_checkpoints_are_deleted_and_moved_in_a_repository(run: RunFolder) -> None:
    url = "hf://me/runs/a"
    first, second = (checkpoint.folder for checkpoint in list_checkpoints(run.checkpoints))
    Copier(run, MirrorFolder(url), keep=-1).copy(everything=True)
    aside = run.aside / "then" / "checkpoints"
    aside.mkdir(parents=True)
    second.rename(aside / second.name)
    third, fourth = save(run, 3), save(run, 4)
    Copier(run, MirrorFolder(url), keep=-1).copy(everything=True)
    shutil.rmtree(third)
    Copier(run, MirrorFolder(url), keep=1).copy(everything=True)
    mirror = MirrorFolder(url)
    assert mirror.checkpoints() == [first.name, fourth.name]
    assert f"aside/{second.name}/meta.json" in mirror.files()


def test_without_a_login_nothing_is_copied(
    run: RunFolder, hub: WritableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(Exception, match="401"):
        Copier(run, MirrorFolder("hf://me/runs"), keep=-1).copy(everything=True)
    assert hub.repositories == {}
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match="needs a login to the Hugging Face hub"):
        restore_if_empty(run, "hf://me/runs", lambda _: None)
