"""Forecast and report of a reinforcement learning run: memory of sampling and updates, and the time
of each phase."""

import functools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rungs.common.shown_text import counted, format_bytes, format_duration
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import ReinforceRunConfig, RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.model.decoding import empty_caches
from rungs.optim.precision import dtype_of
from rungs.planning import flops, report
from rungs.planning.forecast import Forecast, forecast, remedy
from rungs.planning.hardware import Hardware
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.step.state import shapes_of

_RECENT_STEPS = 50
"""Recorded steps from which times are taken."""


class Phases(NamedTuple):
    """Seconds of each phase of a step."""

    sampling: float
    verifying: float | None
    """None if unknown, as it depends on the verifier."""
    updating: float
    reason: str
    """Source of the figures."""

    @property
    def total(self) -> float:
        return self.sampling + (self.verifying or 0) + self.updating


class PolicyPlan(NamedTuple):
    """Memory and time of a reinforcement learning run; bytes are per device."""

    config: ReinforceRunConfig
    update: Forecast
    """Forecast of a training run with the same updates."""
    sampler_bytes: int
    """Bytes of the sampler's copy of the weights, which every device has in full."""
    cache_bytes: int
    reference_bytes: int
    teacher_bytes: int
    phases: Phases | None
    """None if the device's FLOP/s are unknown."""
    steps_done: int

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, moments, and the models beside."""
        memory = self.update.memory
        return memory.weights + memory.moments + self.beside_bytes

    @property
    def beside_bytes(self) -> int:
        """Bytes of sampler, reference and teacher."""
        return self.sampler_bytes + self.reference_bytes + self.teacher_bytes

    @property
    def sampling_bytes(self) -> int:
        """Peak bytes of sampling."""
        return self.state_bytes + self.cache_bytes

    @property
    def updating_bytes(self) -> int:
        """Peak bytes of an update, with those of sampling at the same time with staleness."""
        caches = self.cache_bytes if self.config.train.staleness else 0
        return self.update.memory.total + self.beside_bytes + caches

    @property
    def validations(self) -> int:
        """Approximate number of validations."""
        train = self.config.train
        return -(-train.steps // train.checkpoint_interval) + 1

    @property
    def seconds_left(self) -> float | None:
        """Seconds of the steps left, without validations."""
        steps = max(self.config.train.steps - self.steps_done, 0)
        return self.phases and steps * self.phases.total

    @property
    def cost_left(self) -> float | None:
        """Cost of these seconds."""
        price, seconds = self.update.price_per_hour, self.seconds_left
        return None if price is None or seconds is None else price * seconds / 3600

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice."""
        peak = max(self.sampling_bytes, self.updating_bytes)
        return peak <= self.update.usable_bytes and self.update.disk.fits


def training_equivalent(config: ReinforceRunConfig) -> RunConfig:
    """Return a training run whose step has the same arrays as an update."""
    model, train = config
    shared = TrainConfig.model_fields.keys() - {"lineage", "teacher"}
    keys: dict[str, Any] = {key: value for key, value in dict(train).items() if key in shared}
    keys["dataset"] = "none"
    keys["gradient_accumulation_steps"] = train.microbatches_per_step
    keys["min_train_tokens"] = train.total_updates * config.tokens_per_step
    return RunConfig(model, TrainConfig.model_construct(**keys))


