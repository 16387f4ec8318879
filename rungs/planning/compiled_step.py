"""A run's real step, traced without arrays, and compiled for devices that may be absent: what the
compiler says of its memory and its kernels. Of an entry's `compiler` in `devices.toml`, a GPU's
figures are as CUDA reports them, and its `kind` is what to tell JAX instead of its own; a TPU's are
in libtpu's terms, with the `dimensions` of the torus that connects the chips, `devices_per_chip`
and `chip_config`."""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding

from rungs.common.errors import UserError
from rungs.common.helper_process import process_executor
from rungs.common.shown_text import install_line
from rungs.config.run_config import RunConfig
from rungs.objectives.table import make_train_step
from rungs.parallel import sharding, target_device
from rungs.parallel.gpu_settings import gpu_options
from rungs.planning.hardware import DEVICES, TABLE, Hardware
from rungs.planning.program import kernels_of
from rungs.step.state import AbstractState

_ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # else the plugin looks for a driver
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the network where it is
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # else libtpu warns that it does not know; not used
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else only one process at a time may compile
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
_MODULES = {"gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "tpu": ("libtpu",)}
"""Modules that compile for a platform; any one suffices."""
_DISTRIBUTIONS = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}
"""Distributions that compile for a platform."""
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
"""Extras that install them."""
_CUDA = "13.0.0"
"""CUDA version to compile for. Without one XLA has no FP8 matmuls."""
_CHIPS_PER_HOST = 4
_OUT_OF_MEMORY = re.compile(r"Ran out of memory[^\n]*?(?=\.\s|\.?\n|\.?$)")


class Compiled(NamedTuple):
    """A compiled step as described by its compiler; bytes are per device."""

    arguments: int
    """Weights, optimizer state and token ids."""
    temporary: int
    """Bytes of everything else, at the peak."""
    kernels: dict[str, dict[str, int]]
    """As `program.kernels_of` returns them."""
    rematerialized: int
    """Instructions that the compiler repeats to save memory."""
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


def prepare() -> None:
    """Let the compilers work without their devices. Call before JAX looks for devices."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_apart(config: RunConfig, hardware: Hardware) -> CompiledStep:
    """Like `compile_step`, in a process of its own, with which a compiler may crash. Raises
    UserError then, too."""
    with process_executor() as compiler:
        try:
            return compiler.submit(compile_step, config, hardware).result()
        except BrokenProcessPool as error:
            if error.__cause__ is not None:  # an exception that can't be sent from there
                raise
            raise UserError(
                f"--compile: the compiler for {hardware.name} crashed, or the system ended it for"
                f" lack of memory ({_versions(hardware)}); try another version, number of devices"
                " or microbatch_size"
            ) from None


def compile_step(config: RunConfig, hardware: Hardware) -> CompiledStep:
    """Compile a run's step. Raises UserError if there is no compiler for the hardware, or it fails.
    `config` must have a resolved compute dtype and sharding sizes."""
    train = config.train
    assert train.sharding is not None
    sizes = train.sharding.sizes
    mesh = sharding.create_mesh(sizes, train.sharding.axes, devices(hardware, math.prod(sizes)))
    with target_device.trace_for(hardware.target, is_compiled=True):
        lowered = lower_step(config, mesh)
    # Autotuning stays on, although no kernel can be timed, as with xla_gpu_autotune_level 0
    # jax 0.11 finds no kernel for some matmuls.
    flags = gpu_options(train.microbatches_per_step, train.uses_float8)
    begin = time.perf_counter()
    result = _compile(lowered, hardware, flags if hardware.platform == "gpu" else {})
    return CompiledStep(time.perf_counter() - begin, _versions(hardware), result)


def lower_step(config: RunConfig, mesh: Mesh) -> Any:
    """Return a run's largest step, traced without arrays, as a `jax.stages.Lowered`."""
    return trace_step(config, mesh).lower()


def trace_step(config: RunConfig, mesh: Mesh) -> Any:
    """Return a run's largest step as a `jax.stages.Traced`; the mesh may be abstract."""
    train = config.train
    state = AbstractState(config, 1, mesh)
    model, optimizer = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
    place = NamedSharding(mesh, sharding.Layout(mesh).batch_spec(3))
    shape = train.microbatches_per_step, train.microbatch_size, config.sequence_length
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    step: Any = make_train_step(train, mesh)
    starts = batch if train.documents == "separate" else None
    return step.trace(model, optimizer, batch, batch, starts)


