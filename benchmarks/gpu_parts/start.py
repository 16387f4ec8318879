"""How long it takes until GPT-2's first step is done: with nothing compiled before, and again."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts import random_dataset
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import config_of
from benchmarks.starting.start_speed import first_step, measure
from rungs.parallel.jax_setup import CACHE_VARIABLE

WARM_STARTS = 2


def figures(setting: Setting) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = first_step(_write_run(folder, setting), folder / "datasets")
        environment = {**os.environ, CACHE_VARIABLE: str(folder / "compiled")}
        environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # as users start
        yield Figure(
            "cold start", [measure(case, environment).wall], "s", "nothing compiled before"
        )
        warm = 1 if setting.rehearse else WARM_STARTS
        yield Figure("warm start", [measure(case, environment).wall for _ in range(warm)], "s")


def _write_run(folder: Path, setting: Setting) -> Path:
    """Write a run and a dataset of random tokens, enough for a few steps."""
    config = config_of({}, setting)
    step, run = config.tokens_per_step, folder / "run"
    random_dataset.write(folder / "datasets", config.model.vocab_size, 4 * step, 2 * step)
    run.mkdir()
    train = config.train.as_json() | {
        "dataset": random_dataset.NAME,
        "min_train_tokens": 2 * step,
        "validation_tokens": step,
    }
    (run / "model.json").write_text(json.dumps(config.model.as_json()))
    (run / "train.json").write_text(json.dumps(train))
    return run
