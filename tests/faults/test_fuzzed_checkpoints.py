"""Whatever a checkpoint's files contain, it is used only if valid, else reported in clear lines."""

import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import list_checkpoints, newest_valid
from rungs.checkpointing.load import load_model
from rungs.checkpointing.manifest import CheckpointMeta, read_checkpoint, write_manifest
from rungs.checkpointing.published import stop_tokens
from rungs.checkpointing.weights_file import Origin, Weights, WeightsHeader, write_weights
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.data.text.tokenizer import train_bpe
from rungs.data.tokens.token_file import TokenFile
from rungs.huggingface.tensors import safetensors_specs
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.state import shapes_of
from rungs.training.resume import checkpoint_to_resume
from tests.faults.fuzzing import (
    ODD_TEXTS,
    Fault,
    attempt,
    bad_json,
    bad_object,
    bad_weights,
    examples,
    in_place,
    limited_memory,
    put,
    safetensors,
)
from tests.support.configs import model_config, train_config
from tests.support.written_checkpoints import write_optimizer

CONFIG = RunConfig(model_config(vocab_size=8, emb_dim=4, n_layers=1, n_heads=1), train_config())
OLD, NEW = "20260101Z000000-step-000001", "20260102Z000000-step-000002"
IN_SHARDS = 300
HEADER = WeightsHeader(*CONFIG, "gpt2", Origin(source="a/b", model_type="gpt2", dtype="float32"))


RNG = np.random.default_rng(0)
TOKENIZER = train_bpe([], 257)
ARRAYS = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in shapes_of(CONFIG.model).items()
}


def _meta(step: int) -> CheckpointMeta:
    return CheckpointMeta(
        global_step=step,
        total_steps=100,
        tokens_seen=step,
        train_loss=1.0,
        validation_loss=2.0,
        selection_loss=2.0,
        model=CONFIG.model.as_json(),
        train=CONFIG.train.as_json(),
        datasets={"tiny": {"train": "0" * 64}},
        tokenizer="gpt2",
        sharding=ShardingConfig(data=1, tensor=1),
        created="2026-01-01T00:00:00+00:00",
        versions={"jax": "1"},
        checksums={},
    )


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not log each checkpoint that is skipped."""
    monkeypatch.setattr(logging.getLogger("rungs"), "disabled", True)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an old and a new checkpoint, the new one sharded; tests must not change it."""
    run = tmp_path_factory.mktemp("unharmed") / "run"
    for name, step, limit in ((OLD, 1, 2**40), (NEW, 2, IN_SHARDS)):
        folder = run / "checkpoints" / name
        folder.mkdir(parents=True)
        write_weights(folder, ARRAYS, HEADER, limit)
        write_optimizer(folder)
        write_manifest(folder, _meta(step))
    checkpoint_folder.update_links(run / "checkpoints")
    return run


