"""Known devices: published FLOP/s, memory and bandwidth. To add a device, add an entry to
`DEVICES`. Imports neither JAX nor NumPy, as the help of `plan.py` shows the table."""

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from rungs.common import machine
from rungs.common.errors import UserError
from rungs.parallel import gpu_settings

if TYPE_CHECKING:  # keeps the help of `plan.py` fast
    import numpy as np

    from rungs.parallel.target_device import Target

GIB = 2**30
DESCRIPTION_FORMAT = "NAME:FLOPS:BYTES:BANDWIDTH"
_AMPERE, _GEFORCE_AMPERE, _ADA, _HOPPER, _BLACKWELL = "8.0", "8.6", "8.9", "9.0", "10.0"
"""Compute capabilities."""


class Links(NamedTuple):
    """Connections between devices of a kind: bytes per second of one device in one direction."""

    island: int
    """Devices joined by the inner links."""
    inner: float
    """Sum over a device's inner links."""
    outer: float | None = None
    """A device's share of the network between islands; None if there is no usual value."""


class Hardware(NamedTuple):
    """A kind of device."""

    name: str
    platform: str
    """cpu, gpu or tpu, as in `jax.Device.platform`."""
    flops: float | None
    """Dense FLOP/s in bfloat16 and float16; None if unknown."""
    float32_flops: float | None
    """FLOP/s of matmuls in float32 by default: in TF32 on NVIDIA GPUs, bfloat16 on TPUs."""
    memory_bytes: float
    """Memory that the device reports: more than its name says in decimal GB, less than in GiB."""
    bandwidth: float | None
    """Memory bandwidth in bytes per second."""
    links: Links | None = None
    """None if unknown."""
    compute_capability: str = ""
    """Compute capability of an NVIDIA GPU, else empty."""
    jax_kinds: tuple[str, ...] = ()
    """Patterns for `jax.Device.device_kind`."""
    is_preallocated: bool = False
    """Whether JAX preallocates a share of the memory and uses no more."""
    is_here: bool = False
    """Whether it is this machine's device."""

    @property
    def target(self) -> "Target":
        """The kind of device, for tracing programs."""
        from rungs.parallel.target_device import Target

        return Target(self.platform, self.compute_capability)

    def peak(self, dtype: "np.dtype") -> float | None:
        """Return the FLOP/s of matmuls in a dtype, or None."""
        return self.peak_of_bits(8 * dtype.itemsize)

    def peak_of_bits(self, bits: int) -> float | None:
        """Return the FLOP/s of matmuls with this many bits per element, None if unknown."""
        if bits > 16:
            return self.float32_flops
        return self.flops if bits > 8 else FLOAT8_FLOPS.get(self.name)

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory that JAX takes."""
        return self.memory_bytes * (gpu_settings.memory_share() if self.is_preallocated else 1)


def _nvidia(name: str, kind: str, compute_capability: str, *figures: Any) -> Hardware:
    """Return a GPU. `figures` are the fields of `Hardware` from `flops` to `links`."""
    last = compute_capability, (f"NVIDIA {kind}",), True, False
    return Hardware._make((name, "gpu", *figures, *last))


def _tpu(name: str, kinds: tuple[str, ...], flops: float, *figures: Any) -> Hardware:
    """Return a TPU. `figures` are the fields of `Hardware` from `memory_bytes` to `links`."""
    return Hardware._make((name, "tpu", flops, flops, *figures, "", kinds, False, False))


_DGX_H100, _DGX_A100 = Links(8, 450e9, 50e9), Links(8, 300e9, 25e9)
_DGX_B200, _PCIE = Links(8, 900e9, 50e9), Links(8, 31.5e9)
_V4, _V6E, _TPU7X = Links(4096, 300e9), Links(256, 400e9), Links(18432, 300e9)
_V5E, _V5P = Links(256, 200e9, 3.125e9), Links(8960, 600e9, 6.25e9)
DEVICES = (
    _nvidia("h100", "H100 80GB HBM3", _HOPPER, 989.4e12, 494.7e12, 79.11 * GIB, 3.35e12, _DGX_H100),
    _nvidia("h200", "H200", _HOPPER, 989.4e12, 494.7e12, 139.8 * GIB, 4.8e12, _DGX_H100),
    _nvidia("b200", "B200", _BLACKWELL, 2.25e15, 1.1e15, 178.36 * GIB, 7.7e12, _DGX_B200),
    _nvidia("a100", "A100-SXM4-80GB", _AMPERE, 312e12, 156e12, 79.25 * GIB, 2.039e12, _DGX_A100),
    _nvidia("l4", "L4", _ADA, 121e12, 60e12, 22.03 * GIB, 0.3e12, _PCIE),
    _nvidia(
        "rtx3090", "GeForce RTX 3090", _GEFORCE_AMPERE, 71e12, 35.6e12, 23.69 * GIB, 0.936e12, _PCIE
    ),
    _nvidia("rtx4090", "GeForce RTX 4090", _ADA, 165.2e12, 82.6e12, 23.64 * GIB, 1.008e12, _PCIE),
    _tpu("tpu-v4", ("TPU v4",), 275e12, 30.75 * GIB, 1.228e12, _V4),
    _tpu("tpu-v5e", ("TPU v5 ?lite", "TPU v5e"), 197e12, 15.75 * GIB, 0.819e12, _V5E),
    _tpu("tpu-v5p", ("TPU v5p?",), 459e12, 95.74 * GIB, 2.765e12, _V5P),
    _tpu("tpu-v6e", ("TPU v6 ?lite", "TPU v6e"), 918e12, 31.25 * GIB, 1.638e12, _V6E),
    _tpu("tpu7x", ("TPU7x",), 1153.5e12, 94.75 * GIB, 3.69e12, _TPU7X),
)
"""Tensor-core figures without sparsity, accumulating in float32. B200, H100 and H200 are the SXM
models, whose figures are half of the published ones with sparsity; A100 is the SXM model with
80 GB. A device of TPU7x is one of the two on a chip.
https://www.nvidia.com/en-us/data-center/dgx-b200/, https://www.nvidia.com/en-us/data-center/h100/,
https://www.nvidia.com/en-us/data-center/h200/, https://www.nvidia.com/en-us/data-center/a100/,
https://www.nvidia.com/en-us/data-center/l4/;
https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf, table 9;
https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, table 2;
https://cloud.google.com/tpu/docs/v4 and the same for v5e, v5p, v6e and tpu7x.

