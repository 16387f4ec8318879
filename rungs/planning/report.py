"""A forecast as a table for people and as JSON for programs."""

import json
import math
from collections.abc import Iterator
from typing import Any

from rungs.common.shown_text import quoted
from rungs.common.text_table import counted, format_duration
from rungs.parallel.gpu_memory import share_advice
from rungs.parallel.mesh import size_along
from rungs.parallel.names import CONTEXT, DATA
from rungs.planning.communication import abstract_layout
from rungs.planning.compiled import report as compiled_report
from rungs.planning.compiled import roofline_report
from rungs.planning.compiled.roofline import Roofline
from rungs.planning.compiled.step import CompiledStep
from rungs.planning.disk_space import remedy
from rungs.planning.flops import TOKENS_PER_PARAMETER, Passes
from rungs.planning.forecast import Forecast
from rungs.planning.memory import MEMORY_LABELS, format_bytes
from rungs.run.folder import RunFolder

UNKNOWN_SPEED = "train some steps first, or give --tokens-per-second or another --device"
COUNTED_AS_FLOAT32 = "in float32, because the weights of start_from are not here yet"
_GROUP_LABELS = {"low_rank": "LoRA", "feed_forward": "feed-forward"}
_OPTIONAL_GROUPS = ("low_rank", "other")
"""Parameter groups that are left out if they are empty."""
_MEMORY_NOTES = {
    "moments": "optimizer state",
    "gradients": "of the layers",
    "gathered": "full copies of one layer's sharded weights",
    "logits": "one chunk of tokens at a time, with the output head",
    "layer": "one layer at a time; does not overlap with the logits",
}


def as_text(
    run: RunFolder,
    forecast: Forecast,
    compiled: CompiledStep | None = None,
    bound: Roofline | None = None,
) -> str:
    """Return the table."""
    parts = (parameters, _memory, _flops, _tokens, disk, _time)
    blocks = ["\n".join(part(forecast)) for part in parts]
    if compiled is not None:
        blocks.append("\n".join(compiled_report.as_lines(forecast, compiled)))
    if bound is not None:
        blocks.append("\n".join(roofline_report.as_lines(bound)))
    return "\n\n".join([title(run, forecast), *blocks, _verdict(forecast, compiled)])


def fits(forecast: Forecast, compiled: CompiledStep | None = None) -> bool:
    """Return whether the run fits; its compiler knows better than the estimate."""
    return forecast.disk.fits and _fits_memory(forecast, compiled)


def _fits_memory(forecast: Forecast, compiled: CompiledStep | None) -> bool:
    if compiled is not None:
        return compiled_report.fits(forecast, compiled)
    return forecast.fits_memory


def as_json(
    forecast: Forecast, compiled: CompiledStep | None = None, bound: Roofline | None = None
) -> str:
    """Return the same figures as JSON: bytes, FLOPs, tokens and seconds."""
    tokens, disk, throughput = forecast.tokens, forecast.disk, forecast.throughput
    content: dict[str, Any] = {
        "device": forecast.hardware.name,
        "sharding": forecast.sharding.model_dump(),
        "compute_dtype": forecast.config.train.compute_dtype,
        "optimizer": forecast.config.train.optimizer,
        "schedule": forecast.config.train.schedule,
        "parameters": _with_total(forecast.parameters._asdict()),
        "active_parameters": _with_total(forecast.active._asdict()),
        "bytes_per_device": forecast.memory.parts | {"total": forecast.memory.total},
        "memory_error": forecast.memory.error,
        "usable_bytes_per_device": forecast.usable_bytes,
        "flops_per_token": {
            **{name: _passes(passes) for name, passes in forecast.flops._asdict().items()},
            "total": forecast.flops.total,
            "model_flops": forecast.model_flops_per_token,
        },
        "tokens": {
            **tokens._asdict(),
            "planned": tokens.planned,
            "per_parameter": forecast.tokens_per_parameter,
        },
        "disk": {
            **disk._asdict(),
            "free_bytes": disk.free_bytes if math.isfinite(disk.free_bytes) else None,
            "needed_bytes": disk.needed_bytes,
        },
        "throughput": throughput and throughput._asdict(),
        "communication_seconds_per_step": forecast.communication
        and forecast.communication._asdict(),
        "seconds_left": forecast.seconds_left,
        "price_per_device_hour": forecast.price_per_device_hour,
        "cost_left": forecast.cost_left,
        "fits": fits(forecast, compiled),
    }
    if compiled is not None:
        content["compiled"] = compiled_report.as_content(forecast, compiled)
    if bound is not None:
        content["roofline"] = roofline_report.as_content(bound)
    return json.dumps(content, indent=2)


