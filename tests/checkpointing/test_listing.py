"""What the list of a run's checkpoints says: losses, links, damage, imported weights."""

import json
import shutil
from pathlib import Path

import pytest

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import list_run
from rungs.checkpointing.manifest import Checkpoint, write_checksums
from rungs.run.folder import RunFolder
from tests.support.written_checkpoints import (
    NEW,
    OLD,
    flip_byte,
    write_checkpoints,
    write_model,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    write_checkpoints(run.checkpoints)
    return run


@pytest.mark.parametrize("verify", [False, True])
def test_valid_checkpoints_are_listed_in_the_order_they_were_saved(
    verify: bool, run: RunFolder
) -> None:
    old, new = list_run(run, verify=verify)
    assert (old.name, old.step, old.train_loss, old.validation_loss) == (OLD, 1, 3.0, 2.0)
    assert (new.name, new.step, new.train_loss, new.validation_loss) == (NEW, 2, 3.5, 2.5)
    assert (old.created, new.created) == ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00")
    assert (old.links, new.links) == (["best"], ["latest"])
    assert old.has_checksums
    assert old.damage == new.damage == []
    files = [path for path in (run.checkpoints / OLD).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "_METADATA", "meta.json"}
    assert old.bytes == sum(len(path.read_bytes()) for path in files)


def test_a_flipped_byte_is_found_only_by_hashing(run: RunFolder) -> None:
    flip_byte(run.checkpoints / OLD / "optimizer" / "state" / "manifest.ocdbt")
    assert [c.damage for c in list_run(run, verify=False)] == [[], []]
    assert [c.damage for c in list_run(run, verify=True)] == [
        ["optimizer/state/manifest.ocdbt"],
        [],
    ]


@pytest.mark.parametrize("verify", [False, True])
def test_a_missing_file_is_found_without_hashing(verify: bool, run: RunFolder) -> None:
    (run.checkpoints / NEW / "model.safetensors").unlink()
    assert [c.damage for c in list_run(run, verify=verify)] == [[], ["model.safetensors"]]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("is_json", [False, True])
def test_a_damaged_meta_json_is_found_without_hashing(
    verify: bool, is_json: bool, run: RunFolder
) -> None:
    path = run.checkpoints / NEW / "meta.json"
    changed = json.dumps(json.loads(path.read_text()) | {"global_step": 3})
    path.write_text(changed if is_json else "{")
    damaged = list_run(run, verify=verify)[1]
    assert (damaged.name, damaged.step, damaged.damage) == (NEW, None, ["meta.json"])
    assert (damaged.train_loss, damaged.validation_loss, damaged.created) == (None, None, "")
    assert not damaged.has_checksums


def test_imported_weights_come_first_even_without_checksums(
    run: RunFolder,
) -> None:
    write_model(run.imported)
    imported, *saved = list_run(run, verify=True)
    assert (imported.name, imported.step, imported.damage) == ("imported", None, [])
    assert imported.bytes == (run.imported / "model.safetensors").stat().st_size
    assert not imported.has_checksums
    assert [c.name for c in saved] == [OLD, NEW]


def test_imported_weights_with_checksums_are_verified(run: RunFolder) -> None:
    write_model(run.imported)
    write_checksums(run.imported)
    assert list_run(run, verify=True)[0].has_checksums
    flip_byte(run.imported / "model.safetensors")
    assert list_run(run, verify=False)[0].damage == []
    assert list_run(run, verify=True)[0].damage == ["model.safetensors"]
    (run.imported / "model.safetensors").unlink()
    assert list_run(run, verify=False)[0].damage == ["model.safetensors"]


def test_a_run_without_checkpoints_has_an_empty_list(tmp_path: Path) -> None:
    assert list_run(RunFolder(tmp_path), verify=True) == []


def test_a_checkpoint_that_training_deletes_meanwhile_is_left_out(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = checkpoint_folder.read_checkpoint

    def delete_old_and_read(folder: Path) -> Checkpoint:
        if folder.name == OLD:
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(checkpoint_folder, "read_checkpoint", delete_old_and_read)
    assert [(found.name, found.damage) for found in list_run(run, verify=True)] == [(NEW, [])]
