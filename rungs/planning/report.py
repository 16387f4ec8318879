"""The report of a forecast, as a table and as JSON."""

import math
from collections.abc import Iterator

from rungs.common.shown_text import counted, format_duration, quoted
from rungs.parallel.gpu_settings import share_advice
from rungs.parallel.sharding import CONTEXT, DATA, size_along
from rungs.planning.communication import abstract_layout
from rungs.planning.compiled import report as compiled_report
from rungs.planning.compiled.roofline import Roofline
from rungs.planning.compiled.step import CompiledStep
from rungs.planning.flops import TOKENS_PER_PARAMETER, Passes
from rungs.planning.forecast import Forecast, remedy
from rungs.planning.memory import MEMORY_LABELS, format_bytes
from rungs.planning.rows import Column, Part, Row, Table
from rungs.run.folder import RunFolder

UNKNOWN_SPEED = "train some steps first, or give --tokens-per-second or another --device"
COUNTED_AS_FLOAT32 = "in float32, because the weights of start_from are not here yet"
_FLOAT8_PAYS = 1e9
"""Parameters above which FP8 matmuls save more time than rounding to 8 bits takes."""
_GROUP_LABELS = {"low_rank": "LoRA", "feed_forward": "feed-forward"}
_OPTIONAL_GROUPS = ("low_rank", "other")
"""Parameter groups that are omitted if empty."""
_MEMORY_NOTES = {
    "moments": "optimizer state",
    "gradients": "of the layers",
    "gathered": "full copies of one layer's sharded weights",
    "logits": "one chunk of tokens at a time, with the output head",
    "layer": "one layer at a time; does not overlap with the logits",
}


def sections(
    run: RunFolder,
    forecast: Forecast,
    compiled: CompiledStep | None = None,
    bound: Roofline | None = None,
) -> Iterator[Iterator[Part]]:
    """Yield the report, for `rows.as_text` or `rows.as_json`: bytes, FLOPs, tokens and seconds."""
    yield title(forecast, run)
    for section in (parameters, _memory, _flops, _tokens, disk, _time):
        yield section(forecast)
    if compiled is not None:
        yield compiled_report.step_section(forecast, compiled)
    if bound is not None:
        yield compiled_report.roofline_section(bound)
    yield _verdict(forecast, compiled)


def fits(forecast: Forecast, compiled: CompiledStep | None = None) -> bool:
    """Return whether the run fits, preferring the compiled step to the estimate."""
    return forecast.disk.fits and _fits_memory(forecast, compiled)


def _fits_memory(forecast: Forecast, compiled: CompiledStep | None) -> bool:
    return forecast.fits_memory if compiled is None else compiled_report.fits(forecast, compiled)


def title(forecast: Forecast, run: RunFolder) -> Iterator[Part]:
    """Yield the subject of a report."""
    sharding, train = forecast.sharding, forecast.config.train
    devices = f"{forecast.devices} × {forecast.hardware.name}"
    if forecast.devices > 1:
        devices += f", {sharding.mode}"
    if sharding.sizes[1] > 1:
        devices += f": {sharding.text}"
    choices = f"{train.compute_dtype}, optimizer {train.optimizer}, schedule {train.schedule}"
    if train.uses_float8:
        choices = choices.replace(",", ", matmuls of the blocks in FP8,", 1)
    yield f"{run.path} on {devices}; {choices}"
    if train.uses_float8 and forecast.active.total < _FLOAT8_PAYS:
        yield "FP8 doesn't pay below about 1,000,000,000 parameters: matmul_dtype makes it slower"
    yield {"device": forecast.hardware.name, "sharding": sharding.model_dump()}
    yield {"compute_dtype": train.compute_dtype, "optimizer": train.optimizer}
    yield {"schedule": train.schedule, "matmul_dtype": train.matmul_dtype}


