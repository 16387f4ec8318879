"""The report of a forecast, as text and as JSON."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rungs.common.shown_text import command_line, counted, format_bytes, format_duration
from rungs.data.build.sections import token_dtype
from rungs.data.catalog import build_command
from rungs.data.tokens.token_file import DTYPES
from rungs.parallel.gpu_settings import share_advice
from rungs.parallel.sharding import CONTEXT, DATA, size_along
from rungs.planning.communication import abstract_layout
from rungs.planning.compiled_step import Compiled, CompiledStep
from rungs.planning.flops import TOKENS_PER_PARAMETER, Passes
from rungs.planning.forecast import Forecast, remedy
from rungs.planning.hardware import TABLE
from rungs.planning.memory import MEMORY_LABELS, Memory
from rungs.planning.program import KERNEL_PARTS, XLA
from rungs.run.folder import RunFolder

UNKNOWN_SPEED = (
    f"measure the speed with {command_line('train')} RUN --dry-run and give it as"
    " --tokens-per-second, or train some steps, or choose another --device"
)
COUNTED_AS_FLOAT32 = "in float32, because the weights of start_from are not here yet"
_FLOAT8_PAYS = 1e9
"""Parameters above which FP8 matmuls save more time than rounding to 8 bits takes."""
_SHORT_STEP_SECONDS = 0.01
"""Shorter steps take noticeably longer than their FLOPs."""
_GROUP_LABELS = {"low_rank": "LoRA", "feed_forward": "feed-forward"}
_OPTIONAL_GROUPS = ("low_rank", "other")
"""Parameter groups that are omitted if empty."""
_MEMORY_NOTES = {
    "moments": "optimizer state",
    "gathered": "full copies of one layer's sharded weights",
    "temporary": "of a chunk of logits, or of one layer's backward pass",
}


def as_text(run: RunFolder, forecast: Forecast, compiled: CompiledStep | None = None) -> str:
    """Return the report as text, with an empty line between sections."""
    sections = [
        title(forecast, run),
        parameters(forecast),
        _memory(forecast),
        _flops(forecast),
        _tokens(forecast),
        disk(forecast),
        _time(forecast),
        *([] if compiled is None else [_compiled(forecast, compiled)]),
        _verdict(forecast, compiled),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def as_json(forecast: Forecast, compiled: CompiledStep | None = None) -> str:
    """Return the figures of the report as JSON."""
    figures = content(forecast) | {"fits": fits(forecast, compiled)}
    if compiled is not None:
        figures["compiled"] = _compiled_content(forecast, compiled)
    return json.dumps(figures, indent=2)


def content(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast's figures: bytes, FLOPs, tokens and seconds."""
    train, tokens, space = forecast.config.train, forecast.tokens, forecast.disk
    counts, active, memory = forecast.parameters, forecast.active, forecast.memory
    passes = {name: each._asdict() for name, each in _passes(forecast).items()}
    larger = forecast.larger_microbatch() if fits(forecast) else None
    return {
        "device": forecast.hardware.name,
        "sharding": forecast.sharding.model_dump(),
        "compute_dtype": train.compute_dtype,
        "optimizer": train.optimizer,
        "schedule": train.schedule,
        "matmul_dtype": train.matmul_dtype,
        "parameters": counts._asdict() | {"total": counts.total},
        "active_parameters": active._asdict() | {"total": active.total},
        "bytes_per_device": memory.parts | {"total": memory.total},
        "memory_error": memory.error,
        "usable_bytes_per_device": forecast.usable_bytes,
        "flops_per_token": passes
        | {
            "total": forecast.flops.total + forecast.teacher_flops_per_token,
            "model_flops": forecast.model_flops_per_token,
        },
        "tokens": tokens._asdict()
        | {"planned": tokens.planned, "per_parameter": forecast.tokens_per_parameter},
        "disk": space._asdict()
        | {
            "free_bytes": space.free_bytes if math.isfinite(space.free_bytes) else None,
            "needed_bytes": space.needed_bytes,
        },
        "throughput": forecast.throughput and forecast.throughput._asdict(),
        "communication_seconds_per_step": forecast.communication
        and forecast.communication._asdict(),
        "seconds_left": forecast.seconds_left,
        "price_per_device_hour": forecast.price_per_device_hour,
        "cost_left": forecast.cost_left,
        **({"larger_microbatch": larger.keys} if larger else {}),
    }


def fits(forecast: Forecast, compiled: CompiledStep | None = None) -> bool:
    """Return whether the run fits, preferring the compiled step to the estimate."""
    return forecast.disk.fits and _fits_memory(forecast, compiled)


