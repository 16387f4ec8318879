"""The fastest matmuls of JAX and PyTorch, and how fast memory is."""

from collections.abc import Iterator

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.training_speed.matmul_peak import LEAST, MOST
from benchmarks.training_speed.sides import measure_peaks


def figures(setting: Setting) -> Iterator[Figure]:
    largest = LEAST if setting.rehearse else MOST
    for (library, dtype), flops in measure_peaks(setting.torch, largest).items():
        yield Figure(f"matmul, {library}, {dtype}", [flops / 1e12], "TFLOP/s")
    # JAX starts only now, so that it does not hold the device beside the processes above.
    from rungs.diagnostics.device_check.peaks import memory_bandwidth
    from rungs.parallel.mesh import one_device

    yield Figure("memory, read and written", [memory_bandwidth(one_device()) / 1e9], "GB/s")
