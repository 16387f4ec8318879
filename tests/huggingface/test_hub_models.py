"""Models downloaded from a local stand-in for the hub, by the real client."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.huggingface.importing import Import, find_source, import_model
from tests.support.hub_stand_in import MODEL, HubStandIn
from tests.support.local_server import use_server
from tests.support.published_models import MODELS


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        for path in (MODELS / "llama-sharded").iterdir():
            if path.name != "expected.safetensors":
                stand_in.files[path.name] = path.read_bytes()
        stand_in.files["README.md"] = stand_in.files["consolidated.safetensors"] = b"not wanted"
        use_server(stand_in.address, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield stand_in


def test_a_model_is_downloaded_and_imported(hub: HubStandIn, tmp_path: Path) -> None:
    found = Import.from_source(find_source(MODEL))
    assert found.origin.source == MODEL
    assert found.origin.revision == hub.revision
    assert set(hub.downloads()) == hub.files.keys() - {"README.md", "consolidated.safetensors"}
    import_model(found, tmp_path / "run")
    weights = tmp_path / "run/checkpoints/imported/model.safetensors"
    assert Weights(weights).header.tokenizer == MODEL


def test_a_cached_model_needs_no_network(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    online = find_source(MODEL)
    hub.downloads()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_source(MODEL) == online
    assert hub.downloads() == []
    shutil.rmtree(online.folder)
    with pytest.raises(
        UserError, match=f"model {MODEL}: cannot be downloaded from the Hugging Face hub"
    ):
        find_source(MODEL)


def test_a_file_outside_of_the_repository_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.files["tokenizer/../../../../../escape.json"] = b"{}"
    with pytest.raises(UserError, match=f"model {MODEL}: cannot be downloaded"):
        find_source(MODEL)
    assert list(tmp_path.rglob("escape.json")) == []


@pytest.mark.usefixtures("hub")
def test_a_token_that_no_header_may_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_é")
    with pytest.raises(UserError, match=f"model {MODEL}: cannot be downloaded"):
        find_source(MODEL)


def test_missing_models_and_weights_are_reported(hub: HubStandIn) -> None:
    with pytest.raises(UserError, match="model owner/other: not on the Hugging Face hub"):
        find_source("owner/other")
    hub.files = {"config.json": b"{}", "model.gguf": b""}
    with pytest.raises(UserError, match=f"^model {MODEL}: has no safetensors weights"):
        find_source(MODEL)
    with pytest.raises(UserError, match="no such folder"):
        find_source("./nowhere/at/all")
    with pytest.raises(UserError, match="a folder has no revisions"):
        find_source(str(MODELS / "llama"), "main")
