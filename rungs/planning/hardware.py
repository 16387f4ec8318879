"""Known devices: published FLOP/s, memory and bandwidth. To add a device, add an entry to
`devices.toml`. Imports neither JAX nor NumPy, as the help of `plan.py` shows the table."""

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rungs.common.errors import UserError
from rungs.parallel import gpu_settings

if TYPE_CHECKING:  # keeps the help of `plan.py` fast
    import numpy as np

    from rungs.parallel.target_device import Target

DESCRIPTION_FORMAT = "NAME:FLOPS:BYTES:BANDWIDTH"


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
    float8_flops: float | None = None
    """Dense FLOP/s in FP8; None if unknown."""
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
        return self.flops if bits > 8 else self.float8_flops

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory that JAX takes."""
        return self.memory_bytes * (gpu_settings.memory_share() if self.is_preallocated else 1)


TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("devices.toml").read_text("utf-8"))


def _of_table(name: str, entry: Mapping[str, Any]) -> Hardware:
    """Return a device of `devices.toml`."""
    flops, is_gpu = entry["flops"], entry["platform"] == "gpu"
    return Hardware(
        name,
        entry["platform"],
        flops,
        entry.get("float32_flops", flops),
        entry["memory_gib"] * 2**30,
        entry["bandwidth"],
        Links(**entry["links"]),
        entry.get("compute_capability", ""),
        tuple(entry["jax_kinds"]),
        float8_flops=entry.get("float8_flops"),
        is_preallocated=is_gpu,
    )


DEVICES = tuple(_of_table(*device) for device in TABLE["devices"].items())
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

    from rungs.parallel.devices import memory_bytes

    device = jax.devices()[0]
    if device.platform == "cpu":
        return cpu()
    found = device_of_kind(device.device_kind)
    if found is None:
        capability = str(getattr(device, "compute_capability", ""))
        figures = None, None, memory_bytes(), None, None
        found = Hardware(device.device_kind, device.platform, *figures, capability)
    found = found._replace(is_here=True)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return found
    return found._replace(memory_bytes=float(stats["bytes_limit"]), is_preallocated=False)


def cpu() -> Hardware:
    """Return this machine's CPU as one device, without FLOP/s, which nobody publishes for CPUs."""
    from rungs.parallel.devices import memory_bytes

    return Hardware("cpu", "cpu", None, None, memory_bytes(), None, is_here=True)


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
    return Hardware(name, "gpu", flops, flops, size, bandwidth, compute_capability="8.0")
