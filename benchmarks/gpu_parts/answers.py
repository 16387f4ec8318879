"""Reinforcement learning by minute: `runs/sort-rl` and `runs/countdown-rl`, all of them."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts import committed_run
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from rungs.run import metrics
from rungs.run.metrics import PolicyMetrics

TASKS = "sort", "countdown"
SHORT_PRETRAINING = {"min_train_tokens": 12_800, "validation_tokens": 1280}
SHORT_REINFORCEMENT = {
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "microbatch_size": 8,
    "checkpoint_interval": 1,
}


def figures(setting: Setting) -> Iterator[Figure]:
    for task in TASKS[:1] if setting.rehearse else TASKS:
        with tempfile.TemporaryDirectory() as folder:
            shorter = SHORT_PRETRAINING if setting.rehearse else {}
            start = committed_run.copy(f"{task}-pretrain", Path(folder), shorter)
            committed_run.train(start)
            changes = {"start_from": str(start)} | (SHORT_REINFORCEMENT if setting.rehearse else {})
            run = committed_run.copy(f"{task}-rl", Path(folder), changes)
            begin = time.perf_counter()
            committed_run.train(run)
            yield Figure(f"runs/{task}-rl, all of it", [time.perf_counter() - begin], "s")
            yield _at_the_end(task, run)


def _at_the_end(task: str, run: Path) -> Figure:
    """Return the share of right answers at the end; its note has each validation's."""
    found = list(right_by_minute(run))
    note = ", ".join(f"{minutes:.1f} min {100 * right:.0f}%" for minutes, right in found)
    return Figure(f"{task}: right answers", [100 * found[-1][1]], "%", note)


def right_by_minute(run: Path) -> Iterator[tuple[float, float]]:
    """Yield minutes of steps and the share of right answers at each validation of a run."""
    seconds = 0.0
    for step in metrics.stream(run / "metrics.jsonl", PolicyMetrics):
        if step.start_validation:
            yield 0.0, step.start_validation.pass_at_1
        seconds += step.step_seconds
        if step.validation:
            yield seconds / 60, step.validation.pass_at_1
