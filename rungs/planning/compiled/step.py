"""A run's real step compiled for devices that may be absent: the compiler's figures, kernels."""

import contextlib
import importlib.metadata
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rungs.common.errors import UserError
from rungs.common.helper_process import process_executor
from rungs.config.run_config import RunConfig
from rungs.objectives.table import make_train_step
from rungs.parallel import sharding, target_device
from rungs.planning.compiled import collectives, hlo, targets
from rungs.planning.hardware import Hardware
from rungs.step.state import AbstractState

_COMPILERS = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}
"""Distributions that compile for a platform."""
_OUT_OF_MEMORY = re.compile(r"Ran out of memory[^\n]*?(?=\.\s|\.?\n|\.?$)")
KERNEL_PARTS = "attention", "experts", "loss"
"""Parts of the model with kernels, as `jax.named_scope`s, which XLA keeps in operation names."""
XLA = "XLA"
"""Name shown for a part without kernels."""
_MAKERS = {
    "__cudnn$fmha": "cuDNN",
    "__gpu$xla.gpu.triton": "Pallas for Triton",
    "tpu_custom_call": "Pallas for Mosaic",
}
"""Origin of a kernel by the prefix of its custom call's target."""
_SPILL = re.compile(r"Registers are spilled to local memory in function '([^']+)'")


class Kernels(NamedTuple):
    """Kernels of a compiled step, and the compiler's remedies for lack of memory or registers."""

    calls: dict[str, dict[str, int]]
    """Calls in the program's text by part of the model and origin; parts without any are absent."""
    rematerialized: int
    """Instructions that the compiler repeats to save memory."""
    spilled: list[str]
    """GPU kernels that spill registers to memory."""


class Compiled(NamedTuple):
    """A compiled step as described by its compiler; bytes are per device."""

    arguments: int
    """Weights, optimizer state and token ids."""
    temporary: int
    """Bytes of everything else, at the peak."""
    traffic: list[collectives.Traffic]
    """Collectives with this device."""
    uncounted: str
    """Why `traffic` is unknown, else empty."""
    kernels: Kernels
    program: str
    """HLO text."""

    @property
    def total(self) -> int:
        return self.arguments + self.temporary


class CompiledStep(NamedTuple):
    """A step as compiled, or why it does not fit."""

    seconds: float
    """Seconds of compilation."""
    versions: dict[str, str]
    """Versions of JAX and of the compiler."""
    result: Compiled | str
    """The compiled step, or the compiler's message if it needs more memory than the device has."""


def compile_apart(config: RunConfig, hardware: Hardware) -> CompiledStep:
    """Like `compile_step`, in a process of its own, with which a compiler may crash. Raises
    UserError then, too."""
    with process_executor() as compiler:
        try:
            return compiler.submit(compile_step, config, hardware).result()
        except BrokenProcessPool as error:
            if error.__cause__ is not None:  # an exception that can't be sent from there
                raise
            versions = ", ".join(
                f"{name} {version}" for name, version in _versions(hardware).items()
            )
            raise UserError(
                f"--compile: the compiler for {hardware.name} crashed, or the system ended it for"
                f" lack of memory ({versions}); try another version, number of devices or"
                " microbatch_size"
            ) from None


def compile_step(config: RunConfig, hardware: Hardware) -> CompiledStep:
    """Compile a run's step. Raises UserError if there is no compiler for the hardware, or it fails.
    `config` must have a resolved compute dtype and sharding sizes."""
    assert config.train.sharding is not None
    sizes, axes = config.train.sharding.sizes, config.train.sharding.axes
    mesh = sharding.create_mesh(sizes, axes, targets.devices(hardware, math.prod(sizes)))
    with target_device.trace_for(hardware.target, is_compiled=True):
        lowered = lower_step(config, mesh)
    train = config.train
    microbatches, float8 = train.microbatches_per_step, train.uses_float8
    options = targets.options(hardware.platform, microbatches, float8)
    begin = time.perf_counter()
    result = _compile(lowered, mesh, hardware, options)
    return CompiledStep(time.perf_counter() - begin, _versions(hardware), result)


def lower_step(config: RunConfig, mesh: Mesh) -> Any:
    """Return a run's largest step, traced without arrays, as a `jax.stages.Lowered`."""
    train = config.train
    state = AbstractState(config, 1, mesh)
    model, optimizer = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
    place = NamedSharding(mesh, sharding.Layout(mesh).batch_spec(3))
    shape = train.microbatches_per_step, train.microbatch_size, config.sequence_length
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    step: Any = make_train_step(train, mesh)
    starts = batch if train.documents == "separate" else None
    return step.lower(model, optimizer, batch, batch, starts)


def _compile(
    lowered: Any, mesh: Mesh, hardware: Hardware, options: dict[str, Any]
) -> Compiled | str:
    with captured_stderr() as log:
        try:
            program = lowered.compile(options).compiled
        except jax.errors.JaxRuntimeError as error:
            if found := _OUT_OF_MEMORY.search(str(error)):
                return found[0]
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--compile: the compiler for {hardware.name} says: {reason}") from None
    text, memory = program.as_text() or "", program.memory_analysis()
    module = hlo.Module.parse(text)
    try:
        traffic, uncounted = collectives.summary(collectives.overlaps(module), mesh), ""
    except ValueError as error:
        traffic, uncounted = [], str(error)
    return Compiled(
        memory.argument_size_in_bytes,
        needed_bytes(program, hardware.platform) - memory.argument_size_in_bytes,
        traffic,
        uncounted,
        kernels_of(module, log),
        text,
    )


def needed_bytes(program: Any, platform: str) -> int:
    """Return the bytes per device that a compiled program, a `jax.stages.Compiled`, needs. On a TPU
    this is the peak, which the compiler checks against the device's memory; the sum of the arrays
    may be larger. Elsewhere XLA allocates all temporary arrays at once, besides arguments and
    results that do not reuse an argument's memory. `platform` is cpu, gpu or tpu."""
    memory = program.memory_analysis()
    if platform == "tpu":
        return int(memory.peak_memory_in_bytes)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def _versions(hardware: Hardware) -> dict[str, str]:
    found = {}
    for name in ("jax", *_COMPILERS[hardware.platform]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_kernel(target: str) -> bool:
    """Return whether a custom call's target is a kernel, whose FLOPs XLA does not know."""
    return target.startswith(tuple(_MAKERS))


def kernels_of(program: hlo.Program, log: list[str]) -> Kernels:
    """Return the kernels of a compiled step, with the compiler's log."""
    instructions = list(hlo.Module.parse(program).instructions())
    calls: dict[str, Counter[str]] = {}
    for call in filter(lambda one: is_kernel(one.target), instructions):
        maker = next(name for start, name in _MAKERS.items() if call.target.startswith(start))
        scopes = set(re.findall(r"\w+", call.op_name))
        if part := next((part for part in KERNEL_PARTS if part in scopes), None):
            calls.setdefault(part, Counter())[maker] += 1
    return Kernels(
        {part: dict(counts) for part, counts in calls.items()},
        sum(".remat" in one.name for one in instructions),
        sorted(set(_SPILL.findall("".join(log)))),
    )


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Yield a list that receives the lines that C++ code writes to stderr in this context."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            lines += log.readlines()