def _fits_memory(forecast: Forecast, compiled: CompiledStep | None) -> bool:
    if compiled is None:
        return forecast.fits_memory
    found = compiled.result
    return not isinstance(found, str) and found.total <= forecast.usable_bytes


def table(
    heading: str,
    columns: Sequence[str],
    rows: Iterable[tuple[str, Sequence[str], str]],
    *,
    label: int,
    width: int,
) -> Iterator[str]:
    """Yield the lines of a table: the heading with the columns' names, then a label, cells and a
    note for each row. `label` and `width` are the characters of a label and of a cell."""
    names = "".join(f"{name:>{width}}" for name in columns)
    yield f"{heading}{names.lstrip():>{max(label + len(names) - len(heading), 0)}}".rstrip()
    for name, cells, note in rows:
        shown = "".join(f"{cell:>{width}}" for cell in cells)
        yield f"  {name:{label - 2}}{shown}  {note}".rstrip()


def title(forecast: Forecast, run: RunFolder) -> Iterator[str]:
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
    if forecast.stored is None:
        yield f"its start_from, {train.start_from}, isn't here"
    if train.uses_float8 and forecast.active.total < _FLOAT8_PAYS:
        yield "FP8 doesn't pay below about 1,000,000,000 parameters: matmul_dtype makes it slower"


def parameters(forecast: Forecast) -> Iterator[str]:
    """Yield the numbers of parameters by purpose."""
    counts, active = forecast.parameters, forecast.active
    shown = 1 if forecast.config.model.n_experts is None else 2
    rows = [
        (_GROUP_LABELS.get(name, name), (f"{count:,}", f"{used:,}")[:shown], "")
        for name, count, used in zip(counts._fields, counts, active, strict=True)
        if count or name not in _OPTIONAL_GROUPS
    ]
    rows.append(("total", (f"{counts.total:,}", f"{active.total:,}")[:shown], ""))
    columns = ("all", "active per token")[:shown]
    yield from table("parameters", columns, rows, label=14, width=18)


def _memory(forecast: Forecast) -> Iterator[str]:
    memory, notes = forecast.memory, dict(_MEMORY_NOTES)
    if forecast.config.train.uses_float8:
        notes["gathered"] += "; all layers' kernels in 8 bits"
    if forecast.config.train.lora and forecast.stored is None:
        notes["weights"] = COUNTED_AS_FLOAT32
    rows = [
        (MEMORY_LABELS.get(name, name), (format_bytes(size),), notes.get(name, ""))
        for name, size in memory.parts.items()
    ]
    share = memory.total / forecast.usable_bytes
    note = f"± {memory.error:.0%}; {share:.0%} of {_usable(forecast)}"
    rows.append(("peak", (format_bytes(memory.total),), note))
    heading = "memory" if forecast.devices == 1 else "memory per device"
    yield from table(heading, ("",), rows, label=14, width=18)


def _usable(forecast: Forecast) -> str:
    usable, hardware = format_bytes(forecast.usable_bytes), forecast.hardware
    if not hardware.is_preallocated:
        return usable
    return f"{usable}; {share_advice(format_bytes(hardware.memory_bytes))}"


def _passes(forecast: Forecast) -> dict[str, Passes]:
    """Return the FLOPs per token by part of the step, a teacher's included."""
    parts: dict[str, Passes] = forecast.flops._asdict()
    if forecast.teacher_flops_per_token:
        parts["teacher"] = Passes(forecast.teacher_flops_per_token, 0, 0)
    return parts


def _flops(forecast: Forecast) -> Iterator[str]:
    def row(name: str, passes: Passes) -> tuple[str, list[str], str]:
        return name, [f"{flops / 1e6:,.1f}" for flops in (*passes, passes.total)], ""

    parts = _passes(forecast)
    total = Passes(*map(sum, zip(*parts.values(), strict=True)))
    rows = [row(name, passes) for name, passes in (parts | {"total": total}).items()]
    model_flops = f"{forecast.model_flops_per_token / 1e6:,.1f}"
    rows.append(("model FLOPs", ["", "", "", model_flops], ""))
    columns = (*Passes._fields, "total")
    yield from table("MFLOPs per token", columns, rows, label=16, width=12)
    yield "  Utilization (MFU) is measured in model FLOPs: 6 × active weights in matmuls"
    yield "  + 12 × layers × heads × head width × sequence length."


