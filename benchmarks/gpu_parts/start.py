"""How long it takes until GPT-2's first step is done: with nothing compiled before, and again."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import BASE, VARIANTS, config_of
from benchmarks.starting.start_speed import first_step, measure
from rungs.data.token_file import TokenWriter
from rungs.parallel.jax_setup import CACHE_VARIABLE

WARM_STARTS = 2


def figures(setting: Setting) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = first_step(_write_run(folder, setting), folder / "datasets")
        environment = {**os.environ, CACHE_VARIABLE: str(folder / "compiled")}
        yield Figure(
            "cold start", [measure(case, environment).wall], "s", "nothing compiled before"
        )
        warm = 1 if setting.rehearse else WARM_STARTS
        yield Figure("warm start", [measure(case, environment).wall for _ in range(warm)], "s")


def _write_run(folder: Path, setting: Setting) -> Path:
    """Write a run and a dataset of random tokens, enough for a few steps."""
    config = config_of(VARIANTS[BASE], setting)
    dataset, run = folder / "datasets/random", folder / "run"
    for place in (dataset, run):
        place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, steps in {"train": 4, "validation": 2}.items():
        count = steps * config.tokens_per_step + 1
        with TokenWriter(dataset / f"{split}.safetensors", "U16") as writer:
            writer.append(rng.integers(config.model.vocab_size, size=count))
    train = config.train.as_json() | {
        "dataset": "random",
        "min_train_tokens": 2 * config.tokens_per_step,
        "validation_tokens": config.tokens_per_step,
    }
    (run / "model.json").write_text(json.dumps(config.model.as_json()))
    (run / "train.json").write_text(json.dumps(train))
    return run
