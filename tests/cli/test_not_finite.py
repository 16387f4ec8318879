"""Models with NaN or infinite values: each command that reads one says so, in one line."""

import json
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.cli import evaluate, generate, pretrained
from rungs.common.errors import RunFailure, UserError
from rungs.config.run_config import RunConfig
from rungs.data.text.tokenizer import train_bpe
from tests.cli.test_commands import BYTES
from tests.support.configs import ONE_FILE, model_config, train_config
from tests.support.published_models import MODELS, Arrays, arrays, copy
from tests.support.token_datasets import make_text


def run(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def write_model(folder: Path, weights: Arrays) -> Path:
    folder.mkdir()
    shape = {"n_layers": 0, "positions": "none", "norm": "none"}
    train = train_config(dataset="bytes", validation_tokens=160)
    config = RunConfig(model_config(vocab_size=BYTES, emb_dim=BYTES, **shape), train)
    write_weights(folder, weights, WeightsHeader(*config, tokenizer="bytes"), ONE_FILE)
    train_bpe([], BYTES).save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def overflowing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of finite weights whose logits are ∞ − ∞."""
    signs = np.where(np.arange(BYTES) % 2, 10, -10).astype(np.float32)
    weights = {
        "token_embedding.embedding": np.full((BYTES, BYTES), 1e38, np.float32),
        "head.kernel": np.repeat(signs[:, None], BYTES, axis=1),
    }
    return write_model(tmp_path_factory.mktemp("models") / "overflowing", weights)


@pytest.mark.parametrize(
    "options",
    [
        ("abcabcab", "--lookahead", 2),
        ("a", "--dtype", "bfloat16"),
    ],
    ids=str,
)
def test_logits_that_are_nan_end_generation(
    options: tuple[object, ...], overflowing_model: Path
) -> None:
    result = run(generate.main, overflowing_model, *options, "--new-tokens", 4)
    assert isinstance(result.exception, RunFailure)
    assert "text 1: the model's logits are NaN; use another checkpoint" in str(result.exception)
    assert ("or generate in float32" in str(result.exception)) == ("--dtype" in options)


def test_scores_and_losses_that_are_nan_are_not_printed(
    overflowing_model: Path, tmp_path: Path
) -> None:
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text(json.dumps({"prompt": "a", "choices": ["b", "c"], "answer": 0}))
    result = run(evaluate.main, overflowing_model, "--choices", quiz)
    assert "log-probabilities are NaN" in str(result.exception)
    assert isinstance(result.exception, RunFailure)
    assert result.stdout == ""
    dataset = make_text(tmp_path, "bytes", train=np.arange(200), validation=np.arange(200))
    shutil.copy(overflowing_model / "tokenizer.json", dataset.folder)
    result = run(evaluate.main, overflowing_model, "--datasets-dir", tmp_path)
    assert "model.safetensors: the loss is nan; use another checkpoint" in str(result.exception)
    assert isinstance(result.exception, RunFailure)
    assert result.stdout == ""


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    weights = {
        "token_embedding.embedding": np.eye(BYTES, dtype=np.float32),
        "head.kernel": np.eye(BYTES, dtype=np.float32),
    }
    weights["head.kernel"][3, 5] = value
    model = write_model(tmp_path / "model", weights)
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text(json.dumps({"prompt": "a", "choices": ["b", "c"], "answer": 0}))
    commands = (
        (generate.main, model, "a"),
        (evaluate.main, model, "--choices", quiz),
    )
    for command, *arguments in commands:
        error = run(command, *arguments).exception
        assert isinstance(error, UserError)
        assert "tensor head.kernel: has NaN or infinite values" in str(error), str(error)


def test_an_import_names_the_tensors_that_are_not_finite(tmp_path: Path) -> None:
    """Buffers that are left out, such as masks, may have infinite values."""
    mask = {"transformer.h.0.attn.masked_bias": np.asarray([-np.inf], np.float32)}
    healthy = copy("gpt2", tmp_path / "healthy", arrays(MODELS / "gpt2") | mask)
    assert run(pretrained.main, "import", healthy, tmp_path / "run").exit_code == 0
    tensors = arrays(MODELS / "gpt2")
    for name in ("transformer.h.1.mlp.c_fc.weight", "transformer.h.2.ln_1.bias"):
        tensors[name] = tensors[name].copy()
        tensors[name][-1] = np.nan
    error = run(
        pretrained.main, "import", copy("gpt2", tmp_path / "nan", tensors), tmp_path / "broken"
    ).exception
    assert isinstance(error, UserError)
    assert "NaN or infinite values in 2 of 40 tensors" in str(error)
    assert "(transformer.h.1.mlp.c_fc.weight, transformer.h.2.ln_1.bias)" in str(error)
    assert not (tmp_path / "broken").exists()