def _with_total(parts: dict[str, int]) -> dict[str, int]:
    return {**parts, "total": sum(parts.values())}


def _passes(passes: Passes) -> dict[str, float]:
    return {
        "forward": passes.forward,
        "recompute": passes.recompute,
        "backward": passes.backward,
    }


def title(run: RunFolder, forecast: Forecast) -> str:
    sharding, train = forecast.sharding, forecast.config.train
    devices = f"{forecast.devices} × {forecast.hardware.name}"
    if forecast.devices > 1:
        devices += f", {sharding.mode}"
    if sharding.sizes[1] > 1:
        devices += f": {sharding.text}"
    return (
        f"{run.path} on {devices}; {train.compute_dtype}, optimizer {train.optimizer},"
        f" schedule {train.schedule}"
    )


def parameters(forecast: Forecast) -> Iterator[str]:
    has_experts = forecast.config.model.n_experts is not None
    yield f"{'parameters':14}{'all':>18}" + f"{'active per token':>18}" * has_experts
    active = forecast.active._asdict()
    for name, count in forecast.parameters._asdict().items():
        if count or name not in _OPTIONAL_GROUPS:
            yield _parameters_row(name, count, active[name] if has_experts else None)
    totals = forecast.parameters.total, forecast.active.total if has_experts else None
    yield _parameters_row("total", *totals)


def _parameters_row(name: str, *counts: int | None) -> str:
    cells = "".join(f"{count:18,}" for count in counts if count is not None)
    return f"  {_GROUP_LABELS.get(name, name):12}{cells}"


def _memory(forecast: Forecast) -> Iterator[str]:
    memory = forecast.memory
    yield "memory" if forecast.devices == 1 else "memory per device"
    notes = dict(_MEMORY_NOTES)
    if forecast.config.train.lora and forecast.stored is None:
        notes["weights"] = COUNTED_AS_FLOAT32
    for name, size in memory.parts.items():
        yield _memory_row(MEMORY_LABELS.get(name, name), size, notes.get(name, ""))
    share = memory.total / forecast.usable_bytes
    note = f"± {memory.error:.0%}; {share:.0%} of {_usable(forecast)}"
    yield _memory_row("peak", memory.total, note)


def _memory_row(label: str, size: int, note: str) -> str:
    return f"  {label:12}{format_bytes(size):>18}  {note}".rstrip()


def _usable(forecast: Forecast) -> str:
    usable, hardware = format_bytes(forecast.usable_bytes), forecast.hardware
    if not hardware.is_preallocated:
        return usable
    return f"{usable}; {share_advice(format_bytes(hardware.memory_bytes))}"


def _flops(forecast: Forecast) -> Iterator[str]:
    columns = f"{'forward':>12}{'recompute':>12}{'backward':>12}{'total':>12}"
    yield f"{'MFLOPs per token':16}{columns}"
    parts = forecast.flops._asdict()
    for name, passes in parts.items():
        yield _flops_row(name, passes)
    yield _flops_row("total", Passes(*map(sum, zip(*parts.values(), strict=True))))
    yield f"  {'model FLOPs':14}{forecast.model_flops_per_token / 1e6:48,.1f}"
    yield "  Utilization (MFU) is measured in model FLOPs: 6 × active weights in matmuls"
    yield "  + 12 × layers × heads × head width × sequence length."


def _flops_row(name: str, passes: Passes) -> str:
    figures = "".join(f"{figure / 1e6:12,.1f}" for figure in (*passes, passes.total))
    return f"  {name:14}{figures}"


