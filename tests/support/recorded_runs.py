"""Run folders with hand-written metrics."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODEL = {"vocab_size": 32, "context_length": 8, "emb_dim": 16, "n_layers": 1, "n_heads": 2}
TRAIN = {
    "dataset": "none",
    "microbatch_size": 4,
    "learning_rate": 0.01,
    "checkpoint_interval": 10,
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Return the metrics of a step with some changed; the train loss is 2 + 1 / (step + 1)."""
    plain = {
        "global_step": number,
        "tokens_seen": 32 * (number + 1),
        "train_loss": 2 + 1 / (number + 1),
        "learning_rate": 0.01,
        "gradient_norm": 0.5,
        "clipped": False,
        "dropped_microbatches": 0,
        "step_seconds": 0.5,
        "tokens_per_second": 64.0,
    }
    return plain | changes


def record_run(folder: Path, steps: Iterable[dict[str, Any]], **train: Any) -> Path:
    """Write a run folder with these steps, and with keys of `train.json` changed."""
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "train.json").write_text(json.dumps(TRAIN | train))
    lines = "".join(json.dumps(one) + "\n" for one in steps)
    if lines:
        (folder / "metrics.jsonl").write_text(lines)
    return folder
