"""`pretrained.py upload`: what arrives on the hub, through a local server, and what is refused."""

import errno
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import HfApi, ModelCard, constants

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import META_FILE, write_manifest
from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.cli import pretrained
from rungs.common.errors import UserError, system_error
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.data.text.tokenizer import train_bpe
from rungs.data.tokens.dataset import (
    DatasetDescription,
    Documents,
    Source,
    SplitDescription,
    write_description,
)
from rungs.huggingface.exporting import Export
from rungs.huggingface.gguf.reading import GGUFTensors
from rungs.huggingface.tensors import model_parameters
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.records import Evaluation
from tests.support.commands import run_script
from tests.support.configs import ONE_FILE, train_config
from tests.support.published_models import MODELS
from tests.support.writable_hub import WritableHub, writable_hub
from tests.support.written_checkpoints import checkpoint_meta

NAME = "me/tiny"
MODEL = {"vocab_size": 300, "context_length": 16, "emb_dim": 8, "n_layers": 2, "n_heads": 2}
CHART = b"\x89PNG not really"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WritableHub]:
    monkeypatch.chdir(tmp_path)
    with writable_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A trained run with a chart and a score, on a dataset of documents from the hub."""
    run = RunFolder(tmp_path / "runs" / "tiny")
    checkpoint = run.checkpoints / "20260101Z000000-step-000007"
    checkpoint.mkdir(parents=True)
    config = RunConfig(ModelConfig.model_validate(MODEL), train_config(dataset="owner/stories"))
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(size=parameter.shape).astype(np.float32)
        for name, parameter in model_parameters(config.model).items()
    }
    write_weights(checkpoint, weights, WeightsHeader(*config, "owner/stories"), ONE_FILE)
    train_bpe(["to be or not to be"], 270).save(checkpoint / "tokenizer.json")
    meta = checkpoint_meta(config, step=7, validation_loss=2.0)
    datasets = {"owner/stories": {"train": "c" * 64}}
    write_manifest(checkpoint, meta.model_copy(update={"datasets": datasets}))
    checkpoint_folder.update_links(run.checkpoints)
    (run.path / "loss-chart.png").write_bytes(CHART)
    score = Evaluation(
        time=records.now(),
        checkpoint=checkpoint.name,
        task="hellaswag",
        metric="acc",
        value=0.31,
        standard_error=0.01,
        items=100,
    )
    other = score.model_copy(update={"checkpoint": "another", "value": 0.99})
    records.append(run, [score, other])
    return run


@pytest.fixture
def datasets_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "datasets" / "owner" / "stories"
    folder.mkdir(parents=True)
    documents = Documents(
        request="x",
        repository="owner/stories",
        license="cdla-sharing-1.0",
        files=[],
        rows_without_text=0,
        text_bytes=1,
    )
    split = SplitDescription(
        tokens=123_456, dtype="U16", largest_token_id=1, file_bytes=1, sha256="c" * 64
    )
    source = Source(kind="documents", revision="d" * 40, documents=documents)
    write_description(folder, DatasetDescription(source=source, splits={"train": split}))
    return folder.parents[1]


def add_checkpoint(run: RunFolder, step: int) -> None:
    """Add a checkpoint with other weights, and worse."""
    [first] = [one for one in list_checkpoints(run.checkpoints) if one.step == 7]
    folder = run.checkpoints / f"20260102Z000000-step-{step:06d}"
    shutil.copytree(first.folder, folder, ignore=shutil.ignore_patterns(META_FILE))
    weights = first.weights
    changed = {name: weights.array(name) + np.float32(step) for name in weights.names()}
    write_weights(folder, changed, weights.header, ONE_FILE)
    losses = {"validation_loss": 3.0, "selection_loss": 3.0}
    write_manifest(folder, first.meta.model_copy(update={"global_step": step, **losses}))
    checkpoint_folder.update_links(run.checkpoints)


def upload(run: RunFolder | Path, *options: object, name: str = NAME) -> Result:
    place = run.path if isinstance(run, RunFolder) else run
    arguments = ["upload", str(place), name, *map(str, options)]
    return CliRunner().invoke(pretrained.main, arguments)


def test_the_uploaded_model_is_the_exported_one(
    run: RunFolder, hub: WritableHub, tmp_path: Path
) -> None:
    result = upload(run)
    assert result.exit_code == 0, result.output
    assert hub.private == {NAME}
    assert len(hub.commits) == 1
    expected = tmp_path / "expected"
    expected.mkdir()
    Export(str(run.path)).write(expected)
    uploaded = hub.repositories[NAME]
    assert uploaded.keys() - {p.name for p in expected.iterdir()} == {
        "README.md",
        "charts/loss-chart.png",
    }
    for path in expected.iterdir():
        assert uploaded[path.name] == path.read_bytes(), path.name
    assert uploaded["charts/loss-chart.png"] == CHART
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_card_says_what_was_trained_on_what(
    run: RunFolder, hub: WritableHub, datasets_dir: Path
) -> None:
    assert upload(run, "--datasets-dir", datasets_dir, "--public").exit_code == 0
    assert hub.private == set()
    card = ModelCard(hub.repositories[NAME]["README.md"].decode())
    metadata = card.data.to_dict()
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["datasets"] == ["owner/stories"]
    (result,) = metadata["model-index"][0]["results"]
    assert result["dataset"]["type"] == "hellaswag"
    assert result["metrics"] == [{"type": "acc", "value": 0.31}]
    for line in (
        "| steps | 8 of 100 |",
        "| validation loss | 2.0000 nats per token (perplexity 7.39) |",
        "| hellaswag, acc | 0.3100 ± 0.0100 on 100 items |",
        f"commit {'d' * 40}, license cdla-sharing-1.0, 123,456 tokens, sha256 of the tokens cccc",
        f'AutoModelForCausalLM.from_pretrained("{NAME}")',
        "![loss chart](charts/loss-chart.png)",
        '"emb_dim": 8',
        '"dataset": "owner/stories"',
    ):
        assert line in card.text, line
    assert "0.9900" not in card.text


def test_an_imported_model_names_its_base(hub: WritableHub, tmp_path: Path) -> None:
    arguments = ["import", str(MODELS / "gpt2"), str(tmp_path / "imported")]
    assert CliRunner().invoke(pretrained.main, arguments).exit_code == 0
    assert upload(tmp_path / "imported").exit_code == 0
    card = ModelCard(hub.repositories[NAME]["README.md"].decode())
    assert "base_model" not in card.data.to_dict()  # a folder, which the hub doesn't know
    assert "The training started from `gpt2`." in card.text


def test_a_second_upload_replaces_the_weights(run: RunFolder, hub: WritableHub) -> None:
    hub.repositories[NAME] = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"kept"}
    assert upload(run).exit_code == 0
    assert "model-00001-of-00002.safetensors" not in hub.repositories[NAME]
    assert hub.repositories[NAME]["notes.md"] == b"kept"


@pytest.mark.parametrize("name", ["tiny", "a/b/c"])
def test_a_name_without_an_owner_is_refused(name: str, run: RunFolder, hub: WritableHub) -> None:
    refused = upload(run, name=name)
    assert isinstance(refused.exception, UserError)
    assert "OWNER/NAME" in str(refused.exception)
    assert hub.repositories == {}


@pytest.mark.parametrize("token", ["hf_wrong", None])
def test_a_missing_or_wrong_login_is_refused(
    token: str | None, run: RunFolder, hub: WritableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    refused = upload(run)
    assert isinstance(refused.exception, UserError)
    assert "log in with `hf auth login`" in str(refused.exception)
    assert hub.repositories == {}


def test_without_a_network_nothing_is_left_behind(
    run: RunFolder, hub: WritableHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused = upload(run)
    assert isinstance(refused.exception, UserError)
    assert "cannot be uploaded to the Hugging Face hub" in str(refused.exception)
    assert sorted(tmp_path.rglob("*")) == before
    assert hub.repositories == {}


def test_a_full_disk_is_one_line(
    run: RunFolder, hub: WritableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Export, "write", fail)
    refused = upload(run)
    assert isinstance(refused.exception, OSError)
    assert "could not be written: No space left" in str(system_error(refused.exception))
    assert hub.repositories == {}


def test_a_damaged_checkpoint_is_refused(run: RunFolder, hub: WritableHub) -> None:
    weights = list_checkpoints(run.checkpoints)[0].folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert isinstance(upload(run).exception, UserError)
    assert hub.repositories == {}


def test_a_gguf_file_is_added_on_request(run: RunFolder, hub: WritableHub, tmp_path: Path) -> None:
    result = upload(run, "--gguf", "q8_0")
    assert result.exit_code == 0, result.output
    (tmp_path / "tiny.gguf").write_bytes(hub.repositories[NAME]["tiny-q8_0.gguf"])
    assert GGUFTensors(tmp_path / "tiny.gguf").model.emb_dim == 8
    card = hub.repositories[NAME]["README.md"].decode()
    assert "llama-cli -hf me/tiny -hff tiny-q8_0.gguf" in card
    assert ModelCard(card).data.to_dict()["tags"] == ["rungs", "jax", "gguf"]


def exported(checkpoint: Path, folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint's export, by name."""
    folder.mkdir()
    Export(str(checkpoint)).write(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_step_is_a_revision(run: RunFolder, hub: WritableHub, tmp_path: Path) -> None:
    for step in (8, 1000):
        add_checkpoint(run, step)
    result = upload(run, "--all-steps")
    assert result.exit_code == 0, result.output
    assert set(hub.branches) == {(NAME, f"step{step}") for step in (7, 8, 1000)}
    assert len(hub.commits) == 4
    for one in list_checkpoints(run.checkpoints):
        files = hub.branches[NAME, f"step{one.step}"]
        expected = exported(one.folder, tmp_path / f"expected-{one.step}")
        assert files.items() >= expected.items()
        card = files["README.md"].decode()
        assert f'AutoModelForCausalLM.from_pretrained("{NAME}", revision="step{one.step}")' in card
        assert f"import {NAME} runs/tiny --revision step{one.step}\n" in card
        assert f"| steps | {one.step + 1:,} of 100 |" in card
    weights = {files["model.safetensors"] for files in hub.branches.values()}
    assert len(weights) == 3
    assert hub.repositories[NAME]["model.safetensors"] in weights
    assert "revision" not in hub.repositories[NAME]["README.md"].decode()


def test_a_second_upload_sends_what_is_missing_or_different(
    run: RunFolder, hub: WritableHub
) -> None:
    add_checkpoint(run, 8)
    assert upload(run, "--all-steps").exit_code == 0
    before = {name: dict(files) for name, files in hub.branches.items()}
    hub.commits.clear()
    assert upload(run, "--all-steps").exit_code == 0
    assert hub.commits == []
    hub.branches[NAME, "step7"]["config.json"] = b"{}"
    hub.branches[NAME, "step8"]["model-00001-of-00001.safetensors"] = b"old"
    add_checkpoint(run, 9)
    assert upload(run, "--all-steps").exit_code == 0
    assert len(hub.commits) == 3
    assert hub.branches.pop((NAME, "step9"))
    assert hub.branches == before


def test_a_revision_with_wrong_weights_is_named(run: RunFolder, hub: WritableHub) -> None:
    for step in (8, 9):
        add_checkpoint(run, step)
    wrong = b"of another step" * 100
    hub.served["step8", "model.safetensors"] = wrong
    failed = run_script("pretrained.py", "upload", run.path, NAME, "--all-steps")
    assert failed.returncode == 1
    errors = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    there = hashlib.sha256(wrong).hexdigest()
    assert errors[0].startswith(f"error: {NAME}, step8: model.safetensors has sha256 {there}, here")
    assert "run this again" in errors[1]
    assert len(errors) == 2
    assert set(hub.branches) == {(NAME, f"step{step}") for step in (7, 8, 9)}
    hub.served.clear()
    hub.commits.clear()
    assert upload(run, "--all-steps").exit_code == 0
    assert len(hub.commits) == 1


def test_an_upload_that_breaks_off_leaves_no_weights_of_main(
    run: RunFolder, hub: WritableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upload(run).exit_code == 0

    def fail(*_: object, **__: object) -> None:
        raise OSError("connection lost")

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    assert isinstance(upload(run, "--all-steps").exception, UserError)
    assert hub.branches == {(NAME, "step7"): {}}


def test_all_steps_need_a_run_without_damaged_checkpoints(run: RunFolder, hub: WritableHub) -> None:
    add_checkpoint(run, 8)
    old, new = list_checkpoints(run.checkpoints)
    refused = upload(old.folder, "--all-steps")
    assert isinstance(refused.exception, UserError)
    assert "name a run folder" in str(refused.exception)
    (new.folder / META_FILE).write_text("{}")
    refused = upload(run, "--all-steps")
    assert isinstance(refused.exception, UserError)
    assert str(new.folder) in str(refused.exception)
    assert hub.repositories == {}
