"""Runs of reinforcement learning small enough to take many times. A text is right if its last
number is the parity of the prompt's, which random weights sometimes hit upon."""

import json
from pathlib import Path
from typing import Any

from rungs.config.run_config import load_reinforcement_run
from rungs.data.build.task_dataset import character_tokenizer
from rungs.data.text.tokenizer import TOKENIZER_FILE
from rungs.reinforcement.policy_learner import reinforcement
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import PolicyMetrics, stream
from rungs.tasks.catalog import BUILT_IN
from rungs.training.start import launch
from tests.support import tiny_run

MODEL: dict[str, Any] = {
    "vocab_size": len(BUILT_IN["parity"].alphabet) + 1,
    "context_length": 16,
    "emb_dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "positions": "rope",
    "norm": "rms_norm",
}
REINFORCE = {
    "tasks": [{"source": "items.jsonl", "verifier": "last_number", "validation_items": 4}],
    "steps": 6,
    "max_new_tokens": 6,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "microbatch_size": 2,
    "validation_samples": 2,
    "learning_rate": 0.003,
    "checkpoint_interval": 3,
    "compute_dtype": "float32",
}


def write_start(folder: Path, seed: int = 0, factor: float = 1.0, **model: Any) -> Path:
    """Write random weights, times a factor, with some keys of the model changed, and a tokenizer of
    the characters of parity; return the folder."""
    tiny_run.write_start(folder, "parity-pairs", seed=seed, factor=factor, **(MODEL | model))
    character_tokenizer(BUILT_IN["parity"].alphabet).save(folder / TOKENIZER_FILE)
    return folder


def make_reinforcement_run(folder: Path, start: Path, **keys: Any) -> RunFolder:
    """Write a run folder with the tiny config and some keys of `reinforce.json` changed."""
    folder.mkdir(parents=True)
    reinforce = REINFORCE | {"start_from": str(start)} | keys
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "reinforce.json").write_text(json.dumps(reinforce))
    write_items(folder / "items.jsonl")
    return RunFolder(folder)


def write_items(path: Path, count: int = 20) -> None:
    """Write items whose prompts are numbers in binary, and whose answers are their last digits."""
    items = [{"prompt": f"{number:05b}:", "answer": str(number % 2)} for number in range(count)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def reinforce(run: RunFolder, *, trust_verifier: bool = False, **options: Any) -> int:
    """Start a run in this process, and return its exit code."""
    config = load_reinforcement_run(run.path)
    return launch(run, config, StartOptions(**options), reinforcement(trust_verifier))


def steps_of(run: RunFolder) -> list[PolicyMetrics]:
    return list(stream(run.metrics, PolicyMetrics))
