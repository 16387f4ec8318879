"""What a run of reinforcement learning takes: memory of sampling and updating, time of each phase,
and the share of prompts that tell right from wrong."""

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rungs.config.run_config import ReinforceRunConfig, RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.optim.precision import dtype_of
from rungs.planning.forecast import Forecast, forecast
from rungs.planning.hardware import Hardware
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import PolicyMetrics
from rungs.step.state import shapes_of

_TEXT_BYTES, _NEW_TOKEN_BYTES, _PROMPT_TOKEN_BYTES = 260, 36, 4
"""Of a text in `rollouts/`: names and rewards, and each token with its log-probability; prompts are
text only."""
_RECENT_STEPS = 50
"""Recorded steps that times and shares are taken from."""


class Phases(NamedTuple):
    """Seconds of each phase of a step."""

    sampling: float
    verifying: float | None
    """None if it is not known: it depends on the verifier."""
    updating: float
    reason: str
    """Where the figures come from."""

    @property
    def total(self) -> float:
        return self.sampling + (self.verifying or 0) + self.updating


class PolicyPlan(NamedTuple):
    """What a run of reinforcement learning takes; bytes are those of a device."""

    config: ReinforceRunConfig
    update: Forecast
    """Of a training run with the same updates."""
    sampler_bytes: int
    """The copy of the weights that samples; each device has all of it."""
    cache_bytes: int
    reference_bytes: int
    phases: Phases | None
    """None if the device's FLOP/s are not known."""
    steps_done: int
    mixed_share: float | None
    """Share of the latest prompts with right and wrong completions; None before the first step."""

    @property
    def state_bytes(self) -> int:
        """Weights, moments, sampler and reference."""
        memory = self.update.memory
        return memory.weights + memory.moments + self.sampler_bytes + self.reference_bytes

    @property
    def sampling_bytes(self) -> int:
        """Peak of sampling."""
        return self.state_bytes + self.cache_bytes

    @property
    def updating_bytes(self) -> int:
        """Peak of an update."""
        return self.update.memory.total + self.sampler_bytes + self.reference_bytes

    @property
    def validations(self) -> int:
        """About how often the run validates."""
        train = self.config.train
        return -(-train.steps // train.checkpoint_interval) + 1

    @property
    def rollout_bytes(self) -> int:
        """All rollouts of the run on disk, if every text is as long as it may be."""
        train = self.config.train
        held_out = sum(task.validation_items for task in train.tasks)
        validated = self.validations * held_out * train.validation_samples
        prompt = self.config.sequence_length - train.max_new_tokens
        text = train.max_new_tokens * _NEW_TOKEN_BYTES + prompt * _PROMPT_TOKEN_BYTES + _TEXT_BYTES
        return text * (train.steps * train.sequences_per_step + validated)

    @property
    def fits(self) -> bool:
        """Whether memory and disk are enough."""
        peak = max(self.sampling_bytes, self.updating_bytes)
        return peak <= self.update.usable_bytes and self.update.disk.fits


def training_equivalent(config: ReinforceRunConfig) -> RunConfig:
    """Return a training run with the same updates: its step has the same arrays."""
    model, train = config
    shared = {
        key: value
        for key, value in dict(train).items()
        if key in TrainConfig.model_fields and key != "lineage"
    }
    keys: dict[str, Any] = {
        "dataset": "none",
        "gradient_accumulation_steps": train.microbatches_per_step,
        "min_train_tokens": train.total_updates * config.tokens_per_step,
    }
    return RunConfig(model, TrainConfig.model_construct(**shared | keys))


def plan(
    run: RunFolder,
    config: ReinforceRunConfig,
    hardware: Hardware,
    sharding: ShardingConfig,
    datasets_dir: Path,
    utilization: float,
    use_recorded: bool,
) -> PolicyPlan:
    """Return what a run takes; see `forecast`.

    Args:
        use_recorded: whether times are those of the run's latest steps, if there are any.
    """
    update = forecast(
        run, training_equivalent(config), hardware, sharding, datasets_dir, utilization, None
    )
    steps = list(metrics.stream(run.metrics, PolicyMetrics))
    recent = steps[-_RECENT_STEPS:]
    prompts = config.train.prompts_per_step
    return PolicyPlan(
        config=config,
        update=update,
        sampler_bytes=_sampler_bytes(update),
        cache_bytes=_cache_bytes(config, update),
        reference_bytes=_reference_bytes(config, update),
        phases=_recorded(recent) if recent and use_recorded else _computed(config, update),
        steps_done=steps[-1].global_step + 1 if steps else 0,
        mixed_share=statistics.mean(s.groups_mixed / prompts for s in recent) if recent else None,
    )


def expected_mixed(pass_rate: float, samples: int) -> float:
    """Return the probability that independent completions of a prompt are not all right or all
    wrong.

    Args:
        pass_rate: probability that one is right.
    """
    return 1 - pass_rate**samples - (1 - pass_rate) ** samples


def _sampler_bytes(update: Forecast) -> int:
    """Matrices in the compute dtype; the few other weights are counted alike."""
    size = dtype_of(update.config.train).itemsize
    return size * sum(math.prod(shape) for shape in shapes_of(update.config.model).values())


def _cache_bytes(config: ReinforceRunConfig, update: Forecast) -> int:
    model, train = config
    rows = math.ceil((train.sampling_batch_size or train.sequences_per_step) / update.devices)
    is_cpu = update.hardware.name == "cpu"
    size = np.dtype(np.float32).itemsize if is_cpu else dtype_of(update.config.train).itemsize
    width = (
        2 * (model.n_kv_heads or model.n_heads or 0) * (model.head_width if model.n_heads else 0)
    )
    return size * rows * config.sequence_length * model.n_layers * width


def _reference_bytes(config: ReinforceRunConfig, update: Forecast) -> int:
    if not config.train.kl_coefficient:
        return 0
    whole = 4 * sum(math.prod(shape) for shape in shapes_of(config.model).values())
    return math.ceil(whole / update.devices) if update.sharding.mode == "fsdp" else whole


def _recorded(steps: list[PolicyMetrics]) -> Phases:
    return Phases(
        statistics.median(step.sampling_seconds for step in steps),
        statistics.median(step.verifying_seconds for step in steps),
        statistics.median(step.updating_seconds for step in steps),
        "as in the run's latest steps",
    )


def _computed(config: ReinforceRunConfig, update: Forecast) -> Phases | None:
    """Return the times at the forecast's FLOP/s, if every text is as long as it may be and all
    prompts have right and wrong completions. A forward pass is a third of a training step, and each
    new token at least reads all weights once."""
    if update.speed is None:
        return None
    train, per_token = config.train, update.model_flops_per_token
    step = per_token * config.tokens_per_step / update.speed.flops
    bandwidth = update.hardware.bandwidth
    reads = train.max_new_tokens * _sampler_bytes(update) / bandwidth if bandwidth else 0.0
    sampling = max(step / 3, reads)
    return Phases(sampling, None, train.updates_per_rollout * step, update.speed.reason)
