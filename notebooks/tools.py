"""What several notebooks do: make datasets and runs, compare with transformers, train briefly."""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax import Array
from safetensors.numpy import load_file

import rungs

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "models"
"""Models with random weights, of a few kilobytes, with what transformers computes from them."""


def work_folder(name: str) -> Path:
    """Return a new folder for what a notebook writes."""
    return Path(tempfile.mkdtemp(prefix=f"rungs-{name}-"))


def run_command(*command: object) -> None:
    """Run a command of the checkout, as `uv run` would, and print what it says.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    print(done.stdout[-4000:])
    done.check_returncode()


def docs_dataset(datasets: Path, vocab_size: int = 512, tokenizer: Path | None = None) -> None:
    """Make a dataset of the project's own documentation, `docs`, with a new tokenizer or a given
    one."""
    texts = sorted(ROOT.glob("docs/*.md"))
    size = ("--tokenizer", tokenizer) if tokenizer else ("--vocab-size", vocab_size)
    options = ("--name", "docs", *size, "--datasets-dir", datasets)
    run_command("download_dataset.py", "--text", *texts, *options)


def make_run(run: Path, train: dict[str, Any], model: dict[str, Any] | None = None) -> Path:
    """Write the two files of a run; an imported model has its model.json already."""
    run.mkdir(exist_ok=True)
    if model is not None:
        (run / "model.json").write_text(json.dumps(model, indent=2))
    (run / "train.json").write_text(json.dumps(train, indent=2))
    return run


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl says of each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> np.ndarray:
    """Return the training loss of each step."""
    return np.asarray([step["train_loss"] for step in metrics_of(run)])


def activations_of_transformers(source: Path) -> dict[str, np.ndarray]:
    """Return tokens (B, S), and the hidden states and logits that transformers computes from them:
    now if it is installed, else as recorded."""
    recorded = load_file(source / "expected.safetensors")
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("transformers is not installed: comparing with recorded values")
        return recorded
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        tokens = torch.from_numpy(recorded["tokens"].astype(np.int64))
        output = model(tokens, output_hidden_states=True)
    hidden_states = np.stack([state.numpy() for state in output.hidden_states])
    return recorded | {"hidden_states": hidden_states, "logits": output.logits.numpy()}


def show_differences(model: rungs.GPT, expected: dict[str, np.ndarray]) -> None:
    """Print the largest difference of each hidden state and of the logits, and assert that they are
    no more than rounding."""
    forward = nnx.jit(lambda model, tokens_BS: model.forward(tokens_BS, keep_hidden_states=True))
    found = forward(model, jnp.asarray(expected["tokens"]))
    names = ["embedding", *(f"block {number}" for number in range(len(found.hidden_states) - 1))]
    pairs = zip(names, found.hidden_states, expected["hidden_states"], strict=True)
    for name, ours, theirs in [*pairs, ("logits", found.logits_BSV, expected["logits"])]:
        difference = float(np.abs(np.asarray(ours) - theirs).max())
        print(f"{name:10} largest difference {difference:.1e} of {np.abs(theirs).max():.2f}")
        assert difference < 5e-5 * np.abs(theirs).max()


def show_generation(model: rungs.GPT, expected: dict[str, np.ndarray]) -> None:
    """Print greedy and sampled tokens; require that greedy ones are those of transformers, and the
    same without the key/value cache."""
    generator, prompt = rungs.Generator(model), expected["prompt"].tolist()
    [greedy] = generator.generate([prompt], rungs.Request(64))
    print("greedy:", greedy[:16], "…")
    assert greedy == expected["greedy"].tolist()
    assert greedy[:10] == _without_cache(model, prompt, 10)
    sampling = rungs.Sampling(temperature=0.8, top_k=20)
    for seed in range(3):
        [sampled] = generator.generate([prompt], rungs.Request(12, sampling, seed))
        print(f"seed {seed}:", sampled)


def _without_cache(model: rungs.GPT, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens from a full forward pass for each. What comes after a token does not
    change its logits, so all passes have the same length and are compiled once."""
    forward = nnx.jit(lambda model, tokens_BS: model(tokens_BS))
    tokens = np.zeros((1, len(prompt) + count), np.int32)
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + count):
        tokens[0, place] = forward(model, jnp.asarray(tokens))[0, place - 1].argmax()
    return tokens[0, len(prompt) :].tolist()


@functools.cache
def text_tokens(vocab_size: int) -> np.ndarray:
    """Return the project's own documentation as token ids of a small byte-level BPE."""
    folder = work_folder("text")
    docs_dataset(folder, vocab_size)
    return load_file(folder / "docs" / "train.safetensors")["tokens"].astype(np.int32)


def random_batches(tokens: np.ndarray, length: int, steps: int, seed: int = 0) -> Iterator[Array]:
    """Yield 16 sequences from random places of a text for each step, with one token more than
    their length: the targets are one place ahead of the inputs."""
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        starts = generator.integers(0, len(tokens) - length - 1, 16)
        yield jnp.asarray(np.stack([tokens[start : start + length + 1] for start in starts]))


def train_briefly(
    config: rungs.ModelConfig, steps: int = 200, rate: float = 3e-3, seed: int = 0
) -> list[float]:
    """Train a model on `text_tokens` with AdamW, as 02_gpt2 shows; return the loss of each step in
    nats."""
    model = rungs.GPT(config, jax.random.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)

    @nnx.jit
    def step(model: rungs.GPT, optimizer: nnx.Optimizer, batch: Array) -> Array:
        def loss(model: rungs.GPT) -> Array:
            total, _ = model.summed_loss(batch[:, :-1], batch[:, 1:])
            return total / batch[:, 1:].size

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    tokens = text_tokens(config.vocab_size)
    batches = random_batches(tokens, config.context_length, steps, seed)
    losses = [step(model, optimizer, batch) for batch in batches]
    return [float(loss) for loss in losses]


def compare_briefly(variants: dict[str, rungs.ModelConfig], steps: int = 200) -> dict[str, float]:
    """Train variants of a model on the same batches, draw their losses, and return the mean loss of
    the last tenth of the steps."""
    means = {}
    for name, config in variants.items():
        losses = train_briefly(config, steps)
        means[name] = float(np.mean(losses[-steps // 10 :]))
        smooth = np.convolve(losses, np.ones(10) / 10, mode="valid")
        plt.plot(np.arange(len(smooth)) + 9, smooth, label=f"{name}: {means[name]:.2f}")
    plt.xlabel("step")
    plt.ylabel("loss in nats, mean of 10 steps")
    plt.legend()
    plt.show()
    return means
