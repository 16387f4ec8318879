"""Run folders of jax-gpt2-from-scratch: what their weights compute here, and back."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from rungs.checkpointing.load import load_model
from rungs.cli import plan, pretrained, train
from tests.support.committed_runs import ROOT

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 2, 3, 12, 17, 9
PAGE = (ROOT / "docs/from-jax-gpt2-from-scratch.md").read_text(encoding="utf-8")
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


def forward(w: dict[str, Any], tokens: Any, added: float = 1e-5, xp: Any = np) -> Any:
    """Return the logits of one sequence, by the formulas of the program, which adds 1e-5 to the
    standard deviation in its norms. `xp` is NumPy or its like."""

    def norm(x: Any, name: str) -> Any:
        scaled = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + added)
        return scaled * w[f"{name}.scale"][0, 0] + w[f"{name}.bias"][0, 0]

    def linear(x: Any, name: str) -> Any:
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
            scores = q[:, own] @ k[:, own].T / size**0.5
            scores = xp.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
            shares = xp.exp(scores - scores.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, own])
        x = x + linear(xp.concatenate(heads, -1), f"{name}.attention.output_projection")
        up = linear(norm(x, f"{name}.ffn_norm"), f"{name}.ffn.layers.0")
        up = up * 0.5 * (1 + xp.tanh((2 / np.pi) ** 0.5 * (up + 0.044715 * up**3)))
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
    exact = {name: array.astype(np.float64) for name, array in weights.items()}
    np.testing.assert_allclose(logits, forward(exact, tokens), atol=1e-3)
    np.testing.assert_allclose(logits, forward(exact, tokens, added=0), atol=1e-5)
    result = run(pretrained.main, "export", tmp_path / "ours", tmp_path / "back", "--jax-gpt2")
    assert result.exit_code == 0, result.output or result.exception
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: array.shape for name, array in back.items()} == {
        name: array.shape for name, array in weights.items()
    }
    assert all(back[name].tobytes() == array.tobytes() for name, array in weights.items())


STEPS, TRAINED = (
    10,
    {
        **{"dataset": "tiny", "min_train_tokens": -1, "microbatch_size": 2, "weight_decay": 0.5},
        **{"gradient_accumulation_steps": 2, "learning_rate": 0.01, "warmup_period_percent": 20},
        **{"clipping_max_norm": 0.5, "drop_rate": 0.0, "checkpoint_interval": 5},
    },
)


def trained_by_optax(weights: Weights, tokens: np.ndarray) -> Weights:
    """Return the weights after the steps of a run with the keys `TRAINED`, as the program takes
    them."""

    def loss(weights: Any, inputs_BS: Any, targets_BS: Any) -> Any:
        logits_BSV = jax.vmap(lambda inputs: forward(weights, inputs, xp=jnp))(inputs_BS)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS).mean()

    schedule = optax.warmup_cosine_decay_schedule(1e-7, 0.01, STEPS // 5, STEPS, 0.001)
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, weight_decay=0.5)
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.5), adamw), 2)
    state, gradient = optimizer.init(weights), jax.jit(jax.grad(loss))
    xs, ys = (part.reshape(-1, 2, CONTEXT) for part in (tokens[:-1], tokens[1:]))
    for inputs_BS, targets_BS in zip(xs, ys, strict=True):
        updates, state = optimizer.update(gradient(weights, inputs_BS, targets_BS), state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


@pytest.mark.long
def test_the_keys_of_the_page_train_as_the_program_does(tmp_path: Path) -> None:
    model, training = map(json.loads, re.findall("```json\n(.*?)```", PAGE, re.DOTALL))
    weights = write_run(tmp_path / "theirs")
    assert run(pretrained.main, "import", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    assert model.items() <= json.loads((tmp_path / "ours" / "model.json").read_text()).items()
    keys = TRAINED | training | {"start_from": "imported"}
    (tmp_path / "ours" / "train.json").write_text(json.dumps(keys))
    tokens = RNG.integers(0, VOCAB, STEPS * 4 * CONTEXT + 1)
    (tmp_path / "datasets" / "tiny").mkdir(parents=True)
    save_file({"tokens": tokens.astype(np.uint16)}, tmp_path / "datasets/tiny/train.safetensors")
    plan_of = run(plan.main, tmp_path / "ours", "--datasets-dir", tmp_path / "datasets")
    assert plan_of.exit_code == 0, plan_of.output or plan_of.exception
    ended = run(train.main, tmp_path / "ours", tmp_path / "datasets")
    assert ended.exit_code == 0, ended.output or ended.exception
    latest = tmp_path / "ours" / "checkpoints" / "latest"
    ended = run(pretrained.main, "export", latest, tmp_path / "back", "--jax-gpt2")
    assert ended.exit_code == 0, ended.output or ended.exception
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, expected in trained_by_optax(weights, tokens).items():
        assert np.abs(expected - weights[name]).max() > 0.02, name
        np.testing.assert_allclose(found[name], expected, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("option", [(), ("--fresh",), (".", "latest")])
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