def equations(traced: Any) -> Iterator[tuple[Any, int, str]]:
    """Yield the equations of a traced step that its results depend on, each with how often it runs
    and its named scopes. Each branch of a conditional counts as if it ran."""

    def inside(jaxpr: Any, runs: int, scopes: str) -> Iterator[tuple[Any, int, str]]:
        for one in jaxpr.eqns:
            own = f"{scopes}/{one.source_info.name_stack}"
            yield one, runs, own
            times = runs * one.params["length"] if one.primitive.name == "scan" else runs
            for inner in jaxprs_in_params(one.params):
                yield from inside(inner, times, own)

    jaxpr, _ = dce_jaxpr(traced.traced.jaxpr.jaxpr, used_outputs=True)
    return inside(jaxpr, 1, "")


def _compile(lowered: Any, hardware: Hardware, options: dict[str, Any]) -> Compiled | str:
    try:
        program = lowered.compile(options).compiled
    except jax.errors.JaxRuntimeError as error:
        if found := _OUT_OF_MEMORY.search(str(error)):
            return found[0]
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--compile: the compiler for {hardware.name} says: {reason}") from None
    text, arguments = program.as_text() or "", program.memory_analysis().argument_size_in_bytes
    temporary = needed_bytes(program, hardware.platform) - arguments
    repeated = len(re.findall(r"^\s*(?:ROOT )?%?[\w-]*\.remat[\w.-]* = ", text, re.MULTILINE))
    return Compiled(arguments, temporary, kernels_of(text), repeated, text)


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
    for name in ("jax", *_DISTRIBUTIONS[hardware.platform]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def devices(hardware: Hardware, count: int) -> list[Any]:
    """Return `jax.Device`s to compile for. Raises UserError if the compiler is not installed or
    doesn't know the device."""
    if hardware.name not in TABLE["devices"]:
        known = ", ".join(device.name for device in DEVICES)
        raise UserError(f"--compile: no compiler knows {hardware.name}; choose from {known}")
    if not is_installed(hardware):
        raise UserError(
            f"--compile: the compiler for {hardware.name} is not installed; run:"
            f" {install_line(_EXTRAS[hardware.platform])}"
        )
    return _gpus(hardware, count) if hardware.platform == "gpu" else _tpus(hardware, count)


def is_installed(hardware: Hardware) -> bool:
    """Return whether the compiler for a device is installed."""
    for module in _MODULES[hardware.platform]:
        with contextlib.suppress(ModuleNotFoundError):  # the parent package is missing
            if importlib.util.find_spec(module):
                return True
    return False


def _gpus(hardware: Hardware, count: int) -> list[Any]:
    from jax.experimental import topologies

    host = hardware.links.island if hardware.links else count
    found = topologies.get_topology_desc(
        hardware.name,
        "cuda",
        target_config=gpu_description(hardware),
        topology=f"1x{-(-count // host)}x{min(count, host)}",
    )
    return list(found.devices[:count])


def gpu_description(hardware: Hardware) -> str:
    """Return XLA's `GpuTargetConfigProto` of a GPU, as text."""
    major, minor = hardware.compute_capability.split(".")
    figures = {
        **TABLE["multiprocessors"][hardware.compute_capability],
        "kind": hardware.jax_kinds[0],
        **TABLE["devices"][hardware.name]["compiler"],
        "bandwidth": f"{hardware.bandwidth:.0f}",
        "memory_bytes": f"{hardware.memory_bytes:.0f}",
        "features": "feature_extension: ACCELERATED_FEATURES" * (int(major) >= 9),
    }
    template = Template(Path(__file__).with_name("gpu.textproto").read_text("utf-8"))
    return template.substitute(figures, cuda=_CUDA, major=major, minor=minor)


def _tpus(hardware: Hardware, count: int) -> list[Any]:
    from jax.experimental import topologies

    tpu = TABLE["devices"][hardware.name]["compiler"]
    chips = torus(-(-count // tpu.get("devices_per_chip", 1)), tpu["dimensions"])
    found = topologies.get_topology_desc(
        f"{tpu['name']}:{'x'.join(map(str, chips))}",
        "tpu",
        chip_config_name=tpu.get("chip_config", "default"),
        chips_per_host_bounds=_host(chips),
    )
    return list(found.devices[:count])


def torus(chips: int, dimensions: int) -> tuple[int, ...]:
    """Return the sides of the smallest torus with this many chips, powers of two as equal as
    possible, shortest first."""
    sides = [1] * dimensions
    for number in range(max(chips - 1, 0).bit_length()):
        sides[-1 - number % dimensions] *= 2
    return tuple(sides)


def _host(chips: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sides of one host's part of a torus."""
    sides, left = [1, 1, 1], _CHIPS_PER_HOST
    for axis in reversed(range(len(chips))):
        sides[axis] = min(chips[axis], 2, left)
        left //= sides[axis]
    return sides[0], sides[1], sides[2]