def _tokens(forecast: Forecast) -> Iterator[str]:
    train, tokens = forecast.config.train, forecast.tokens
    length, per_parameter = forecast.config.sequence_length, forecast.tokens_per_parameter
    grows = bool(train.batch_growth)
    microbatches = f"{train.gradient_accumulation_steps:,} to " * grows
    step_tokens = f"{forecast.config.tokens_per_step:,} to " * grows
    kind = "answer" if train.objective == "kto" else "pair"
    pairs = f" ({counted(train.microbatch_size // 2, kind)})" * train.learns_preferences
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
        yield "run       all tokens of the dataset, whose number is not known yet; set"
        yield "          min_train_tokens or max_steps to plan for as many"
    else:
        steps = counted(tokens.steps or 0, "step") + f" × {tokens.per_step:,}" * (not grows)
        is_unknown = train.min_train_tokens == -1 and None in tokens.in_datasets.values()
        most = "at most " * is_unknown
        yield f"run       {most}{steps} = {counted(tokens.planned, 'token')}"
        if train.max_minutes is None and (shortage := train.shortage(tokens.steps or 0)):
            yield f"          {shortage}"
        yield f"          {per_parameter:.2f} per parameter"
    if train.max_minutes is not None:
        yield f"          an estimate for max_minutes {train.max_minutes:g}; the first steps decide"
    if train.start_from is None:  # which is about training from scratch
        yield f"          compute-optimal: {_optimal(forecast)}"
    for name, count in tokens.in_datasets.items():
        missing = f"not here yet; {build_command(name)}"
        read = tokens.of_datasets.get(name)
        epochs = f", {read:,} read, {read / count:.2f} epochs" if read is not None and count else ""
        share = f", {padding:.2%} padding" if (padding := tokens.padding.get(name)) else ""
        found = missing if count is None else counted(count, "token")
        yield f"dataset   {name}: {found}{epochs}{share}"
    if tokens.planned and not forecast.datasets:
        dtype = DTYPES[token_dtype(forecast.config.model.vocab_size)]
        size = format_bytes(dtype.itemsize * tokens.planned)
        yield f"          {size} of disk, if no token is read twice"


def _optimal(forecast: Forecast) -> str:
    """Return how many tokens suit the size, and what they take."""
    tokens = TOKENS_PER_PARAMETER * forecast.active.total
    line = f"{TOKENS_PER_PARAMETER} per parameter = {tokens:,} tokens"
    if forecast.throughput is None:
        return line
    seconds, per_hour = tokens / forecast.throughput.tokens_per_second, forecast.price_per_hour
    cost = "" if per_hour is None else f", cost {per_hour * seconds / 3600:,.2f}"
    return f"{line}, {format_duration(seconds)}{cost}"


def disk(forecast: Forecast) -> Iterator[str]:
    """Yield the disk space of the checkpoints."""
    space, is_known = forecast.disk, math.isfinite(forecast.disk.free_bytes)
    base = f" + {format_bytes(space.base_bytes)} under LoRA" if space.base_bytes else ""
    needed = f" × {space.checkpoints} at the same time{base} = {format_bytes(space.needed_bytes)}"
    total = "; all are kept" if space.checkpoints is None else needed
    yield f"disk      {format_bytes(space.checkpoint_bytes)} per checkpoint{total}"
    free = f"{format_bytes(space.free_bytes)} free"
    yield f"          {free if is_known else 'free space where it will run: not known'}"


def _time(forecast: Forecast) -> Iterator[str]:
    throughput, seconds = forecast.throughput, forecast.seconds_left
    if throughput is None:
        yield f"time      not known: {UNKNOWN_SPEED}"
    else:
        still = " left" * bool(forecast.tokens.done)
        left = "" if seconds is None else f"{format_duration(seconds)}{still} at "
        speed = f"{throughput.tokens_per_second:,.0f} tokens per second"
        yield f"time      {left}{speed} ({throughput.reason})"
        yield from _communication(forecast)
        yield from short_step(forecast, forecast.tokens.per_step / throughput.tokens_per_second)
        if forecast.tokens.done:
            yield f"          {forecast.tokens.done:,} tokens are already done"
        if forecast.speed is not None:
            yield f"          one hour is {3600 * forecast.speed.flops:.1e} FLOPs"
    per_hour, cost = forecast.price_per_hour, forecast.cost_left
    if per_hour is not None:
        unknown = "not known, as the time is not"
        if throughput is not None:
            unknown = "not known, as the number of tokens is not"
        shown = unknown if cost is None else f"{cost:,.2f}"
        hourly = f"an hour costs {per_hour:,.2f}"
        if throughput is not None:
            hourly += f" and trains {3600 * throughput.tokens_per_second:,.0f} tokens"
        yield f"cost      {shown}; {hourly}, without validation and checkpoints"