def parameters(forecast: Forecast) -> Iterator[Part]:
    """Yield the numbers of parameters by purpose."""
    width = 18 * (forecast.config.model.n_experts is not None)
    all_column = Column("all", 18, "{:,}".format, "parameters")
    active_column = Column("active per token", width, "{:,}".format, "active_parameters")
    counts, active = forecast.parameters, forecast.active
    found = [
        Row(
            _GROUP_LABELS.get(name, name) if count or name not in _OPTIONAL_GROUPS else "",
            name,
            (count, used),
        )
        for name, count, used in zip(counts._fields, counts, active, strict=True)
    ]
    found.append(Row("total", "total", (counts.total, active.total)))
    table = Table("parameters", 14, [all_column, active_column], found)
    yield from table.lines()
    yield table.by_column()


def _memory(forecast: Forecast) -> Iterator[Part]:
    memory, notes = forecast.memory, dict(_MEMORY_NOTES)
    if forecast.config.train.uses_float8:
        notes["gathered"] += "; all layers' kernels in 8 bits"
    if forecast.config.train.lora and forecast.stored is None:
        notes["weights"] = COUNTED_AS_FLOAT32
    found = [
        Row(MEMORY_LABELS.get(name, name), name, (size,), notes.get(name, ""))
        for name, size in memory.parts.items()
    ]
    share = memory.total / forecast.usable_bytes
    note = f"± {memory.error:.0%}; {share:.0%} of {_usable(forecast)}"
    found.append(Row("peak", "total", (memory.total,), note))
    title = "memory" if forecast.devices == 1 else "memory per device"
    table = Table(title, 14, [Column("", 18, format_bytes, "bytes_per_device")], found)
    yield from table.lines()
    yield table.by_column()
    yield {"memory_error": memory.error, "usable_bytes_per_device": forecast.usable_bytes}


def _usable(forecast: Forecast) -> str:
    usable, hardware = format_bytes(forecast.usable_bytes), forecast.hardware
    if not hardware.is_preallocated:
        return usable
    return f"{usable}; {share_advice(format_bytes(hardware.memory_bytes))}"


def _flops(forecast: Forecast) -> Iterator[Part]:
    def mega(flops: float) -> str:
        return f"{flops / 1e6:,.1f}"

    parts, model_flops = forecast.flops._asdict(), forecast.model_flops_per_token
    if forecast.teacher_flops_per_token:
        parts["teacher"] = Passes(forecast.teacher_flops_per_token, 0, 0)
    total = Passes(*map(sum, zip(*parts.values(), strict=True)))
    columns = [Column(name, 12, mega, name) for name in Passes._fields]
    found = [Row(name, name, (*passes, passes.total)) for name, passes in parts.items()]
    found.append(Row("total", "", (*total, total.total)))
    found.append(Row("model FLOPs", "", (None, None, None, model_flops)))
    table = Table("MFLOPs per token", 16, [*columns, Column("total", 12, mega)], found)
    yield from table.lines()
    yield "  Utilization (MFU) is measured in model FLOPs: 6 × active weights in matmuls"
    yield "  + 12 × layers × heads × head width × sequence length."
    totals = {"total": total.total, "model_flops": model_flops}
    yield {"flops_per_token": table.by_row() | totals}


