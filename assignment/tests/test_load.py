"""`assignment/load.py`: a student's model as a run."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from click.testing import CliRunner
from flax import nnx

import rungs
from assignment import load
from assignment.solution.checkpoint import save_checkpoint
from assignment.solution.model import TransformerLM
from assignment.solution.tokenizer import Tokenizer, train_bpe
from assignment.tests.reference import call, randomize
from rungs.common.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "d_model": 24,
    "num_heads": 3,
    "d_ff": 40,
    "theta": 500.0,
    "vocab_size": 300,
    "context_length": 32,
    "num_layers": 2,
}


def save(path: Path) -> TransformerLM:
    model = TransformerLM(nnx.Rngs(0), **CONFIG)
    randomize(model)
    save_model(model, path)
    return model


def save_model(model: TransformerLM, path: Path) -> None:
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    save_checkpoint(model, optimizer, 7, path)


def run(*arguments: object) -> None:
    CliRunner().invoke(load.main, [*map(str, arguments)], catch_exceptions=False)


def test_the_run_has_the_same_logits(tmp_path: Path) -> None:
    model = save(tmp_path / "checkpoint")
    run(tmp_path / "checkpoint", tmp_path / "mine")
    tokens = jnp.asarray(np.random.default_rng(7).integers(300, size=(2, 32)))
    found = rungs.load_model(str(tmp_path / "mine"))(tokens)
    np.testing.assert_allclose(found, call(model, tokens), rtol=1e-5, atol=1e-5)


def test_the_run_can_be_trained(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint")
    run(tmp_path / "checkpoint", tmp_path / "mine", "--dataset", "mine")
    config = rungs.load_run(tmp_path / "mine")
    assert (config.train.dataset, config.train.start_from) == ("mine", "imported")
    assert (config.model.n_layers, config.model.rope_theta) == (2, 500)


def test_the_run_has_the_students_tokenizer(tmp_path: Path) -> None:
    text = "sea shells by the sea shore\n" * 9
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(
        *train_bpe(tmp_path / "text.txt", 300, ["<|endoftext|>"]), ["<|endoftext|>"]
    )
    tokenizer.save(tmp_path / "tokenizer")
    save(tmp_path / "checkpoint")
    run(tmp_path / "checkpoint", tmp_path / "mine", "--tokenizer", tmp_path / "tokenizer")
    found = rungs.load_tokenizer(str(tmp_path / "mine/checkpoints/imported/model.safetensors"))
    assert found.encode(text) == tokenizer.encode(text)
    [continued] = rungs.load_generator(str(tmp_path / "mine")).continue_texts(["sea"], 3)
    assert continued


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def without(path: Path, name: str) -> None:
    tensors = safetensors.numpy.load_file(path)
    del tensors[name]
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    safetensors.numpy.save_file(tensors, path, metadata)


def of_another_program(path: Path) -> None:
    safetensors.numpy.save_file({"weight": np.zeros(3, np.float32)}, path)


def with_config(path: Path, text: str) -> None:
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, {"config": text})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def not_finite(path: Path) -> None:
    tensors = safetensors.numpy.load_file(path)
    tensors["model.ln1.weights"][0] = np.nan
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    safetensors.numpy.save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "no such file"),
        (lambda path: (path.unlink(), path.mkdir()), "not a file"),
        (lambda path: path.write_text("weights"), "not a checkpoint that save_checkpoint wrote"),
        (damaged, "not a checkpoint that save_checkpoint wrote"),
        (of_another_program, "not a checkpoint of a TransformerLM: its config has no vocab_size"),
        (
            lambda path: without(path, "model.layers.1.SwiGLU.w2.weights"),
            r"TransformerLM: layers\.1\.SwiGLU\.w2\.weights is missing",
        ),
        (not_finite, "NaN or infinite"),
        (
            lambda path: with_config(path, nested(100_000)),
            "not a checkpoint that save_checkpoint wrote: maximum recursion depth exceeded",
        ),
        (
            lambda path: with_config(path, f'{{"vocab_size": {nested(900)}}}'),
            "its config has vocab_size .*, which must be a positive number",
        ),
        (
            lambda path: with_config(path, json.dumps(CONFIG | {"num_layers": 10**18})),
            r"TransformerLM: layers\.2\.MHA\.Q_proj\.weights is missing",
        ),
        (
            lambda path: with_config(path, json.dumps(CONFIG | {"num_layers": 1})),
            r"TransformerLM: layers\.1\.MHA\.K_proj\.weights is unknown",
        ),
        (
            lambda path: with_config(path, json.dumps(CONFIG | {"theta": math.inf})),
            "rope_theta: Infinity is not allowed",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_a_line(tmp_path: Path, spoil: Any, message: str) -> None:
    save(tmp_path / "checkpoint")
    spoil(tmp_path / "checkpoint")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path / "checkpoint", tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200
    assert str(caught.value).startswith(f"{tmp_path}/checkpoint: ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    model = save(tmp_path / "checkpoint")
    model.d_ff = 41
    save_checkpoint(
        model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param), 0, tmp_path / "checkpoint"
    )
    with pytest.raises(UserError, match=r"SwiGLU\.w1\.weights has shape \(24, 40\)"):
        run(tmp_path / "checkpoint", tmp_path / "mine")


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="tokenizer"):
        run(tmp_path / "checkpoint", tmp_path / "mine", "--tokenizer", tmp_path)
    assert not (tmp_path / "mine").exists()


def test_a_tokenizer_with_links_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint")
    shutil.copytree(ROOT / "tests/fixtures/tokenizers/qwen", tmp_path / "tokenizer")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "tokenizer/chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"tokenizer/chat_template\.jinja: is a link out of its"):
        run(tmp_path / "checkpoint", tmp_path / "mine", "--tokenizer", tmp_path / "tokenizer")
    assert not (tmp_path / "mine").exists()


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint")
    (tmp_path / "mine").mkdir()
    command = [sys.executable, str(ROOT / "assignment/load.py"), "checkpoint", f"{tmp_path}/mine"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {tmp_path}/mine: exists already")
    assert len(ended.stderr.splitlines()) == 1
    assert not list((tmp_path / "mine").iterdir())