def _tokens(forecast: Forecast) -> Iterator[str]:
    train, tokens = forecast.config.train, forecast.tokens
    length = forecast.config.sequence_length
    yield (
        f"step      {counted(train.microbatch_size, 'sequence')}"
        f" × {counted(train.gradient_accumulation_steps, 'microbatch')}"
        f" × {counted(length, 'token')} = {counted(tokens.per_step, 'token')}"
    )
    mesh = abstract_layout(forecast.sharding).mesh
    data, context = size_along(mesh, DATA), size_along(mesh, CONTEXT)
    if data * context > 1:
        rows, part = train.microbatch_size // data, counted(length // context, "token")
        each = f", {part} of each" * (context > 1)
        yield f"          {counted(rows, 'sequence')} of each microbatch per device{each}"
    yield from _planned_tokens(forecast)
    for name, count in tokens.in_datasets.items():
        if count is None:
            yield f"dataset   {name}: not here yet; uv run download_dataset.py {quoted(name)}"
        else:
            yield f"dataset   {name}: {counted(count, 'token')}"


def _planned_tokens(forecast: Forecast) -> Iterator[str]:
    tokens, per_parameter = forecast.tokens, forecast.tokens_per_parameter
    if tokens.planned is None or per_parameter is None:
        yield "run       all tokens of the dataset, whose number is not known yet"
    else:
        steps = counted(tokens.steps or 0, "step")
        yield f"run       {steps} × {tokens.per_step:,} = {counted(tokens.planned, 'token')}"
        yield f"          {per_parameter:.2f} per parameter"
    if forecast.config.train.start_from is None:  # which is about training from scratch
        optimal = TOKENS_PER_PARAMETER * forecast.active.total
        per = f"{TOKENS_PER_PARAMETER} per parameter"
        yield f"          compute-optimal: {per} = {optimal:,} tokens"


def disk(forecast: Forecast) -> Iterator[str]:
    disk = forecast.disk
    if disk.checkpoints is None:
        yield f"disk      {format_bytes(disk.checkpoint_bytes)} per checkpoint; all are kept"
    else:
        yield (
            f"disk      {format_bytes(disk.checkpoint_bytes)} per checkpoint ×"
            f" {disk.checkpoints} at the same time = {format_bytes(disk.needed_bytes)}"
        )
    if math.isfinite(disk.free_bytes):
        yield f"          {format_bytes(disk.free_bytes)} free"
    else:
        yield "          free space where it will run: not known"


def _time(forecast: Forecast) -> Iterator[str]:
    throughput, seconds = forecast.throughput, forecast.seconds_left
    if throughput is None:
        yield f"time      not known: {UNKNOWN_SPEED}"
        yield from _cost(forecast)
        return
    left = "" if seconds is None else f"{format_duration(seconds)} at "
    yield (
        f"time      {left}{throughput.tokens_per_second:,.0f} tokens per second"
        f" ({throughput.reason})"
    )
    yield from _communication(forecast)
    if forecast.tokens.done:
        yield f"          {forecast.tokens.done:,} tokens are already done"
    if forecast.speed is not None:
        yield f"          one hour is {3600 * forecast.speed.flops:.1e} FLOPs"
    yield from _cost(forecast)


def _cost(forecast: Forecast) -> Iterator[str]:
    per_hour, total = forecast.price_per_hour, forecast.cost_left
    if per_hour is None:
        return
    if total is not None:
        left = f"{total:,.2f}"
    elif forecast.throughput is None:
        left = "not known, as the time is not"
    else:
        left = "not known until the datasets are here"
    yield f"cost      {left}; an hour costs {per_hour:,.2f}, without validation and checkpoints"


def _communication(forecast: Forecast) -> Iterator[str]:
    if forecast.uncounted:
        yield f"          communication is not counted: {forecast.uncounted}"
    if forecast.communication is not None:
        tensor, data = forecast.communication
        seconds = f"{tensor:.2g} s of activations, {data:.2g} s of weights and gradients"
        yield f"          communication per step: {seconds}, assuming links at their peak;"
        yield "          computing waits for activations and overlaps with the rest"


def _verdict(forecast: Forecast, compiled: CompiledStep | None) -> str:
    if fits(forecast, compiled):
        return "It fits."
    if _fits_memory(forecast, compiled):
        lines = ["It fits into memory."]
    else:
        lines = ["It does not fit into memory:", *forecast.remedies()]
    if not forecast.disk.fits:
        lines.append(f"Its checkpoints do not fit on the disk: {remedy(forecast.config.train)}")
    return "\n".join(lines)