def _tokens(forecast: Forecast) -> Iterator[Part]:
    train, tokens = forecast.config.train, forecast.tokens
    length, per_parameter = forecast.config.sequence_length, forecast.tokens_per_parameter
    planned = {"planned": tokens.planned, "per_parameter": per_parameter}
    yield {"tokens": tokens._asdict() | planned}
    grows = bool(train.batch_growth)
    microbatches = f"{train.gradient_accumulation_steps:,} to " * grows
    step_tokens = f"{forecast.config.tokens_per_step:,} to " * grows
    pairs = f" ({counted(train.microbatch_size // 2, 'pair')})" * train.learns_preferences
    yield (
        f"step      {counted(train.microbatch_size, 'sequence')}{pairs}"
        f" × {microbatches}{counted(train.microbatches_per_step, 'microbatch')}"
        f" × {counted(length, 'token')} = {step_tokens}{counted(tokens.per_step, 'token')}"
    )
    if grows:
        yield "          memory and communication are those of the largest step"
    mesh = abstract_layout(forecast.sharding).mesh
    data, context = size_along(mesh, DATA), size_along(mesh, CONTEXT)
    if data * context > 1:
        rows, part = train.microbatch_size // data, counted(length // context, "token")
        each = f", {part} of each" * (context > 1)
        yield f"          {counted(rows, 'sequence')} of each microbatch per device{each}"
    if tokens.planned is None or per_parameter is None:
        yield "run       all tokens of the dataset, whose number is not known yet"
    else:
        steps = counted(tokens.steps or 0, "step") + f" × {tokens.per_step:,}" * (not grows)
        yield f"run       {steps} = {counted(tokens.planned, 'token')}"
        yield f"          {per_parameter:.2f} per parameter"
    if train.max_minutes is not None:
        yield f"          as fit into max_minutes, {train.max_minutes:g}; the first steps tell"
    if train.start_from is None:  # which is about training from scratch
        optimal = TOKENS_PER_PARAMETER * forecast.active.total
        per = f"{TOKENS_PER_PARAMETER} per parameter"
        yield f"          compute-optimal: {per} = {optimal:,} tokens"
    for name, count in tokens.in_datasets.items():
        missing = f"not here yet; uv run download_dataset.py {quoted(name)}"
        read = tokens.of_datasets.get(name)
        epochs = f", {read:,} read, {read / count:.2f} epochs" if read is not None and count else ""
        yield f"dataset   {name}: {missing if count is None else counted(count, 'token')}{epochs}"


def disk(forecast: Forecast) -> Iterator[Part]:
    """Yield the disk space of the checkpoints."""
    disk, is_known = forecast.disk, math.isfinite(forecast.disk.free_bytes)
    free_bytes = disk.free_bytes if is_known else None
    yield {"disk": disk._asdict() | {"free_bytes": free_bytes, "needed_bytes": disk.needed_bytes}}
    needed = f" × {disk.checkpoints} at the same time = {format_bytes(disk.needed_bytes)}"
    total = "; all are kept" if disk.checkpoints is None else needed
    yield f"disk      {format_bytes(disk.checkpoint_bytes)} per checkpoint{total}"
    free = f"{format_bytes(disk.free_bytes)} free"
    yield f"          {free if is_known else 'free space where it will run: not known'}"


def _time(forecast: Forecast) -> Iterator[Part]:
    throughput, communication = forecast.throughput, forecast.communication
    seconds = forecast.seconds_left
    if throughput is None:
        yield f"time      not known: {UNKNOWN_SPEED}"
    else:
        left = "" if seconds is None else f"{format_duration(seconds)} at "
        speed = f"{throughput.tokens_per_second:,.0f} tokens per second"
        yield f"time      {left}{speed} ({throughput.reason})"
        yield from _communication(forecast)
        if forecast.tokens.done:
            yield f"          {forecast.tokens.done:,} tokens are already done"
        if forecast.speed is not None:
            yield f"          one hour is {3600 * forecast.speed.flops:.1e} FLOPs"
    yield from _cost(forecast)
    yield {
        "throughput": throughput and throughput._asdict(),
        "communication_seconds_per_step": communication and communication._asdict(),
        "seconds_left": seconds,
        "price_per_device_hour": forecast.price_per_device_hour,
        "cost_left": forecast.cost_left,
    }


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


def _verdict(forecast: Forecast, compiled: CompiledStep | None) -> Iterator[Part]:
    is_enough = fits(forecast, compiled)
    yield {"fits": is_enough}
    if is_enough:
        if larger := forecast.larger_microbatch():
            yield {"larger_microbatch": larger.keys}
            yield f"faster, with the same global batch: {larger}"
        yield "It fits."
        return
    if _fits_memory(forecast, compiled):
        yield "It fits into memory."
    else:
        yield "It does not fit into memory:"
        yield from forecast.remedies()
    if not forecast.disk.fits:
        yield f"Its checkpoints do not fit on the disk: {remedy(forecast.config.train)}"
