"""Device check: are this machine's results correct, and as fast as they should be? All parts, in
order, and the description of the machine. Works on any device; a CPU has no published figures."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from rungs.checks import device_speed as speed
from rungs.checks import device_step as step
from rungs.checks import kernels
from rungs.checks.check import Check, failures, print_checks
from rungs.common.errors import errors_at, readable_line, reason
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.optim.precision import resolve_compute_dtype
from rungs.parallel import devices, jax_setup
from rungs.planning.advice import report_out_of_memory
from rungs.planning.hardware import device_of_kind
from rungs.step.state import copy_bytes

FORMAT = 2
"""Version of the JSON format, increased with each incompatible change."""
OLDEST_DRIVERS = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}
"""Minimum major driver version of CUDA: https://docs.jax.dev/en/latest/installation.html."""
_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
_DEVICE_LIBRARIES = re.compile(r"jaxlib|libtpu|jax-cuda1\d-plugin|nvidia-(cudnn|nccl|cublas)\b.*")
_SETTINGS = re.compile(r"(XLA|JAX|NCCL|TPU|LIBTPU|CUDA)_\w+|LD_LIBRARY_PATH")
"""Environment variables that affect compilation or communication."""


class Report(NamedTuple):
    """All figures of a device check."""

    run: str
    created: str
    """UTC, ISO 8601."""
    seconds: float
    """Duration of the check."""
    checks: Sequence[Check]

    def as_json(self) -> str:
        """Return all figures in base units: bytes, seconds, FLOP/s."""
        problems = [" ".join(str(one).split()) for one in failures(self.checks)]
        content = {"format": FORMAT, "problems": problems, **self._asdict()}
        content["checks"] = [one._asdict() for one in self.checks]
        return json.dumps(content, indent=2) + "\n"


def run_check(path: Path, config: RunConfig, folder: Path) -> Report:
    """Check the devices that a run would use, printing each figure as soon as it is known. Nothing
    is written to the run folder `path`; checkpoints are temporarily in `folder`. Raises UserError
    if the run does not fit the devices."""
    jax_setup.prepare(config.train, partial(copy_bytes, config))
    with errors_at(f"{path}: ", ValueError):
        mesh = devices.create_run_mesh(config.train, config.model, None)
    jax_setup.settle(mesh.devices.flat[0].platform)
    begin = time.perf_counter()
    checks = print_checks(_checks(on_mesh(config, mesh), mesh, folder))
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(str(path), created, time.perf_counter() - begin, checks)


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
    for check in speed.checks(mesh, dtypes, hardware):
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
    """Return the versions of the libraries used for training, by distribution."""
    found = {
        one.name.lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
    }
    names = [name for name in found if _DEVICE_LIBRARIES.fullmatch(name)]
    return {name: found[name] for name in (*_LIBRARIES, *sorted(names)) if name in found}


def _read(name: str, value: str, problem: str = "") -> Check:
    return Check(name, value, passed=False, notes=(problem,)) if problem else Check(name, value)


def _unused_gpu(used: str, driver: str) -> str:
    if not driver or used != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return ""
    return "this machine has an NVIDIA GPU, but JAX uses the CPU: run with the extra cuda"


def _old_driver(driver: str, libraries: dict[str, str]) -> str:
    """Return why a driver is too old for the installed CUDA, or an empty text."""
    major = re.match(r"\d+", driver)
    for plugin, oldest in OLDEST_DRIVERS.items():
        if plugin in libraries and major and int(major[0]) < oldest:
            return f"driver {driver} is too old for {plugin}, which needs {oldest} or newer"
    return ""