@pytest.fixture
def run(unharmed: Path, tmp_path: Path) -> Path:
    shutil.copytree(unharmed, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


META = json.loads(_meta(2).with_own_checksum().model_dump_json())


@examples(50)
@given(data=st.data())
def test_a_run_resumes_from_the_newest_checkpoint_with_a_valid_meta_json(
    data: st.DataObject, run: Path
) -> None:
    checkpoints = run / "checkpoints"
    content = (checkpoints / NEW / "meta.json").read_bytes()
    kept = read_checkpoint(checkpoints / NEW)
    fault = data.draw(in_place(bad_json(json.loads(content))))
    fault(checkpoints / NEW / "meta.json")
    found = attempt(lambda: newest_valid(checkpoints), run)
    read = attempt(lambda: read_checkpoint(checkpoints / NEW), run, "meta.json")
    attempt(
        lambda: checkpoint_to_resume(RunFolder(run), StartOptions(rewind_to="latest")),
        run,
        NEW,
        OLD,
    )
    put(checkpoints / NEW / "meta.json", content)
    assert not isinstance(found, UserError | None)
    is_valid = not isinstance(read, UserError) and not read.damage()
    assert found.step == (2 if is_valid else 1)
    assert not is_valid or read == kept


@examples(50)
@given(content=bad_object(META))
def test_a_manipulated_meta_json_with_a_valid_checksum_is_checked(
    content: bytes, run: Path
) -> None:
    path = run / "checkpoints" / NEW / "meta.json"
    kept = path.read_bytes()
    try:
        meta = CheckpointMeta.model_validate_json(content)
        put(path, json.dumps(meta.with_own_checksum().model_dump(mode="json")).encode())
    except ValueError:
        return
    for action in (
        lambda: newest_valid(path.parents[1]),
        lambda: list_checkpoints(path.parents[1]),
    ):
        assert not isinstance(attempt(action, run), UserError)
    read = attempt(lambda: read_checkpoint(path.parent), run, "meta.json")
    if not isinstance(read, UserError):
        assert read.step >= 0
        attempt(read.meta.run_config, run)
        attempt(read.damage, run)
    put(path, kept)


@pytest.mark.parametrize("name", ["../../train.json", "/dev/zero", "/etc/passwd", "a\0b", "..", ""])
def test_only_files_in_the_checkpoint_folder_are_read(name: str, run: Path) -> None:
    folder = run / "checkpoints" / NEW
    meta = read_checkpoint(folder).meta
    listed = meta.model_copy(update={"checksums": {name: "0" * 64}}).with_own_checksum()
    put(folder / "meta.json", json.dumps(listed.model_dump(mode="json")).encode())
    read = attempt(lambda: read_checkpoint(folder), run, "meta.json")
    assert isinstance(read, UserError)
    assert newest_valid(folder.parent).step == 1  # type: ignore[union-attr]


WEIGHTS = save(ARRAYS, HEADER.as_metadata())
INDEX = {
    "metadata": {"total_size": 5},
    "weight_map": dict.fromkeys(ARRAYS, "model.safetensors"),
}
texts = st.sampled_from(ODD_TEXTS)


def _use(path: Path) -> tuple[jax.Array, ...]:
    """Load the weights as a start or a command does."""
    model = load_model(path)
    return tuple(jax.tree.leaves(nnx.state(model)))


@examples(50)
@given(fault=in_place(bad_weights(WEIGHTS)))
def test_any_weights_file(fault: Fault, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    fault(path)
    attempt(lambda: _use(path), tmp_path, "model.safetensors")


@examples(25)
@given(key=st.sampled_from(["model", "train", "origin"]), data=st.data())
def test_any_header_of_weights(key: str, data: st.DataObject, tmp_path: Path) -> None:
    texts = HEADER.as_metadata()
    texts[key] = data.draw(bad_object(json.loads(texts[key]))).decode(errors="replace")
    put(tmp_path / "model.safetensors", save(ARRAYS, texts))
    attempt(lambda: _use(tmp_path), tmp_path, "model.safetensors")


@examples(50)
@given(fault=in_place(bad_json(INDEX)))
def test_any_index_of_weights(fault: Fault, tmp_path: Path) -> None:
    run, shards = tmp_path / "run", tmp_path / "run" / "checkpoints" / NEW
    if not run.exists():
        shards.mkdir(parents=True)
        write_weights(shards, ARRAYS, HEADER, IN_SHARDS)
    fault(shards / "model.safetensors.index.json")
    attempt(lambda: _use(shards), tmp_path, "model.safetensors", str(shards))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/dev/zero", "a\0b", "..", "", "~", "a\\b"]
)
def test_an_index_may_only_name_files_beside_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    put(tmp_path / "model.safetensors", WEIGHTS)
    index = {"weight_map": dict.fromkeys(ARRAYS, name)}
    put(folder / "model.safetensors.index.json", json.dumps(index).encode())
    error = attempt(lambda: _use(folder), tmp_path, "index.json")
    assert isinstance(error, UserError)
    assert "damaged" in str(error)


LORA = train_config(
    start_from="imported", lora={"rank": 2, "alpha": 4, "targets": ["query", "key"]}
)
QUERY, KEY = "blocks.attention.query.", "blocks.attention.key."
DOWN, UP = st.sampled_from([None, [1, 4, 2]]), st.sampled_from([None, [1, 2, 1, 4]])
dimensions = st.lists(st.sampled_from([0, 1, 2, 4]), max_size=4)


@examples(15)
@given(down=DOWN | dimensions, up=UP | dimensions, beside=st.sampled_from([QUERY, "x."]))
def test_any_lora_weights(
    down: list[int] | None, up: list[int] | None, beside: str, tmp_path: Path
) -> None:
    right = {"low_rank.down": [1, 4, 2], "low_rank.up": [1, 2, 1, 4]}
    shapes = {KEY + name: shape for name, shape in right.items()}
    shapes |= {
        beside + name: shape
        for name, shape in (("low_rank.down", down), ("low_rank.up", up))
        if shape is not None
    }
    low_rank = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    header = HEADER._replace(train=LORA)
    put(tmp_path / "model.safetensors", save(ARRAYS | low_rank, header.as_metadata()))
    found = attempt(lambda: _use(tmp_path), tmp_path, "model.safetensors")
    fits = beside == QUERY and [down, up] == list(right.values())
    assert isinstance(found, UserError) != fits


@examples(40)
@given(fault=in_place(bad_json({"eos_token_id": [1, 2], "bos_token_id": 1})))
def test_any_generation_config(fault: Fault, tmp_path: Path) -> None:
    fault(tmp_path / "generation_config.json")
    found = attempt(lambda: stop_tokens(tmp_path, TOKENIZER), tmp_path, "generation_config.json")
    if not isinstance(found, UserError):
        assert np.array(found, np.int32).tolist() == list(found)


@pytest.mark.parametrize("length", [2**27, 2**32, 2**62])
def test_a_header_that_claims_a_huge_size_takes_no_memory(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [length // 4], "data_offsets": [0, length]}
    header = json.dumps({"tokens": entry}).encode()
    for content in (safetensors(header, bytes(8)), safetensors(header, bytes(8), length)):
        put(path, content)
        for read in READERS:
            with limited_memory(64 << 20):
                assert isinstance(attempt(lambda: read(path), tmp_path), UserError)  # noqa: B023


READERS = (Weights, TokenFile, lambda path: list(safetensors_specs(path)))
