"""Device check: are this machine's results correct, and as fast as they should be? All parts, in
order; the description of the machine; and the speed of its devices, all at once: matmuls, memory,
links. Works on any device; a CPU has no published figures. Axes: D devices, N rows or columns."""

import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rungs.checks import device_step as step
from rungs.checks import kernels
from rungs.checks.check import Check, Unit, failures, print_checks
from rungs.common.errors import errors_at, readable_line, reason
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.optim.precision import resolve_compute_dtype
from rungs.parallel import devices, jax_setup
from rungs.planning.advice import report_out_of_memory
from rungs.planning.hardware import Hardware, device_of_kind
from rungs.step.state import copy_bytes

_LIBRARIES = re.compile(
    r"jax|flax|optax|orbax-checkpoint|numpy|jaxlib|libtpu|jax-cuda1\d-plugin"
    r"|nvidia-(cudnn|nccl|cublas)\b.*"
)
_SETTINGS = re.compile(r"(XLA|JAX|NCCL|TPU|LIBTPU|CUDA)_\w+|LD_LIBRARY_PATH")
"""Environment variables that affect compilation or communication."""
LEAST_SHARE = 0.4
"""Share of a published figure below which something is wrong. An H200 reached 64% to 85%."""
_FAST_DTYPES = {"gpu": ("bfloat16", "float16"), "tpu": ("bfloat16",)}
_SIZES = {"cpu": 1024}
_OTHER_SIZE = 8192
"""N of the square matrices, by platform."""
_CPU_BYTES, _BYTES = 2**28, 2**30
"""Bytes read and written, on a CPU by all devices together, else by each: far more than caches."""
_SHIFTED_SHARE = 1 / 4
"""Share of that array that is sent over links."""
_LEAST_SECONDS = 0.2
"""Duration of one measurement, much longer than starting a program."""
_REPEATS = 3
_AXIS = "devices"

Rounds = Callable[..., Any]
"""A compiled function of arrays and a number of rounds."""


def run_check(path: Path, config: RunConfig, folder: Path) -> bool:
    """Check the devices that a run would use, printing each figure as soon as it is known. Return
    whether nothing is wrong. Nothing is written to the run folder `path`; checkpoints are
    temporarily in `folder`. Raises UserError if the run does not fit the devices."""
    jax_setup.prepare(config.train, partial(copy_bytes, config))
    with errors_at(f"{path}: ", ValueError):
        mesh = devices.create_run_mesh(config.train, config.model, None)
    jax_setup.settle(mesh.devices.flat[0].platform)
    return not failures(print_checks(_checks(on_mesh(config, mesh), mesh, folder)))


def on_mesh(config: RunConfig, mesh: Mesh) -> RunConfig:
    """Fill in the compute dtype and the sizes of the sharding."""
    train = resolve_compute_dtype(config.train)
    sharding: ShardingConfig = devices.recorded_sharding(train, mesh)
    return config._replace(train=train.model_copy(update={"sharding": sharding}))


def _checks(config: RunConfig, mesh: Mesh, folder: Path) -> Iterator[Check]:
    """Yield the checks of all parts, the step first, as devices report their peak memory."""
    yield from _or_failure("machine", lambda: machine(mesh))
    timed: list[step.StepTime] = []
    yield from _or_failure("step", lambda: _of_step(config, mesh, folder, timed))
    yield from _or_failure("step taken twice", partial(step.determinism, config, mesh))
    yield from _or_failure("speed", lambda: _of_speed(config, mesh, timed))
    yield from _or_failure("kernels", lambda: kernels.checks(step.dtypes(config)))


def _of_step(
    config: RunConfig, mesh: Mesh, folder: Path, timed: list[step.StepTime]
) -> Iterator[Check]:
    """Yield the checks of the step and its checkpoint."""
    with report_out_of_memory(config, mesh):
        running = step.RunningStep.create(config, mesh)
        timed.append(step.StepTime(running))
    yield from timed[0].checks(running)
    yield from step.memory(running)
    yield from _or_failure("checkpoint", lambda: step.checkpoint(running, folder))
    step.release(running)


def _of_speed(config: RunConfig, mesh: Mesh, timed: list[step.StepTime]) -> Iterator[Check]:
    """Yield the speeds, and how much of them the step reaches."""
    dtypes, hardware = step.dtypes(config), device_of_kind(mesh.devices.flat[0].device_kind)
    found = {}
    for check in speeds(mesh, dtypes, hardware):
        found[check.name] = check.value
        yield check
    if timed:
        fastest = f"matmul {dtypes[-1]}"
        share = timed[0].model_flops / float(found[fastest])
        note = f"model FLOPs utilization (MFU) of {fastest}"
        yield Check("share of peak in a step", share, notes=(note,), unit="share")


