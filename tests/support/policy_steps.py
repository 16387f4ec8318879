"""Metrics of steps of reinforcement learning that were never taken."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rungs.run.metrics import PolicyMetrics, Validation
from tests.support.tiny_reinforcement import MODEL, REINFORCE


def policy_run(folder: Path, steps: list[PolicyMetrics], /, **reinforce: Any) -> Path:
    """Write a run folder with these steps, and with keys of `reinforce.json` changed."""
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    keys = REINFORCE | {"start_from": "x"} | reinforce
    (folder / "reinforce.json").write_text(json.dumps(keys))
    (folder / "metrics.jsonl").write_text("".join(one.as_line() for one in steps))
    return folder


def validation(rate: float) -> Validation:
    """Return a validation with a pass@1 of `rate`."""
    return Validation(
        items=4,
        samples=2,
        pass_at={1: rate, 2: min(1.0, rate + 0.2)},
        pass_at_1_interval=(rate - 0.1, rate + 0.1),
        reward=rate,
        mean_tokens=3.0,
        truncated=0.0,
    )


def step(number: int, **changes: Any) -> PolicyMetrics:
    """Return the metrics of a step, with some of them changed."""
    keys: dict[str, Any] = {
        "reward": number / 40,
        "rewards": {"correct": number / 40},
        "correct": number / 40,
        "failed_verdicts": 0,
        "mean_tokens": 4.0,
        "truncated": 0.25,
        "groups_wrong": 1,
        "groups_mixed": 1,
        "groups_right": 2,
        "equal_groups": 3,
        "entropy": 0.5,
        "log_prob_gap": 1e-7,
        "largest_log_prob_gap": 1e-6,
        "exact_ratios": 0.5,
        "sampler_kl": 0.0,
        "sampling_seconds": 0.1,
        "verifying_seconds": 0.01,
        "updating_seconds": 0.2,
    }
    base = (number, 100 * number, 0.0, 1e-3, 0.5, False, 0, 0.5, 200.0)
    return dataclasses.replace(PolicyMetrics(*base, **keys), **changes)
