"""Run folders of jax-gpt2-from-scratch: what their weights compute here, and back."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from rungs.checkpointing.load import load_model
from rungs.cli import pretrained, train

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 2, 3, 12, 17, 9
RNG = np.random.default_rng(7)
Weights = dict[str, np.ndarray]


def drawn(*shape: int, size: float = 0.3) -> np.ndarray:
    return (RNG.normal(size=shape) * size).astype(np.float32)


def weights_of(stage: str) -> Weights:
    found = {"token_embedding.embedding": drawn(VOCAB, WIDTH)}
    found["output_head.kernel"] = drawn(WIDTH, VOCAB)
    if stage == "a-to-a":
        return found
    found["position_embedding.embedding"] = drawn(CONTEXT, WIDTH)
    norms = ["output_norm"]
    for layer in range(LAYERS):
        name = f"transformers_layers.layers.{layer}"
        norms += [f"{name}.attention_norm", f"{name}.ffn_norm"]
        for part in "qkv":
            found[f"{name}.attention.W_{part}.kernel"] = drawn(WIDTH, WIDTH)
            if stage == "biases":
                found[f"{name}.attention.W_{part}.bias"] = drawn(WIDTH)
        found[f"{name}.attention.output_projection.kernel"] = drawn(WIDTH, WIDTH)
        if stage != "no output bias":
            found[f"{name}.attention.output_projection.bias"] = drawn(WIDTH)
        for number, (inputs, outputs) in {0: (WIDTH, 4 * WIDTH), 2: (4 * WIDTH, WIDTH)}.items():
            found[f"{name}.ffn.layers.{number}.kernel"] = drawn(inputs, outputs)
            found[f"{name}.ffn.layers.{number}.bias"] = drawn(outputs)
    for norm in norms:
        found |= {f"{norm}.scale": 1 + drawn(1, 1, WIDTH), f"{norm}.bias": drawn(1, 1, WIDTH)}
    return found


def forward(weights: Weights, tokens: np.ndarray, added: float = 1e-5) -> np.ndarray:
    """Return the logits of one sequence with 64 bits, by the formulas of the program, which adds
    1e-5 to the standard deviation in its norms."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + added)
        return scaled * w[f"{name}.scale"][0, 0] + w[f"{name}.bias"][0, 0]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.kernel"] + w.get(f"{name}.bias", 0)

    x = w["token_embedding.embedding"][tokens]
    if "output_norm.scale" not in w:
        return x @ w["output_head.kernel"]
    x = x + w["position_embedding.embedding"][: len(tokens)]
    for layer in range(LAYERS):
        name = f"transformers_layers.layers.{layer}"
        inputs, size = norm(x, f"{name}.attention_norm"), WIDTH // HEADS
        q, k, v = (linear(inputs, f"{name}.attention.W_{part}") for part in "qkv")
        heads = []
        for first in range(0, WIDTH, size):
            own = slice(first, first + size)
            scores = q[:, own] @ k[:, own].T / np.sqrt(size)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, own])
        x = x + linear(np.concatenate(heads, -1), f"{name}.attention.output_projection")
        up = linear(norm(x, f"{name}.ffn_norm"), f"{name}.ffn.layers.0")
        up = up * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, f"{name}.ffn.layers.2")
    return norm(x, "output_norm") @ w["output_head.kernel"]


def write_run(folder: Path, stage: str = "final") -> Weights:
    """Write a run folder as the program does."""
    weights = weights_of(stage)
    checkpoint = folder / "checkpoints" / "20260701Z101500-iteration-617"
    checkpoint.mkdir(parents=True)
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / "optimizer").mkdir()
    meta = {"global_step": 617, "learning_rate": 0.001, "avg_train_loss": 3.0, "is_best": True}
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    for link in ("best", "latest"):
        (checkpoint.parent / link).symlink_to(checkpoint.name)
    keys = {"vocab_size": VOCAB, "context_length": CONTEXT, "emb_dim": WIDTH, "n_heads": HEADS}
    keys |= {"n_layers": LAYERS, "qkv_bias": stage == "biases"}
    (folder / "model.json").write_text(json.dumps(keys))
    training = {"dataset": "tiny", "min_train_tokens": -1, "microbatch_size": 6, "drop_rate": 0.1}
    training |= {"gradient_accumulation_steps": 16, "learning_rate": 0.0014}
    training |= {"weight_decay": 0.01, "checkpoint_interval": 617}
    (folder / "train.json").write_text(json.dumps(training))
    return weights


def run(command: Any, *arguments: object) -> Any:
    return CliRunner().invoke(command, [*map(str, arguments)])


@pytest.mark.parametrize("stage", ["final", "biases", "no output bias", "a-to-a"])
def test_its_weights_compute_the_same_here_and_come_back(tmp_path: Path, stage: str) -> None:
    weights = write_run(tmp_path / "theirs", stage)
    result = run(pretrained.main, "import", tmp_path / "theirs", tmp_path / "ours")
    assert result.exit_code == 0, result.output or result.exception
    tokens = RNG.integers(0, VOCAB, CONTEXT)
    logits = np.asarray(load_model(tmp_path / "ours")(jnp.asarray(tokens[None], jnp.int32)))[0]
    np.testing.assert_allclose(logits, forward(weights, tokens), atol=1e-3)
    np.testing.assert_allclose(logits, forward(weights, tokens, added=0), atol=1e-5)
    result = run(pretrained.main, "export", tmp_path / "ours", tmp_path / "back", "--jax-gpt2")
    assert result.exit_code == 0, result.output or result.exception
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: array.shape for name, array in back.items()} == {
        name: array.shape for name, array in weights.items()
    }
    assert all(back[name].tobytes() == array.tobytes() for name, array in weights.items())


@pytest.mark.parametrize("option", [(), ("--fresh",), ("datasets", "latest")])
def test_training_refuses_its_checkpoints_and_names_the_command(
    tmp_path: Path, option: tuple[str, ...]
) -> None:
    folder = tmp_path / "theirs"
    write_run(folder)
    files = sorted((folder / "checkpoints").rglob("*"))
    before = [path.lstat().st_mtime_ns for path in files]
    result = run(train.main, folder, *option)
    assert f"uv run pretrained.py import {folder} {folder}-imported" in str(result.exception)
    assert files == sorted((folder / "checkpoints").rglob("*"))
    assert before == [path.lstat().st_mtime_ns for path in files]


def test_other_stages_are_refused_by_their_tensors(tmp_path: Path) -> None:
    write_run(tmp_path / "theirs")
    file = tmp_path / "theirs/checkpoints/best/model.safetensors"
    save_file(load_file(file) | {"pre_norm.scale": drawn(1, 1, WIDTH)}, file)
    result = run(pretrained.main, "import", tmp_path / "theirs", tmp_path / "ours")
    assert "tensor pre_norm.scale: unknown" in str(result.exception)
    (tmp_path / "theirs/model.json").write_text("{")
    result = run(pretrained.main, "import", tmp_path / "theirs", tmp_path / "ours")
    assert f"{tmp_path}/theirs/model.json: " in str(result.exception)