def _or_failure(part: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield checks, then one with the reason if they end with an error, so others can follow."""
    try:
        yield from checks()
    except Exception as error:  # of a compiler, a driver or a disk
        yield Check(part, "error", passed=False, notes=(readable_line(reason(error)),))


def machine(mesh: Mesh) -> Iterator[Check]:
    """Yield devices, driver, libraries and settings, for bug reports."""
    device, driver = mesh.devices.flat[0], nvidia_driver()
    is_unused = (
        driver and device.platform == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", "")
    )
    notes = ("it has an NVIDIA GPU: run with the extra cuda",) if is_unused else ()
    shown = f"{mesh.size} × {device.device_kind}"
    yield Check("devices", shown, passed=False if is_unused else None, notes=notes)
    read = {
        "compute capability": str(getattr(device, "compute_capability", "")),
        "NVIDIA driver": driver,
        "runtime": " ".join(device.client.platform_version.split()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        **installed(),
        **{name: os.environ[name] for name in sorted(filter(_SETTINGS.fullmatch, os.environ))},
    }
    yield from (Check(name, value) for name, value in read.items() if value)


def nvidia_driver() -> str:
    """Return the driver's version; empty if there is no NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if shown.returncode else shown.stdout.partition("\n")[0]


def installed() -> dict[str, str]:
    """Return the versions of the libraries used for training, by distribution."""
    found = {
        one.name.lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
    }
    return {name: found[name] for name in sorted(filter(_LIBRARIES.fullmatch, found))}


def speeds(mesh: Mesh, used: list[str], hardware: Hardware | None) -> Iterator[Check]:
    """Yield the speeds of each device while all are busy, with matmuls in the dtypes `used` and in
    those that are fast on the platform. `hardware` has the published figures, if known."""
    for dtype in dict.fromkeys([*used, *_FAST_DTYPES.get(_platform(mesh), ())]):
        published = hardware and hardware.peak(np.dtype(jnp.dtype(dtype)))
        yield _compared(f"matmul {dtype}", matmul_flops(mesh, dtype), "FLOP/s", published)
    published = hardware and hardware.bandwidth
    yield _compared("memory bandwidth", memory_bandwidth(mesh), "B/s", published)
    if mesh.size > 1:
        links = hardware and hardware.links
        notes = (f"published: {links.inner / 1e9:,.4g} GB/s in one direction",) if links else ()
        yield Check("device to next device", link_bandwidth(mesh), notes=notes, unit="B/s")


def _compared(name: str, value: float, unit: Unit, published: float | None) -> Check:
    if not published:
        return Check(name, value, unit=unit)
    share = value / published
    notes = [f"is {share:.0%}"]
    if share < LEAST_SHARE:
        notes.append("is the device shared, hot or throttled?")
    limit = f"at least {LEAST_SHARE:.0%} of published"
    return Check(name, value, limit, share >= LEAST_SHARE, tuple(notes), unit)


def matmul_flops(mesh: Mesh, dtype: str) -> float:
    """Return the FLOP/s of one device in large matmuls, at XLA's default precision."""
    size = _SIZES.get(_platform(mesh), _OTHER_SIZE)
    rng = np.random.default_rng(0)
    x_NN, kernel_NN = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    kernel_NN /= math.sqrt(size)  # keeps the size of x over many rounds

    def multiply(x_NN: Array, kernel_NN: Array) -> Array:
        return (x_NN @ kernel_NN).astype(x_NN.dtype)

    arrays = (_on_each(mesh, array.astype(jnp.dtype(dtype))) for array in (x_NN, kernel_NN))
    return 2 * size**3 / _seconds_per_round(_rounds(mesh, multiply), *arrays)


def memory_bandwidth(mesh: Mesh) -> float:
    """Return the bytes per second that one device reads and writes."""
    array = _on_each(mesh, np.zeros(_array_bytes(mesh) // 4, np.float32))
    seconds = _seconds_per_round(_rounds(mesh, lambda x: x + 1), array)
    return 2 * _array_bytes(mesh) / seconds


def link_bandwidth(mesh: Mesh) -> float:
    """Return the bytes per second that a device sends to the next while receiving as much."""
    count = int(_array_bytes(mesh) * _SHIFTED_SHARE) // 4
    ring = [(device, (device + 1) % mesh.size) for device in range(mesh.size)]
    shift = partial(jax.lax.ppermute, axis_name=_AXIS, perm=ring)
    array = _on_each(mesh, np.zeros(count, np.float32))
    return 4 * count / _seconds_per_round(_rounds(mesh, shift), array)


def _rounds(mesh: Mesh, change: Callable[..., Array]) -> Rounds:
    """Return a program in which each device repeatedly changes its part of the first array."""

    def on_each_device(count: Array, x: Array, *others: Array) -> Array:
        own = [other[0] for other in others]
        return jax.lax.fori_loop(0, count, lambda _, x: change(x[0], *own)[None], x)

    ring, each = _ring(mesh), PartitionSpec(_AXIS)

    def program(count: Array, *arrays: Array) -> Array:
        specs = (PartitionSpec(), *[each] * len(arrays))
        run = jax.shard_map(on_each_device, mesh=ring, in_specs=specs, out_specs=each)
        return run(count, *arrays)

    return jax.jit(program)


def _seconds_per_round(program: Rounds, *arrays: Array) -> float:
    """Return the shortest time of a round, over enough rounds to measure it."""
    rounds = 1
    _timed(program, rounds, *arrays)  # compiles
    while (seconds := _timed(program, rounds, *arrays)) < _LEAST_SECONDS:
        rounds *= math.ceil(min(1.5 * _LEAST_SECONDS / seconds, 10))
    again = (_timed(program, rounds, *arrays) for _ in range(_REPEATS - 1))
    return min(seconds, *again) / rounds


def _timed(program: Rounds, rounds: int, *arrays: Array) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(jnp.int32(rounds), *arrays))
    return time.perf_counter() - begin


def _on_each(mesh: Mesh, array: np.ndarray) -> Array:
    """Return an array with a copy on each device: array_D…."""
    placed = NamedSharding(_ring(mesh), PartitionSpec(_AXIS))
    shape = (mesh.size, *array.shape)
    return jax.make_array_from_callback(shape, placed, lambda _: array[None])


def _ring(mesh: Mesh) -> Mesh:
    """Return a one-dimensional mesh of the devices."""
    return Mesh(mesh.devices.reshape(-1), (_AXIS,), axis_types=(AxisType.Auto,))


def _array_bytes(mesh: Mesh) -> int:
    return _CPU_BYTES // mesh.size if _platform(mesh) == "cpu" else _BYTES


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
