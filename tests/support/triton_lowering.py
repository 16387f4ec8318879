"""Lets jax 0.11 lower Triton kernels where there is no GPU, as jax 0.10 does unasked."""

import importlib


def allow_on_cpus() -> None:
    """Have jax lower kernels for an A100 where the device is a CPU."""
    try:
        gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
    except ModuleNotFoundError:  # before jax 0.11
        return
    a100 = gpu_info.GpuInfo(
        gpu_version=gpu_info.GpuVersion.A100, arch_name="8.0", compute_capability=80
    )
    gpu_info.registry["cpu"] = lambda: a100