def short_step(forecast: Forecast, seconds: float) -> Iterator[str]:
    """Yield what to think of a step's time if it is short, unless it was measured."""
    if forecast.is_assumed and seconds < _SHORT_STEP_SECONDS:
        took = f"{1e3 * seconds:.2g} ms"
        yield f"          by its FLOPs a step takes {took}; such short ones take longer"


def _communication(forecast: Forecast) -> Iterator[str]:
    if forecast.uncounted:
        yield f"          communication is not counted: {forecast.uncounted}"
    if forecast.communication is not None:
        tensor, data = forecast.communication
        seconds = f"{tensor:.2g} s of activations, {data:.2g} s of weights and gradients"
        yield f"          communication per step: {seconds}, assuming links at their peak;"
        yield "          computing waits for activations and overlaps with the rest"


def _compiled(forecast: Forecast, step: CompiledStep) -> Iterator[str]:
    """Yield what the compiler says of a step, next to the estimate."""
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    yield f"compiled  in {format_duration(step.seconds)} by {versions}; nothing was run"
    memory, found = forecast.memory, step.result
    if isinstance(found, str):
        yield f"  the compiler says: {found}"
        return
    arguments = memory.weights + memory.moments + memory.batch
    note = "weights, optimizer state and token ids"
    pairs = [
        ("arguments", (arguments, found.arguments), note),
        ("temporary", (memory.total - arguments, found.temporary), "everything else"),
        ("peak", (memory.total, found.total), _accuracy(memory, found)),
    ]
    rows = [(name, [*map(format_bytes, sizes)], note) for name, sizes, note in pairs]
    columns = "estimate", "compiler"
    yield from table("  bytes per device", columns, rows, label=20, width=12)
    for part, makers in _kernels(forecast, found).items():
        yield f"  {part:18}by {', '.join(makers)}"
    yield f"  instructions repeated to save memory: {found.rematerialized:,}"


def _accuracy(memory: Memory, found: Compiled) -> str:
    ratio = memory.total / found.total
    verdict = "within" if abs(ratio - 1) <= memory.error else "outside"
    return f"the estimate is {ratio:.0%} of it: {verdict} the ± {memory.error:.0%} that it states"


def _kernels(forecast: Forecast, found: Compiled) -> dict[str, list[str]]:
    """Return the origins of the kernels by part of the model that the run has."""
    model = forecast.config.model
    has = {"attention": model.n_layers > 0, "experts": model.n_experts is not None, "loss": True}
    return {part: list(found.kernels.get(part, [XLA])) for part in KERNEL_PARTS if has[part]}


def _compiled_content(forecast: Forecast, step: CompiledStep) -> dict[str, Any]:
    is_enough = _fits_memory(forecast, step)
    figures = {"seconds": step.seconds, "versions": step.versions, "fits": is_enough}
    found = step.result
    if isinstance(found, str):
        return figures | {"out_of_memory": found}
    return figures | {
        "bytes_per_device": {
            "arguments": found.arguments,
            "temporary": found.temporary,
            "total": found.total,
            "estimate": forecast.memory.total,
        },
        "kernels": _kernels(forecast, found),
        "rematerialized_instructions": found.rematerialized,
    }


def _verdict(forecast: Forecast, compiled: CompiledStep | None) -> Iterator[str]:
    if fits(forecast, compiled):
        if larger := forecast.larger_microbatch():
            yield f"faster, with the same global batch: {larger}"
        elif larger := forecast.larger_step():
            sequences, needed = larger.keys["microbatch_size"], format_bytes(larger.memory.total)
            error = f"± {larger.memory.error:.0%}"
            yield f"there is memory for {sequences:,} sequences in a step ({needed} {error})"
        memory = forecast.memory
        if compiled is None and memory.total * (1 + memory.error) > forecast.usable_bytes:
            asks = "; --compile asks the compiler" * (forecast.hardware.name in TABLE["devices"])
            yield f"It fits, but not with the estimate's error added{asks}."
        else:
            yield "It fits."
        return
    if _fits_memory(forecast, compiled):
        yield "It fits into memory."
    else:
        yield "It does not fit into memory:"
        yield from forecast.remedies()
    if not forecast.disk.fits:
        yield f"Its checkpoints do not fit on the disk: {remedy(forecast.config.train)}"
