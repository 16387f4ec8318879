"""Devices, driver, libraries and settings: what a bug report needs."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

from jax.sharding import Mesh

from rungs.diagnostics.device_check.report import Figure

PART = "device"
OLDEST_DRIVERS = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}
"""By CUDA's plugin: https://docs.jax.dev/en/latest/installation.html."""
_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
_DEVICE_LIBRARIES = re.compile(r"jaxlib|libtpu|jax-cuda1\d-plugin|nvidia-(cudnn|nccl|cublas)\b.*")
_SETTINGS = re.compile(r"(XLA|JAX|NCCL|TPU|LIBTPU|CUDA)_\w+|LD_LIBRARY_PATH")
"""Environment variables that change what is compiled or how devices talk."""


def figures(mesh: Mesh) -> Iterator[Figure]:
    """Yield what the run would use."""
    device = mesh.devices.flat[0]
    driver, libraries = nvidia_driver(), installed()
    names = f"{mesh.size} × {device.device_kind}"
    yield _read("devices", names, problem=_unused_gpu(device.platform, driver))
    if capability := getattr(device, "compute_capability", None):
        yield _read("compute capability", str(capability))
    if driver:
        yield _read("NVIDIA driver", driver, problem=_old_driver(driver, libraries))
    runtime = " ".join(device.client.platform_version.split())
    yield _read("runtime", runtime)
    yield _read("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield _read("Python", platform.python_version())
    for name, version in libraries.items():
        yield _read(name, version)
    for name in sorted(filter(_SETTINGS.fullmatch, os.environ)):
        yield _read(name, os.environ[name])


def nvidia_driver() -> str:
    """Return the driver's version; empty if there is no NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    found = re.search(r"Driver Version\s*:\s*([\d.]+)", shown.stdout)
    return found[1] if found and shown.returncode == 0 else ""


def installed() -> dict[str, str]:
    """Return the versions of what trains, by distribution."""
    found = {
        one.name.lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
    }
    names = [name for name in found if _DEVICE_LIBRARIES.fullmatch(name)]
    return {name: found[name] for name in (*_LIBRARIES, *sorted(names)) if name in found}


def _read(name: str, value: str, problem: str = "") -> Figure:
    return Figure(PART, name, value, source="read", problem=problem)


def _unused_gpu(used: str, driver: str) -> str:
    if not driver or used != "cpu" or _is_cpu_requested():
        return ""
    return "this machine has an NVIDIA GPU, but JAX uses the CPU: run with the extra cuda"


def _is_cpu_requested() -> bool:
    return "cpu" in os.environ.get("JAX_PLATFORMS", "")


def _old_driver(driver: str, libraries: dict[str, str]) -> str:
    """Return what is wrong with a driver for the CUDA that is installed."""
    major = re.match(r"\d+", driver)
    for plugin, oldest in OLDEST_DRIVERS.items():
        if plugin in libraries and major and int(major[0]) < oldest:
            return f"driver {driver} is too old for {plugin}, which needs {oldest} or newer"
    return ""
