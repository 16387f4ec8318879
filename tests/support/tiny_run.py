"""A run folder and a dataset small enough to train many times, also in other processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Origin, WeightsHeader, write_weights
from rungs.checks.resume import read_arrays
from rungs.config.model_config import ModelConfig
from rungs.data.tokens.token_file import (
    PairWriter,
    PreferenceWriter,
    Texts,
    TokenWriter,
    UnpairedWriter,
)
from rungs.model.gpt import GPT
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.step.state import named_arrays
from tests.support.committed_runs import ROOT
from tests.support.configs import ONE_FILE

VOCAB, RARE, PAIRS = 64, 63, 48
"""Of all datasets; a token that is rare in preferences; their number."""
MODEL = {"vocab_size": VOCAB, "context_length": 16, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
TRAIN = {
    "dataset": "tiny",
    "microbatch_size": 4,
    "gradient_accumulation_steps": 2,
    "min_train_tokens": 24 * 128,
    "validation_tokens": 256,
    "learning_rate": 0.01,
    "clipping_max_norm": 0.5,
    "drop_rate": 0.1,
    "compute_dtype": "float32",
    "checkpoint_interval": 5,
}


def make_dataset(datasets_dir: Path, name: str = "tiny", seed: int = 0) -> None:
    """Write a dataset of tokens that follow a noisy pattern, so there is something to learn."""
    folder = datasets_dir / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for split, count in (("train", 20_000), ("validation", 1_000)):
        walk = np.cumsum(rng.integers(1, 3, count)) % VOCAB
        save_file({"tokens": walk.astype(np.uint16)}, folder / f"{split}.safetensors")


def make_documents(datasets_dir: Path) -> None:
    """Write a dataset of 46 documents, 797 tokens with the one that begins each."""
    (datasets_dir / "documents").mkdir()
    rng = np.random.default_rng(4)
    path = datasets_dir / "documents" / "train.safetensors"
    with TokenWriter(path, "U16", Texts(begin=[0])) as writer:
        for length in [*range(10, 25), *range(1, 32)]:
            writer.append([0, *rng.integers(1, VOCAB, length)])


def make_pairs(datasets_dir: Path, name: str = "pairs", count: int = 40) -> None:
    """Write a dataset of prompts with answers, of up to 15 tokens with their end of text."""
    folder = datasets_dir / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split in ("train", "validation"):
        with PairWriter(folder / f"{split}.safetensors", "U16") as writer:
            for prompt, answer in rng.integers(1, 8, (count, 2)):
                writer.append_pair([int(prompt)] * prompt, [*[int(answer)] * answer, 0])


def make_preferences(datasets_dir: Path, rare_pair: int | None = None) -> None:
    """Write preferences for answers of a repeated token; one prompt may have the rare token."""
    folder = datasets_dir / "prefs"
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    for split in ("train", "validation"):
        with PreferenceWriter(folder / f"{split}.safetensors", "U16") as writer:
            for number in range(PAIRS):
                prompt = random.integers(1, RARE, random.integers(1, 6)).tolist()
                if number == rare_pair and split == "train":
                    prompt = [RARE]
                chosen = [prompt[-1]] * int(random.integers(1, 6))
                rejected = random.integers(1, RARE, random.integers(1, 6)).tolist()
                for answer in (chosen, rejected):
                    writer.append_chat([(prompt, [*answer, 0])])


def make_unpaired(datasets_dir: Path) -> None:
    """Write answers to prompts: of a repeated token, which is desirable, or of random tokens."""
    folder = datasets_dir / "unpaired"
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    for split in ("train", "validation"):
        with UnpairedWriter(folder / f"{split}.safetensors", "U16") as writer:
            for number in range(PAIRS):
                prompt = random.integers(1, RARE, random.integers(1, 8)).tolist()
                size = random.integers(1, 11 - len(prompt))
                answer = random.integers(1, RARE, size).tolist()
                is_desirable = number % 3 == 0
                answer = [prompt[-1]] * int(size) if is_desirable else answer
                writer.append_chat([(prompt, [*answer, 0])])
                writer.rate(is_desirable)


def write_start(
    folder: Path,
    tokenizer: str = "gpt2",
    origin: Origin | None = None,
    dtype: str = "float32",
    seed: int = 0,
    factor: float = 1.0,
    **model: Any,
) -> Path:
    """Write random weights of the tiny model, times a factor that makes predictions less even, with
    some keys of the model changed; return the folder."""
    config = ModelConfig.model_validate(MODEL | model)
    arrays = named_arrays(GPT(config, jax.random.key(seed)))
    weights = {name: np.asarray((factor * array).astype(dtype)) for name, array in arrays.items()}
    folder.mkdir(parents=True)
    write_weights(folder, weights, WeightsHeader(config, None, tokenizer, origin), ONE_FILE)
    return folder


def make_run(folder: Path, **train: Any) -> RunFolder:
    """Write a run folder with the tiny config and some keys of `train.json` changed."""
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "train.json").write_text(json.dumps(TRAIN | train))
    return RunFolder(folder)


def change(run: RunFolder, **keys: Any) -> None:
    """Change keys of `train.json`."""
    path = run.path / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_model(run: RunFolder, **keys: Any) -> RunFolder:
    """Change keys of `model.json`."""
    path = run.path / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return run


def command(
    run: RunFolder, datasets_dir: Path, *options: str, script: str = "train.py"
) -> list[str]:
    options = ("--datasets-dir", str(datasets_dir), *options)
    return [sys.executable, str(ROOT / script), str(run.path), *options]


def train(
    run: RunFolder, datasets_dir: Path, *options: str, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, to its end."""
    return subprocess.run(
        command(run, datasets_dir, *options), capture_output=True, text=True, check=False, **popen
    )


def losses(run: RunFolder) -> list[tuple[Any, ...]]:
    """Return the metrics that must be bit-equal in two runs."""
    return [tuple(step.reproducible.values()) for step in metrics.read(run.metrics)]


def final_arrays(run: RunFolder) -> dict[str, np.ndarray]:
    """Return weights and optimizer state of the last checkpoint, as they are on disk."""
    last = last_checkpoint(run)
    assert last.damage() == []
    parameters, optimizer = read_arrays(last)
    return {f"model.{name}": array for name, array in parameters.items()} | {
        f"optimizer.{name}": array for name, array in optimizer.items()
    }


def last_checkpoint(run: RunFolder) -> Checkpoint:
    return list_checkpoints(run.checkpoints)[-1]


def assert_same_outcome(found: RunFolder, expected: RunFolder) -> None:
    """Assert that final weights, optimizer state and metrics are bit-equal."""
    assert losses(found) == losses(expected)
    one, other = final_arrays(found), final_arrays(expected)
    assert one.keys() == other.keys()
    for name, array in other.items():
        assert one[name].dtype == array.dtype
        assert one[name].tobytes() == array.tobytes(), name