def plan(
    run: RunFolder,
    config: ReinforceRunConfig,
    hardware: Hardware,
    sharding: ShardingConfig,
    datasets_dir: Path,
    utilization: float,
    use_recorded: bool,
) -> PolicyPlan:
    """Return the plan of a run; arguments as for `forecast`. `use_recorded` takes times from the
    run's latest steps, if there are any."""
    training, train = training_equivalent(config), config.train
    update = forecast(run, training, hardware, sharding, datasets_dir, utilization)
    steps = list(metrics.stream(run.metrics, metrics.PolicyMetrics))
    recent = steps[-_RECENT_STEPS:]
    return PolicyPlan(
        config=config,
        update=update,
        sampler_bytes=_sampler_bytes(update),
        cache_bytes=_cache_bytes(config, update),
        reference_bytes=_bytes_of(config.model if train.kl_coefficient else None, update),
        teacher_bytes=_bytes_of(flops.model_at(train.teacher) if train.teacher else None, update),
        phases=_recorded(recent) if recent and use_recorded else _computed(config, update),
        steps_done=steps[-1].global_step + 1 if steps else 0,
    )


def _sampler_bytes(update: Forecast) -> int:
    """Return the bytes of matrices in the compute dtype, counting the few other weights alike."""
    size = dtype_of(update.config.train).itemsize
    return size * sum(math.prod(shape) for shape in shapes_of(update.config.model).values())


def _cache_bytes(config: ReinforceRunConfig, update: Forecast) -> int:
    model, train = config
    rows = math.ceil((train.sampling_batch_size or train.sequences_per_step) / update.devices)
    is_cpu = update.hardware.name == "cpu"
    dtype = jnp.dtype(jnp.float32) if is_cpu else dtype_of(update.config.train)
    make = functools.partial(empty_caches, model, rows, config.sequence_length, dtype)
    caches = jax.tree.leaves(jax.eval_shape(make))
    return sum(array.size * array.dtype.itemsize for array in caches)


def _bytes_of(model: ModelConfig | None, update: Forecast) -> int:
    """Return the bytes of a model that isn't trained."""
    if model is None:
        return 0
    whole = 4 * sum(math.prod(shape) for shape in shapes_of(model).values())
    return math.ceil(whole / update.devices) if update.sharding.mode == "fsdp" else whole


def _recorded(steps: list[metrics.PolicyMetrics]) -> Phases:
    return Phases(
        statistics.median(step.sampling_seconds for step in steps),
        statistics.median(step.verifying_seconds for step in steps),
        statistics.median(step.updating_seconds for step in steps),
        "as in the run's latest steps",
    )


def _computed(config: ReinforceRunConfig, update: Forecast) -> Phases | None:
    """Return the times at the forecast's FLOP/s if every text has maximum length and all prompts
    have mixed results. A forward pass is a third of a training step, and each new token at least
    reads all weights once."""
    if update.speed is None:
        return None
    train, per_token = config.train, update.model_flops_per_token
    step = per_token * config.tokens_per_step / update.speed.flops
    bandwidth = update.hardware.bandwidth
    reads = train.max_new_tokens * _sampler_bytes(update) / bandwidth if bandwidth else 0.0
    sampling = max(step / 3, reads)
    return Phases(sampling, None, train.updates_per_rollout * step, update.speed.reason)


