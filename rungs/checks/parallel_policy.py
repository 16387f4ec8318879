"""Check that a reinforcement learning run samples and learns the same on many devices as on one."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np

from rungs.checks.check import Check, failures, print_checks
from rungs.checks.parallel import ROUNDING_TOLERANCE, relative_difference
from rungs.config.run_config import ReinforceRunConfig
from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.parallel.sharding import create_mesh
from rungs.reinforcement.policy_learner import reinforcement
from rungs.reinforcement.rerun import open_learner
from rungs.reinforcement.rollout_files import Completion
from rungs.run.folder import RunFolder
from rungs.step.state import host_copies


class Outcome(NamedTuple):
    """Result of a run's first step on a mesh."""

    completions: list[Completion]
    gradient: dict[str, np.ndarray]


def run_policy_check(run: RunFolder, config: ReinforceRunConfig, devices: int) -> bool:
    """Take the first step of a run on meshes of at most `devices` virtual CPU devices, and print a
    table. Return whether texts, log-probabilities and gradients equal one device's, but for
    rounding."""
    print(
        f"{run.path}: the first step, in float32, on virtual CPU devices, compared with one device:"
        "\nequal texts, the largest difference of a sampled token's log-probability, in nats, and"
        " the relative difference of the gradient\n"
    )
    return not failures(print_checks(_checks(run, config, devices)))


def _checks(run: RunFolder, config: ReinforceRunConfig, devices: int) -> Iterator[Check]:
    expected = _first_step(run, config, "dp", 1)
    counts = [2**power for power in range(1, devices.bit_length()) if 2**power <= devices]
    meshes: list[tuple[Mode, int]] = [(mode, n) for mode in ("dp", "fsdp") for n in counts]
    for mode, count in meshes:
        if config.train.microbatch_size % count == 0:
            yield _compare(f"{mode} {count}", expected, _first_step(run, config, mode, count))


def _first_step(run: RunFolder, config: ReinforceRunConfig, mode: Mode, count: int) -> Outcome:
    """Take the first step with plain gradient descent, so that the update is the gradient."""
    changes: dict[str, Any] = {
        "sharding": ShardingConfig.of(mode, (count, 1)),
        "compute_dtype": "float32",
        "optimizer": "sgd",
        "learning_rate": 1.0,
        "weight_decay": 0.0,
        "clipping_max_norm": None,
        "warmup_period_percent": 0.0,
        "updates_per_rollout": 1,
    }
    config = config._replace(train=config.train.model_copy(update=changes))
    mesh = create_mesh((count, 1), devices=jax.devices()[:count])
    vocab_size = config.model.vocab_size
    with ExitStack() as stack:
        kind = reinforcement(trust_verifier=True)
        learner, _ = open_learner(stack, run, config, None, kind, mesh)
        before = host_copies(learner.model, vocab_size)
        completions = learner.retake(0).completions
        after = host_copies(learner.model, vocab_size)
    return Outcome(completions, {name: before[name] - after[name] for name in before})


def _compare(name: str, expected: Outcome, found: Outcome) -> Check:
    pairs = list(zip(expected.completions, found.completions, strict=True))
    equal = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    log_prob = max(
        (float(np.abs(np.subtract(one.log_probs, other.log_probs)).max()) for one, other in equal),
        default=np.inf,
    )
    gradient, _ = relative_difference(found.gradient, expected.gradient)
    passed = len(equal) == len(pairs) and max(log_prob, gradient) <= ROUNDING_TOLERANCE
    values = f"{len(equal):,} of {len(pairs):,} texts, {log_prob:.1e}, {gradient:.1e}"
    return Check(name, values, f"all, {ROUNDING_TOLERANCE:.0e}", passed)