Memory is what CUDA and libtpu report, of which JAX takes its share: B200, H100 and A100 in
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs; the other GPUs as the
"total capacity" in PyTorch's out-of-memory errors; TPUs as the "available HBM" in their compiler's.

Links: hosts of eight with NVLink and an InfiniBand adapter for each GPU, as in
https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html,
https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html and
https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html; for L4 and GeForce
cards PCIe 4.0 × 16 and no network; for TPUs half of the bidirectional bandwidth and, where it is
published, a chip's share of its network."""
FLOAT8_FLOPS = {
    **{"h100": 1.9789e15, "h200": 1.9789e15, "b200": 4.5e15},
    **{"l4": 242e12, "rtx4090": 330.3e12},
}
"""Dense FLOP/s in FP8, from the same pages."""
NAMES = (*(device.name for device in DEVICES), "cpu")


def device_by_name(text: str) -> Hardware:
    """Return the hardware that `--device` names or describes. Raises UserError if there is none."""
    if text == "cpu":
        return cpu()
    if named := [device for device in DEVICES if device.name == text]:
        return named[0]
    if ":" in text:
        return _described(text)
    raise UserError(
        f"--device {text}: unknown device; choose from {', '.join(NAMES)}, or describe it as"
        f" {DESCRIPTION_FORMAT}"
    )


def device_of_kind(device_kind: str) -> Hardware | None:
    """Return the hardware that JAX calls `device_kind`; None if unknown, as for any CPU."""
    for device in DEVICES:
        if any(re.fullmatch(kind, device_kind) for kind in device.jax_kinds):
            return device
    return None


def this_device() -> Hardware:
    """Return this machine's first device. Starts JAX."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return cpu()
    found = device_of_kind(device.device_kind)
    if found is None:
        capability = str(getattr(device, "compute_capability", ""))
        figures = None, None, machine.memory_bytes(), None, None
        found = Hardware(device.device_kind, device.platform, *figures, capability)
    found = found._replace(is_here=True)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return found
    return found._replace(memory_bytes=float(stats["bytes_limit"]), is_preallocated=False)


def cpu() -> Hardware:
    """Return this machine's CPU as one device, without FLOP/s, which nobody publishes for CPUs."""
    return Hardware("cpu", "cpu", None, None, machine.memory_bytes(), None, is_here=True)


def _described(text: str) -> Hardware:
    """Return hardware described by the user, treated as an Ampere GPU."""
    name, *figures = text.split(":")
    try:
        flops, size, bandwidth = map(float, figures)
    except ValueError:
        raise UserError(
            f"--device {text}: not {DESCRIPTION_FORMAT}, as in mine:300e12:48e9:0.9e12"
        ) from None
    if not name or not all(math.isfinite(x) and x >= 1 for x in (flops, size, bandwidth)):
        raise UserError(
            f"--device {text}: {DESCRIPTION_FORMAT} needs a name and three numbers of at least 1"
        )
    return Hardware(name, "gpu", flops, flops, size, bandwidth, compute_capability=_AMPERE)
