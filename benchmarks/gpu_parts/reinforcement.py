"""Reinforcement learning: seconds per step, and the share spent sampling.

Trains `runs/parity-pretrain`, then takes steps of `runs/parity-rl` from its weights.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import ROOT, Setting
from rungs.config.run_config import REINFORCE_FILE, TRAIN_FILE, load_reinforcement_run
from rungs.reinforcement.learner import Sampled, reinforcement
from rungs.reinforcement.replay import open_learner
from rungs.run.folder import RunFolder

WARM_UP, STEPS = 3, 20
SHORT_PRETRAINING = {"min_train_tokens": 25_600, "validation_tokens": 1280}
SHORT_REINFORCEMENT = {"prompts_per_step": 4, "samples_per_prompt": 4, "microbatch_size": 8}


def figures(setting: Setting) -> Iterator[Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        begin = time.perf_counter()
        start = _pretrain(folder, SHORT_PRETRAINING if setting.rehearse else {})
        yield Figure("runs/parity-pretrain, all of it", [time.perf_counter() - begin], "s")
        changes = SHORT_REINFORCEMENT if setting.rehearse else {}
        run = _copy("parity-rl", REINFORCE_FILE, folder, {"start_from": str(start)} | changes)
        config = load_reinforcement_run(run)
        kind = reinforcement(trust_verifier=False)
        learner, _ = open_learner(stack, RunFolder(run), config, None, kind)
        warm_up, steps = (1, 1) if setting.rehearse else (WARM_UP, STEPS)
        taken, seconds = [], []
        for step in range(warm_up + steps):
            begin = time.perf_counter()
            taken.append(learner.retake(step))
            seconds.append(time.perf_counter() - begin)
    yield from _report(seconds[warm_up:], taken[warm_up:])


def _pretrain(folder: Path, changes: dict[str, Any]) -> Path:
    run = _copy("parity-pretrain", TRAIN_FILE, folder, changes)
    command = [sys.executable, str(ROOT / "train.py"), str(run), "--quiet"]
    subprocess.run([*command, "--datasets-dir", str(folder / "datasets")], check=True)
    return run


def _copy(name: str, train_file: str, folder: Path, changes: dict[str, Any]) -> Path:
    """Copy a committed run with some keys changed; return its folder."""
    run = folder / name
    run.mkdir()
    committed = ROOT / "runs" / name
    (run / "model.json").write_text((committed / "model.json").read_text())
    train = json.loads((committed / train_file).read_text()) | changes
    (run / train_file).write_text(json.dumps(train))
    return run


def _report(seconds: list[float], taken: list[Sampled]) -> Iterator[Figure]:
    sampling = [each.seconds.sampling for each in taken]
    tokens = [sum(len(one.tokens) for one in each.completions) for each in taken]
    yield Figure("a step", [1e3 * each for each in seconds], "ms")
    phases = {
        "sampling": sampling,
        "verifying": [each.seconds.verifying for each in taken],
        "updating": [each.updated.seconds for each in taken],
    }
    for phase, times in phases.items():
        yield Figure(phase, [1e3 * each for each in times], "ms")
    shares = [one / whole for one, whole in zip(sampling, seconds, strict=True)]
    yield Figure("share of the step spent sampling", [100 * share for share in shares], "%")
    rates = [count / each for count, each in zip(tokens, sampling, strict=True)]
    yield Figure("sampling", rates, "tokens/s")
