"""The plan of a run of reinforcement learning as text and as JSON."""

import json
from collections.abc import Iterator
from typing import Any

from rungs.common.text_table import counted, format_duration
from rungs.planning import report
from rungs.planning.disk_space import remedy
from rungs.planning.memory import format_bytes
from rungs.planning.policy_plan import PolicyPlan, expected_mixed
from rungs.run.folder import RunFolder

_PASS_RATES = (0.05, 0.2, 0.5)


def as_text(run: RunFolder, plan: PolicyPlan) -> str:
    """Return the plan as text."""
    update = plan.update
    parts = (report.parameters(update), _memory(plan), _step(plan), _disk(plan))
    blocks = ["\n".join(part) for part in (*parts, _time(plan), _signal(plan))]
    return "\n\n".join([report.title(run, update), *blocks, _verdict(plan)])


def as_json(plan: PolicyPlan) -> str:
    """Return the same figures as JSON: bytes, seconds and shares."""
    content: dict[str, Any] = {
        "update": json.loads(report.as_json(plan.update)),
        "sampler_bytes": plan.sampler_bytes,
        "cache_bytes": plan.cache_bytes,
        "reference_bytes": plan.reference_bytes,
        "sampling_bytes": plan.sampling_bytes,
        "updating_bytes": plan.updating_bytes,
        "rollout_bytes": plan.rollout_bytes,
        "seconds": plan.phases and plan.phases._asdict(),
        "steps_done": plan.steps_done,
        "mixed_share": plan.mixed_share,
        "fits": plan.fits,
    }
    return json.dumps(content, indent=2)


def _memory(plan: PolicyPlan) -> Iterator[str]:
    memory = plan.update.memory
    rest = memory.total - memory.weights - memory.moments
    rows = {
        "weights": (memory.weights, memory.weights, ""),
        "moments": (memory.moments, memory.moments, "optimizer state"),
        "sampler": (plan.sampler_bytes, plan.sampler_bytes, "a whole copy of the weights"),
        "reference": (plan.reference_bytes, plan.reference_bytes, "for the KL divergence"),
        "cache": (plan.cache_bytes, 0, "keys and values of all texts that are sampled at once"),
        "update": (0, rest, "gradients, activations and logits, as in training"),
        "peak": (plan.sampling_bytes, plan.updating_bytes, f"± {memory.error:.0%} of updating"),
    }
    yield f"{'memory per device':18}{'sampling':>10}{'updating':>12}"
    for name, (sampling, updating, note) in rows.items():
        if sampling or updating:
            sizes = f"{format_bytes(sampling):>12}{format_bytes(updating):>12}"
            yield f"  {name:14}{sizes}  {note}".rstrip()
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


def _disk(plan: PolicyPlan) -> Iterator[str]:
    yield from report.disk(plan.update)
    yield f"          at most {format_bytes(plan.rollout_bytes)} of rollouts by the end"


def _time(plan: PolicyPlan) -> Iterator[str]:
    phases = plan.phases
    if phases is None:
        yield "time      not known: the device's FLOP/s are not known; take a few steps"
        return
    left = max(plan.config.train.steps - plan.steps_done, 0) * phases.total
    verifying = (
        "depends on the verifier" if phases.verifying is None else _seconds(phases.verifying)
    )
    yield f"time      {format_duration(left)} left, without validations ({phases.reason})"
    yield f"          sampling {_seconds(phases.sampling)} per step"
    yield f"          verifying {verifying}"
    yield f"          updating {_seconds(phases.updating)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _signal(plan: PolicyPlan) -> Iterator[str]:
    samples = plan.config.train.samples_per_prompt
    yield "signal    only prompts with right and wrong completions teach anything:"
    if plan.mixed_share is not None:
        yield f"          {plan.mixed_share:.0%} of them in the run's latest steps"
    for rate in _PASS_RATES:
        share = expected_mixed(rate, samples)
        yield f"          {share:4.0%} if {rate:.0%} of the completions of each are right"


def _verdict(plan: PolicyPlan) -> str:
    if plan.fits:
        return "It fits."
    lines = []
    if max(plan.sampling_bytes, plan.updating_bytes) <= plan.update.usable_bytes:
        lines.append("It fits into memory.")
    if plan.sampling_bytes > plan.update.usable_bytes:
        lines.append("Sampling does not fit into memory: lower sampling_batch_size")
    if plan.updating_bytes > plan.update.usable_bytes:
        lines.append("An update does not fit into memory: lower microbatch_size")
    if not plan.update.disk.fits:
        lines.append(f"Its checkpoints do not fit on the disk: {remedy(plan.config.train)}")
    return "\n".join(lines)
