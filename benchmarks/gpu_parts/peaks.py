"""The fastest matmuls of JAX and PyTorch, and how fast memory is."""

from collections.abc import Iterator

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.training_speed.matmul_peak import MOST
from benchmarks.training_speed.sides import measure_peaks

REHEARSED = 256
"""Rows of the matrices of a rehearsal: PyTorch multiplies bfloat16 a hundred times more slowly
than float32 on a CPU without AVX-512."""


def figures(setting: Setting) -> Iterator[Figure]:
    largest = REHEARSED if setting.rehearse else MOST
    found = measure_peaks(setting.torch, largest)
    # JAX starts only now, so that it does not hold the device beside the processes above.
    import jax
    import numpy as np

    from rungs.checks.device import memory_bandwidth
    from rungs.parallel.sharding import one_device
    from rungs.planning.hardware import device_of_kind

    hardware = device_of_kind(jax.devices()[0].device_kind)
    for (library, dtype), flops in found.items():
        peak = hardware and hardware.peak(np.dtype(jax.numpy.dtype(dtype)))
        shown = "TF32" if hardware and dtype == "float32" else dtype
        yield Figure(f"matmul, {library}, {shown}", [flops / 1e12], "TFLOP/s", _share(flops, peak))
    bandwidth = memory_bandwidth(one_device())
    note = _share(bandwidth, hardware and hardware.bandwidth)
    yield Figure("memory, read and written", [bandwidth / 1e9], "GB/s", note)


def _share(value: float, published: float | None) -> str:
    return f"{value / published:.0%} of the published figure" if published else ""
