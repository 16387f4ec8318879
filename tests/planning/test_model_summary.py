"""The summary of a model as it is built, and `model.py` as a user runs it."""

import functools
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from rungs.cli import model as model_command
from rungs.planning.model_summary import ModelSummary, summarize
from tests.support.configs import model_config
from tests.support.tiny_run import make_run

MESH = {"data": 2, "tensor": 4, "context": 4}
TIED_GPT = {"vocab_size": 61, "emb_dim": 64, "n_heads": 4, "tied_embeddings": True}


@functools.cache
def summary_of(max_initialized: int = 10**6, **changes: object) -> ModelSummary:
    config = model_config(**changes)
    return summarize(config, None, MESH, seed=0, max_initialized=max_initialized)


def test_modules_are_in_the_order_of_definition() -> None:
    paths = [module.path for module in summary_of().modules]
    assert [path for path in paths if path and "." not in path] == [
        *("token_embedding", "position_embedding", "blocks", "final_norm", "head"),
    ]


def test_arrays_have_their_axes_and_initial_values() -> None:
    arrays = {array.name: array for array in summary_of(**TIED_GPT).arrays}
    up = arrays["blocks.feed_forward.up.kernel"]
    assert (up.axes, up.shape, up.dtype) == (["layers", "emb", "ffn"], [2, 64, 256], "float32")
    assert up.initial_std == pytest.approx(0.02, rel=0.05)
    assert arrays["final_norm.scale"].initial_std == 0


def test_each_mode_splits_what_training_splits() -> None:
    arrays = {array.name: array for array in summary_of(**TIED_GPT).arrays}
    # 61 rows are padded to 64, so they divide by the 4 devices of the tensor axis
    assert arrays["token_embedding.embedding"].splits == {
        "dp": {},
        "fsdp": {"emb": "data"},
        "tp": {"vocab": "tensor"},
        "fsdp_tp": {"vocab": "tensor", "emb": "data"},
        "cp": {"emb": "data × context"},
    }


def test_the_initial_values_of_a_large_model_are_left_out() -> None:
    assert all(array.initial_std is None for array in summary_of(max_initialized=1).arrays)


@pytest.mark.long
def test_the_command_prints_a_table_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    run = make_run(tmp_path / "run")
    table = CliRunner().invoke(model_command.main, [str(run.path)], catch_exceptions=False)
    assert table.exit_code == 0
    lines = table.stdout.splitlines()
    assert lines[0].split() == ["module", "parameters"]
    row = next(line for line in lines if line.startswith("token_embedding.embedding"))
    assert row.split()[:6] == ["token_embedding.embedding", "vocab", "emb", "64", "×", "32"]
    assert "vocab / tensor, emb / data" in row
    found = CliRunner().invoke(model_command.main, [str(run.path), "--json"])
    content = json.loads(found.stdout)
    assert content["parameters"] == sum(math.prod(array["shape"]) for array in content["arrays"])
    assert content["arrays"][0]["splits"]["tp"] == {"vocab": "tensor"}
    assert CliRunner().invoke(model_command.main, [str(run.path), "--tensor", "1"]).exit_code == 2
    assert not (run.path / "checkpoints").exists()
