"""Any `model.json` and `train.json` is read or reported in clear lines, and what was read can be
written into a checkpoint and read again."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given

from rungs.checkpointing.manifest import CheckpointMeta
from rungs.checkpointing.weights_file import WeightsHeader
from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.config.run_config import RunConfig, load_run
from rungs.config.sharding_config import ShardingConfig
from tests.faults.fuzzing import Fault, attempt, bad_json, examples, in_place, no_file, put
from tests.support.tiny_run import MODEL, TRAIN

FULL_MODEL: dict[str, Any] = MODEL | {
    "$schema": "../../schemas/model.schema.json",
    "n_kv_heads": 1,
    "head_dim": 16,
    "positions": "rope",
    "rope_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 4.0,
        "original_context_length": 8,
    },
    "sliding_window": 4,
    "layer_pattern": ["sliding", "global"],
    "n_experts": 4,
    "experts_per_token": 2,
}
FULL_TRAIN: dict[str, Any] = TRAIN | {
    "dataset": {"tiny": 1, "other": 2.5},
    "start_from": "imported",
    "lora": {"rank": 2, "alpha": 4, "targets": ["query"]},
    "sharding": {"mode": "fsdp_tp", "data": 2, "tensor": 2},
    "lineage": {"like": "runs/old", "set": {"seed": 1}},
}
FILES = {"model.json": FULL_MODEL, "train.json": FULL_TRAIN}


def write_valid(folder: Path) -> None:
    for name, keys in FILES.items():
        put(folder / name, json.dumps(keys).encode())


faults = {name: in_place(bad_json(keys)) for name, keys in FILES.items()}


@examples(100)
@given(model=faults["model.json"])
def test_any_model_json(model: Fault, tmp_path: Path) -> None:
    write_valid(tmp_path)
    model(tmp_path / "model.json")
    _load(tmp_path)


@examples(100)
@given(train=faults["train.json"])
def test_any_train_json(train: Fault, tmp_path: Path) -> None:
    write_valid(tmp_path)
    train(tmp_path / "train.json")
    _load(tmp_path)


@examples(20)
@given(model=faults["model.json"] | no_file, train=faults["train.json"] | no_file)
def test_any_two_files(model: Fault, train: Fault, tmp_path: Path) -> None:
    write_valid(tmp_path)
    model(tmp_path / "model.json")
    train(tmp_path / "train.json")
    _load(tmp_path)


def _load(folder: Path) -> None:
    found = attempt(lambda: load_run(folder), folder, "model.json", "train.json")
    if isinstance(found, RunConfig):
        assert_written_and_read(found)


def assert_written_and_read(found: RunConfig) -> None:
    """A checkpoint's meta.json and weights header both hold both configs."""
    header = WeightsHeader(*found, "tiny")
    again = WeightsHeader.from_metadata(header.as_metadata())
    assert run_config.differences(again.model, found.model) == {}
    assert again.train is not None
    assert run_config.differences(again.train, found.train) == {}
    meta = CheckpointMeta(
        global_step=0,
        total_steps=1,
        tokens_seen=1,
        train_loss=None,
        validation_loss=None,
        selection_loss=None,
        model=found.model.as_json(),
        train=found.train.as_json(),
        datasets={},
        tokenizer="tiny",
        sharding=ShardingConfig(data=1, tensor=1),
        created="",
        versions={},
        checksums={},
    ).with_own_checksum()
    read = CheckpointMeta.model_validate_json(json.dumps(meta.model_dump(mode="json")).encode())
    assert read.is_intact()
    for now, then in zip(found, read.run_config(), strict=True):
        assert run_config.differences(then, now) == {}


def test_very_many_unknown_keys_are_reported_in_few_lines(tmp_path: Path) -> None:
    write_valid(tmp_path)
    unknown = {f"key_{number}": number for number in range(100_000)}
    (tmp_path / "model.json").write_text(json.dumps(unknown)[:-1] + ',"key_0": 1}')
    error = attempt(lambda: load_run(tmp_path), tmp_path, "model.json")
    assert isinstance(error, UserError)
