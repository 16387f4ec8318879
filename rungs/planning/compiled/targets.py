"""Descriptions of absent devices for the installed compilers of XLA, for NVIDIA GPUs and TPUs. To
add a device, add it to `planning/devices.toml`. Of an entry's `compiler`, a GPU's figures are as
CUDA reports them, and its `kind` is what to tell JAX instead of its own. A TPU is in libtpu's
terms: `dimensions` of the torus that connects the chips, `devices_per_chip` and `chip_config`."""

import contextlib
import importlib.util
import os
from pathlib import Path
from string import Template
from typing import Any

from rungs.common.errors import UserError
from rungs.parallel.gpu_settings import FlagValue, gpu_options
from rungs.planning.hardware import DEVICES, TABLE, Hardware

_ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # else the plugin looks for a driver
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the network where it is
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # else libtpu warns that it does not know; not used
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else only one process at a time may compile
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
_COMPILERS = {"gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "tpu": ("libtpu",)}
"""Modules that compile for a platform; any one suffices."""
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
"""Extras that install them."""
_CUDA = "13.0.0"
"""CUDA version to compile for. Without one XLA has no FP8 matmuls."""
_CHIPS_PER_HOST = 4


def prepare() -> None:
    """Let the compilers work without their devices. Call before JAX starts."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def options(platform: str, microbatches: int, float8: bool = False) -> dict[str, FlagValue]:
    """Return options of `jax.stages.Lowered.compile`: on a GPU, the flags of training. Autotuning
    stays on, although no kernel can be timed, as with `xla_gpu_autotune_level` 0 jax 0.11 finds no
    kernel for some matmuls."""
    return gpu_options(microbatches, float8) if platform == "gpu" else {}


def devices(hardware: Hardware, count: int) -> list[Any]:
    """Return `jax.Device`s to compile for. Raises UserError if the compiler is not installed or
    doesn't know the device."""
    if hardware.name not in TABLE["devices"]:
        known = ", ".join(device.name for device in DEVICES)
        raise UserError(f"--compile: no compiler knows {hardware.name}; choose from {known}")
    if not is_installed(hardware):
        raise UserError(
            f"--compile: the compiler for {hardware.name} is not installed; run:"
            f" uv sync --extra {_EXTRAS[hardware.platform]}"
        )
    return _gpus(hardware, count) if hardware.platform == "gpu" else _tpus(hardware, count)


def is_installed(hardware: Hardware) -> bool:
    """Return whether the compiler for a device is installed."""
    for module in _COMPILERS[hardware.platform]:
        with contextlib.suppress(ModuleNotFoundError):  # the parent package is missing
            if importlib.util.find_spec(module):
                return True
    return False


def _gpus(hardware: Hardware, count: int) -> list[Any]:
    from jax.experimental import topologies

    host = hardware.links.island if hardware.links else count
    hosts, in_host = -(-count // host), min(count, host)
    found = topologies.get_topology_desc(
        hardware.name,
        "cuda",
        target_config=gpu_description(hardware),
        topology=f"1x{hosts}x{in_host}",
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
    doublings = max(chips - 1, 0).bit_length()
    sides = [1] * dimensions
    for number in range(doublings):
        sides[-1 - number % dimensions] *= 2
    return tuple(sides)


def _host(chips: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sides of one host's part of a torus."""
    sides, left = [1, 1, 1], _CHIPS_PER_HOST
    for axis in reversed(range(len(chips))):
        sides[axis] = min(chips[axis], 2, left)
        left //= sides[axis]
    return sides[0], sides[1], sides[2]
