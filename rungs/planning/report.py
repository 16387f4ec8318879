"""What a run will take, as a table for people and as JSON for programs."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rungs.common.text_table import format_duration
from rungs.planning.flops import TOKENS_PER_PARAMETER, Passes
from rungs.planning.forecast import Forecast
from rungs.planning.memory import shown
from rungs.run.folder import RunFolder

UNKNOWN_SPEED = "train some steps first, or give --tokens-per-second or another --device"
_NAMED = {"low_rank": "low rank", "feed_forward": "feed-forward"}


def as_text(run: RunFolder, planned: Forecast) -> str:
    """The table."""
    parts = (_parameters, _memory, _flops, _tokens, _disk, _time)
    blocks = ["\n".join(part(planned)) for part in parts]
    return "\n\n".join([_title(run, planned), *blocks, _verdict(planned)])


def as_json(planned: Forecast) -> str:
    """The same figures: bytes, FLOPs, tokens and seconds."""
    tokens, disk, pace = planned.tokens, planned.disk, planned.pace
    content: dict[str, Any] = {
        "device": planned.hardware.name,
        "sharding": planned.sharding.model_dump(),
        "compute_dtype": planned.config.train.compute_dtype,
        "optimizer": planned.config.train.optimizer,
        "schedule": planned.config.train.schedule,
        "parameters": _with_total(planned.parameters._asdict()),
        "active_parameters": _with_total(planned.active._asdict()),
        "bytes_per_device": _with_total(dataclasses.asdict(planned.memory), planned.memory.total),
        "usable_bytes_per_device": planned.usable_bytes,
        "flops_per_token": {
            **{name: passes._asdict() for name, passes in planned.flops._asdict().items()},
            "total": planned.flops.total,
            "conventional": planned.conventional_flops,
        },
        "tokens": {
            **tokens._asdict(),
            "planned": tokens.planned,
            "per_parameter": planned.tokens_per_parameter,
        },
        "disk": {**disk._asdict(), "needed_bytes": disk.needed_bytes},
        "pace": pace and pace._asdict(),
        "seconds_left": planned.seconds_left,
        "fits": planned.fits,
    }
    return json.dumps(content, indent=2)


def _with_total(parts: dict[str, int], total: int | None = None) -> dict[str, int]:
    return {**parts, "total": sum(parts.values()) if total is None else total}


def _title(run: RunFolder, planned: Forecast) -> str:
    sharding, dtype = planned.sharding, planned.config.train.compute_dtype
    devices = f"{planned.devices} × {planned.hardware.name}"
    if planned.devices > 1:
        devices += f", {sharding.mode}"
    if sharding.tensor != 1:
        devices += f": data {sharding.data} × tensor {sharding.tensor}"
    train = planned.config.train
    by = f"{train.optimizer} with schedule {train.schedule}"
    return f"{run.path} on {devices}, in {dtype}, by {by}"


def _parameters(planned: Forecast) -> Iterator[str]:
    has_experts = planned.config.model.n_experts is not None
    yield f"{'parameters':14}{'total':>18}" + f"{'a token meets':>18}" * has_experts
    active = planned.active._asdict()
    for name, count in planned.parameters._asdict().items():
        if count or name != "low_rank":
            yield _row(name, count, active[name] if has_experts else None)
    yield _row("all", planned.parameters.total, planned.active.total if has_experts else None)


def _row(name: str, *counts: int | None) -> str:
    shown_counts = "".join(f"{count:18,}" for count in counts if count is not None)
    return f"  {_NAMED.get(name, name):12}{shown_counts}"


def _memory(planned: Forecast) -> Iterator[str]:
    memory = planned.memory
    yield "memory of " + ("the device" if planned.devices == 1 else "each device")
    for name, size in dataclasses.asdict(memory).items():
        yield f"  {name:12}{shown(size):>18}" + _MEANING.get(name, "")
    share = memory.total / planned.usable_bytes
    yield f"  {'at once':12}{shown(memory.total):>18}  {share:.0%} of {_usable(planned)}"


_MEANING = {
    "logits": "  of a chunk of the tokens",
    "layer": "  what its backward pass has at once, when the logits have gone",
}


def _usable(planned: Forecast) -> str:
    usable, hardware = planned.usable_bytes, planned.hardware
    if hardware.is_preallocated:
        share = usable / hardware.memory_bytes
        return f"{shown(usable)}, which JAX takes of {shown(hardware.memory_bytes)} ({share:.0%})"
    return shown(usable)


def _flops(planned: Forecast) -> Iterator[str]:
    yield f"{'MFLOPs a token':14}{'forward':>14}{'again':>12}{'backward':>12}{'all':>12}"
    parts = planned.flops._asdict()
    for name, passes in parts.items():
        yield _flops_row(name, passes)
    yield _flops_row("all", Passes(*map(sum, zip(*parts.values(), strict=True))))
    yield f"  by the usual formula {planned.conventional_flops / 1e6:,.1f}: 6 for each weight in a"
    yield "  product and 12 · layers · width of heads · sequence; utilisation is told by it"


def _flops_row(name: str, passes: Passes) -> str:
    figures = "".join(f"{figure / 1e6:12,.1f}" for figure in (*passes, passes.total))
    return f"  {name:14}{figures}"


def _tokens(planned: Forecast) -> Iterator[str]:
    train, tokens = planned.config.train, planned.tokens
    length = planned.config.sequence_length
    yield (
        f"a step    {train.microbatch_size:,} sequences"
        f" × {train.gradient_accumulation_steps:,} microbatches"
        f" × {length:,} tokens = {tokens.per_step:,} tokens"
    )
    data = planned.sharding.sizes[0]
    if data > 1:
        yield f"          {train.microbatch_size // data:,} sequences of a microbatch a device"
    yield from _planned_tokens(planned)
    for name, count in tokens.in_datasets.items():
        if count is None:
            yield f"dataset   {name}: not here yet; uv run download_dataset.py {name}"
        else:
            yield f"dataset   {name}: {count:,} tokens"


def _planned_tokens(planned: Forecast) -> Iterator[str]:
    tokens, per_parameter = planned.tokens, planned.tokens_per_parameter
    best = TOKENS_PER_PARAMETER * planned.active.total
    if tokens.planned is None or per_parameter is None:
        yield "the run   all tokens of the dataset, which are not known yet"
    else:
        yield f"the run   {tokens.steps:,} steps × {tokens.per_step:,} = {tokens.planned:,} tokens"
        yield f"          {per_parameter:.2f} for each parameter"
    yield f"          {TOKENS_PER_PARAMETER} for each parameter would be {best:,}"


def _disk(planned: Forecast) -> Iterator[str]:
    disk = planned.disk
    if disk.checkpoints is None:
        yield f"disk      {shown(disk.checkpoint_bytes)} a checkpoint, all of which are kept"
    else:
        yield (
            f"disk      {shown(disk.checkpoint_bytes)} a checkpoint × {disk.checkpoints}"
            f" at once = {shown(disk.needed_bytes)}"
        )
    yield f"          {shown(disk.free_bytes)} free"


def _time(planned: Forecast) -> Iterator[str]:
    pace, seconds = planned.pace, planned.seconds_left
    if pace is None:
        yield f"time      not known: {UNKNOWN_SPEED}"
        return
    left = "" if seconds is None else f"{format_duration(seconds)} at "
    yield f"time      {left}{pace.tokens_per_second:,.0f} tokens a second, {pace.reason}"
    if planned.tokens.done:
        yield f"          after {planned.tokens.done:,} tokens that are done"
    if planned.speed is not None:
        yield f"          an hour computes {3600 * planned.speed.flops:.1e} FLOPs"


def _verdict(planned: Forecast) -> str:
    if planned.fits:
        return "It fits."
    lines = []
    if not planned.fits_memory:
        lines.append("It does not fit into memory:")
        lines += planned.remedies()
    if not planned.disk.fits:
        lines.append("Its checkpoints do not fit on the disk: make room, or lower keep_checkpoints")
    return "\n".join(lines)
