"""Reinforcement learning: seconds per step, and the share spent sampling.

Trains `runs/parity-pretrain`, then takes steps of `runs/parity-rl` from its weights.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu_parts import committed_run
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from rungs.config.run_config import load_reinforcement_run
from rungs.reinforcement.policy_learner import Sampled, reinforcement
from rungs.reinforcement.rerun import open_learner
from rungs.run.folder import RunFolder

WARM_UP, STEPS = 3, 20
SHORT_PRETRAINING = {"min_train_tokens": 25_600, "validation_tokens": 1280}
SHORT_REINFORCEMENT = {"prompts_per_step": 4, "samples_per_prompt": 4, "microbatch_size": 8}


def figures(setting: Setting) -> Iterator[Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        begin = time.perf_counter()
        shorter = SHORT_PRETRAINING if setting.rehearse else {}
        start = committed_run.copy("parity-pretrain", folder, shorter)
        committed_run.train(start)
        yield Figure("runs/parity-pretrain, all of it", [time.perf_counter() - begin], "s")
        changes = SHORT_REINFORCEMENT if setting.rehearse else {}
        run = committed_run.copy("parity-rl", folder, {"start_from": str(start)} | changes)
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