def as_text(run: RunFolder, plan: PolicyPlan) -> str:
    """Return the plan as text."""
    sections = [
        report.title(plan.update, run),
        report.parameters(plan.update),
        _memory(plan),
        _step(plan),
        report.disk(plan.update),
        _time(plan),
        _verdict(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def as_json(plan: PolicyPlan) -> str:
    """Return the same figures as JSON: bytes, seconds and shares."""
    figures = {
        "update": report.content(plan.update) | {"seconds_left": None, "cost_left": None},
        "sampler_bytes": plan.sampler_bytes,
        "cache_bytes": plan.cache_bytes,
        "reference_bytes": plan.reference_bytes,
        "teacher_bytes": plan.teacher_bytes,
        "sampling_bytes": plan.sampling_bytes,
        "updating_bytes": plan.updating_bytes,
        "seconds": plan.phases and plan.phases._asdict(),
        "steps_done": plan.steps_done,
        "seconds_left": plan.seconds_left,
        "cost_left": plan.cost_left,
        "fits": plan.fits,
    }
    return json.dumps(figures, indent=2)


def _memory(plan: PolicyPlan) -> Iterator[str]:
    memory = plan.update.memory
    rest = memory.total - memory.weights - memory.moments
    sizes = {
        "weights": (memory.weights, memory.weights, ""),
        "moments": (memory.moments, memory.moments, "optimizer state"),
        "sampler": (plan.sampler_bytes, plan.sampler_bytes, "a whole copy of the weights"),
        "reference": (plan.reference_bytes, plan.reference_bytes, "for the KL divergence"),
        "teacher": (plan.teacher_bytes, plan.teacher_bytes, "pays each token"),
        "cache": (plan.cache_bytes, 0, "keys and values of all texts that are sampled at once"),
        "update": (0, rest, "gradients, activations and logits, as in training"),
        "peak": (plan.sampling_bytes, plan.updating_bytes, f"± {memory.error:.0%} of updating"),
    }
    rows = [
        (name, (format_bytes(sampling), format_bytes(updating)), note)
        for name, (sampling, updating, note) in sizes.items()
        if sampling or updating
    ]
    columns = "sampling", "updating"
    yield from report.table("memory per device", columns, rows, label=16, width=12)
    yield f"  of {format_bytes(plan.update.usable_bytes)}"


def _step(plan: PolicyPlan) -> Iterator[str]:
    train = plan.config.train
    prompt = plan.config.sequence_length - train.max_new_tokens
    yield (
        f"step      {counted(train.prompts_per_step, 'prompt')}"
        f" × {counted(train.samples_per_prompt, 'completion')}"
        f" = {counted(train.sequences_per_step, 'text')}"
    )
    yield f"          of at most {prompt:,} + {train.max_new_tokens:,} tokens"
    yield (
        f"          {train.updates_per_rollout:,}"
        f" × {counted(train.microbatches_per_step, 'microbatch')}"
        f" of {counted(train.microbatch_size, 'text')}"
    )
    held_out = sum(task.validation_items for task in train.tasks)
    yield (
        f"run       {counted(train.steps, 'step')}, {plan.steps_done:,} done; about"
        f" {counted(plan.validations, 'validation')} of {held_out:,}"
        f" × {counted(train.validation_samples, 'completion')}"
    )


def _time(plan: PolicyPlan) -> Iterator[str]:
    phases, left = plan.phases, plan.seconds_left
    if phases is None or left is None:
        yield "time      not known, as the device's FLOP/s are not; the first steps measure it"
        yield from _cost(plan)
        return
    yield f"time      {format_duration(left)} left, without validations ({phases.reason})"
    yield f"          sampling {phases.sampling:.3g} s per step"
    if phases.verifying is None:
        yield "          verifying depends on the verifier"
    else:
        yield f"          verifying {phases.verifying:.3g} s"
    yield f"          updating {phases.updating:.3g} s"
    if phases.verifying is None:
        yield from report.short_step(plan.update, phases.total)
    yield from _cost(plan)


def _cost(plan: PolicyPlan) -> Iterator[str]:
    if (per_hour := plan.update.price_per_hour) is not None:
        cost = plan.cost_left
        known = f"{cost:,.2f} without validations" if cost is not None else ""
        yield f"cost      {known or 'not known, as the time is not'}; an hour costs {per_hour:,.2f}"


def _verdict(plan: PolicyPlan) -> Iterator[str]:
    usable, disk = plan.update.usable_bytes, plan.update.disk
    if plan.fits:
        yield "It fits."
        return
    if max(plan.sampling_bytes, plan.updating_bytes) <= usable:
        yield "It fits into memory."
    if plan.sampling_bytes > usable:
        yield "Sampling does not fit into memory: lower sampling_batch_size"
    if plan.updating_bytes > usable:
        yield "An update does not fit into memory: lower microbatch_size"
    if not disk.fits:
        yield f"Its checkpoints do not fit on the disk: {remedy(plan.config.train)}"
