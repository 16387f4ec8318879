"""Parallel check of reinforcement learning: on one device and on others, sample the texts of the
first step, and update the model from the same ones."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rungs.checks import parallel
from rungs.checks.check import Check, failures, print_checks
from rungs.config.run_config import ReinforceRunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.planning.policy_plan import training_equivalent
from rungs.reinforcement.policy_learner import reinforcement
from rungs.reinforcement.rerun import open_learner
from rungs.reinforcement.rollout_files import Completion, RolloutFiles
from rungs.run.folder import RunFolder
from rungs.step.state import host_copies
from rungs.training.learner import NEVER

_LOG_PROB_TOLERANCE = 1e-4
"""In nats; the log-probabilities of training and sampling differ by as much."""
_CHANGES: dict[str, Any] = {
    "compute_dtype": "float32",
    "staleness": 0,
    "updates_per_rollout": 1,
    "optimizer": "sgd",
    "learning_rate": 1000.0,
    "warmup_period_percent": 0.0,
    "weight_decay": 0.0,
    "clipping_max_norm": None,
}
"""The change of the weights is then the gradient, large enough not to be rounded away."""


def run_check(run: RunFolder, config: ReinforceRunConfig, devices: int, sequences: int) -> bool:
    """Print a row for each mesh of at most `devices` that can sample. Return whether all
    differences from one device are within their tolerances."""
    samples = config.train.samples_per_prompt
    prompts = min(config.train.prompts_per_step, max(sequences // samples, 1))
    changes = _CHANGES | {"prompts_per_step": prompts, "microbatch_size": prompts * samples}
    short = config._replace(train=config.train.model_copy(update=changes))
    print(
        f"{run.path}: {prompts * samples:,} completions of the first step. A row: texts that\n"
        "differ from one device's, by how much log-probabilities do, and the gradient of the same\n"
    )
    meshes, _ = parallel.ParallelCheck(training_equivalent(short), [], 0, None).meshes(devices)
    can_sample = (mesh for mesh in meshes if mesh[0] in ("dp", "fsdp"))
    one, *others = (ShardingConfig.of(mode, (data, last)) for mode, data, last in can_sample)
    with tempfile.TemporaryDirectory() as folder:
        step = _FirstStep(run, short, RolloutFiles(Path(folder)))
        return not failures(print_checks(step.checks(one, others)))


class _FirstStep(NamedTuple):
    """The first step of a run; its texts are kept in `files`."""

    run: RunFolder
    config: ReinforceRunConfig
    files: RolloutFiles

    def checks(self, one: ShardingConfig, others: Sequence[ShardingConfig]) -> Iterator[Check]:
        texts, change = self.taken(one)
        self.files.write(self.files.step(0), texts)
        for sharding in others:
            own, own_change = self.taken(sharding, texts)
            pairs = zip(own, texts, strict=True)
            gaps = [np.subtract(a.log_probs, b.log_probs) for a, b in pairs if a.tokens == b.tokens]
            gap = float(np.abs(np.concatenate([*gaps, [0.0]])).max())
            gradient, _ = parallel.relative_difference(own_change, change)
            found = len(texts) - len(gaps), gap, gradient
            limits = 0, _LOG_PROB_TOLERANCE, parallel.ROUNDING_TOLERANCE
            values, allowed = ("{} {:.1e} {:.1e}".format(*three) for three in (found, limits))
            passed = all(a <= b for a, b in zip(found, limits, strict=True))
            yield Check(f"{sharding.mode:7} {sharding.data}", values, allowed, passed)

    def taken(
        self, sharding: ShardingConfig, texts: list[Completion] | None = None
    ) -> tuple[list[Completion], dict[str, np.ndarray]]:
        """Return the completions on a mesh, with the replies to `texts`, and how an update from
        `texts` changes the weights; without them, of its own ones."""
        vocabulary, kind = self.config.model.vocab_size, reinforcement(trust_verifier=True)
        train = self.config.train.model_copy(update={"sharding": sharding})
        own, mesh = self.config._replace(train=train), parallel.mesh_of(sharding)
        with ExitStack() as stack:
            learner, _ = open_learner(stack, self.run, own, None, kind, mesh)
            found, _ = learner.sample(0, self.files.step(0), NEVER, texts is not None)
            before = host_copies(learner.model, vocabulary)
            learner.update(0, texts or found)
            after = host_copies(learner.model, vocabulary)
        return found, {name: after[name] - array for name, array in before.items()}
