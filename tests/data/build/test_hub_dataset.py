"""Datasets on the hub, downloaded by the real client from a local server."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from rungs.common.errors import UserError
from rungs.data.catalog import open_dataset
from rungs.data.text.tokenizer import train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens import dataset
from tests.support.hub_stand_in import DATASET, MODEL, HubStandIn
from tests.support.local_server import use_server


def token_bytes(count: int) -> bytes:
    return save({"tokens": np.arange(count, dtype=np.uint16)})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        stand_in.files = {
            "train.safetensors": token_bytes(1000),
            "validation.safetensors": token_bytes(50),
            "tokenizer.json": b"{}",
            "dataset.json": b'{"not": "ours"}',
            "README.md": b"read me",
            "loader.py": b"raise SystemExit",
        }
        use_server(stand_in.address, monkeypatch)
        yield stand_in


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_missing_dataset_is_downloaded_without_other_files(
    hub: HubStandIn, tmp_path: Path
) -> None:
    found = open_dataset(DATASET, tmp_path)
    assert found.folder == tmp_path / "owner" / "data"
    np.testing.assert_array_equal(found.tokens("train")[:], np.arange(1000))
    assert found.splits == ("train", "validation")
    assert found.description.source.revision == hub.revision
    assert found.tokenizer_file is not None
    assert hub.downloads() == ["tokenizer.json", "train.safetensors", "validation.safetensors"]
    assert sorted(path.name for path in found.folder.parent.iterdir()) == ["data"]


def test_a_file_name_that_leads_out_of_the_folder_is_refused(
    hub: HubStandIn, tmp_path: Path
) -> None:
    hub.files["../train.safetensors"] = token_bytes(10)
    with pytest.raises(UserError, match=f"dataset {DATASET}: lists the file"):
        open_dataset(DATASET, tmp_path / "datasets")
    assert list(tmp_path.rglob("*")) == []


def test_only_changed_files_of_an_outdated_copy_are_downloaded(
    hub: HubStandIn, tmp_path: Path
) -> None:
    old = open_dataset(DATASET, tmp_path)
    old_tokens = old.tokens("validation")
    hub.downloads()
    open_dataset(DATASET, tmp_path)
    assert hub.downloads() == []
    hub.revision, hub.files["validation.safetensors"] = "b" * 40, token_bytes(60)
    new = open_dataset(DATASET, tmp_path)
    assert hub.downloads() == ["tokenizer.json", "validation.safetensors"]
    assert len(new.tokens("validation")) == 60
    assert len(new.tokens("train")) == 1000
    assert new.description.source.revision == hub.revision
    assert new.description.splits["train"] == old.description.splits["train"]
    np.testing.assert_array_equal(old_tokens[:], np.arange(50))  # still open
    hub.revision = "c" * 40
    del hub.files["validation.safetensors"]
    assert open_dataset(DATASET, tmp_path, update=False).splits == ("train", "validation")
    assert open_dataset(DATASET, tmp_path).splits == ("train",)


def test_what_is_not_there_is_one_line(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="check the name"):
        open_dataset("owner/other", tmp_path)
    del hub.files["train.safetensors"]
    with pytest.raises(UserError, match=r"no train\.safetensors"):
        open_dataset(DATASET, tmp_path)
    go_offline(monkeypatch)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        open_dataset(DATASET, tmp_path)
    assert not list(tmp_path.glob("owner/*"))


def test_the_copy_is_used_offline(
    hub: HubStandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    open_dataset(DATASET, tmp_path)
    hub.requests.clear()
    go_offline(monkeypatch)
    with caplog.at_level(logging.WARNING, "rungs"):
        assert len(open_dataset(DATASET, tmp_path).tokens("train")) == 1000
    assert "may be outdated" in caplog.text
    assert hub.requests == []


def test_a_connection_lost_during_an_update_keeps_the_old_copy(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset(DATASET, tmp_path)
    hub.revision, hub.files["train.safetensors"] = "b" * 40, token_bytes(2000)
    with monkeypatch.context() as patch:
        # The client silently keeps the files of the old revision.
        patch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
        kept = open_dataset(DATASET, tmp_path)
    assert len(kept.tokens("train")) == 1000
    assert kept.description.source.revision == "a" * 40
    assert len(open_dataset(DATASET, tmp_path).tokens("train")) == 2000


def test_an_interrupted_download_is_resumed(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_description", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_dataset(DATASET, tmp_path)
    assert not (tmp_path / "owner" / "data").exists()
    hub.downloads()
    assert len(open_dataset(DATASET, tmp_path).tokens("train")) == 1000
    assert hub.downloads() == ["tokenizer.json"]


def test_an_interrupted_update_does_not_change_the_old_copy(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = open_dataset(DATASET, tmp_path).folder
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    hub.revision, hub.files["train.safetensors"] = "b" * 40, token_bytes(2000)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_description", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_dataset(DATASET, tmp_path)
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    shutil.rmtree(old.with_name(".data.partial"))
    assert len(open_dataset(DATASET, tmp_path).tokens("train")) == 2000


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_users_own_folder_is_never_replaced(hub: HubStandIn, tmp_path: Path) -> None:
    folder = tmp_path / "owner" / "data"
    folder.mkdir(parents=True)
    (folder / "train.safetensors").write_bytes(token_bytes(7))
    for _ in range(2):
        assert len(open_dataset(DATASET, tmp_path).tokens("train")) == 7
    assert hub.requests == []


def test_a_tokenizer_from_the_hub(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    trained = train_bpe(["some text some text"], 270)
    trained.save(tmp_path / "t.json")
    hub.files["tokenizer.json"] = (tmp_path / "t.json").read_bytes()
    assert load_tokenizer(MODEL).encode("some text") == trained.encode("some text")
    go_offline(monkeypatch)
    assert load_tokenizer(MODEL).vocab_size == trained.vocab_size  # from the client's cache
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        load_tokenizer("owner/other")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        load_tokenizer("other")


def test_a_model_without_a_tokenizer_is_reported(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    del hub.files["tokenizer.json"]
    with pytest.raises(
        UserError,
        match=r"owner/model: has no tokenizer on .*: neither tokenizer\.json",
    ):
        load_tokenizer(MODEL)
