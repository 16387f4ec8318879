"""What kinds of devices can do, as their makers publish it."""

import math
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rungs.common.errors import UserError
from rungs.parallel.devices import memory_bytes
from rungs.parallel.target_device import Target, target

PREALLOCATED_SHARE = 0.75
"""What JAX takes of a GPU's memory unless one of `SHARE_VARIABLES` says otherwise:
https://docs.jax.dev/en/latest/gpu_memory_allocation.html."""
SHARE_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
FORM = "NAME:FLOPS:BYTES:BANDWIDTH"
_AMPERE, _ADA, _HOPPER = (Target("gpu", version) for version in ("8.0", "8.9", "9.0"))
_CPU, _TPU = Target("cpu"), Target("tpu")


class Hardware(NamedTuple):
    """A kind of device."""

    name: str
    target: Target
    flops: float | None
    """Per second, dense, in bfloat16 and float16; None where nobody said."""
    float32_flops: float | None
    """Per second in float32 as JAX multiplies it unless told otherwise: in TF32 on NVIDIA's GPUs,
    in bfloat16 on TPUs."""
    memory_bytes: float
    bandwidth: float | None
    """Of its memory, bytes per second."""
    kinds: tuple[str, ...] = ()
    """What JAX calls devices of this kind; patterns."""
    is_preallocated: bool = False
    """Whether JAX leaves a share of the memory alone."""

    def peak(self, dtype: jnp.dtype) -> float | None:
        """FLOPs per second in products of a type."""
        return self.float32_flops if dtype.itemsize > 2 else self.flops

    @property
    def usable_bytes(self) -> float:
        """Of its memory, what JAX takes."""
        return self.memory_bytes * (_preallocated_share() if self.is_preallocated else 1)


def _nvidia(
    name: str,
    kind: str,
    target: Target,
    flops: float,
    float32_flops: float,
    memory_bytes: float,
    bandwidth: float,
) -> Hardware:
    figures = flops, float32_flops, memory_bytes, bandwidth
    return Hardware(name, target, *figures, kinds=(f"NVIDIA {kind}",), is_preallocated=True)


KNOWN = (
    _nvidia("h100", "H100 80GB HBM3", _HOPPER, 989.4e12, 494.7e12, 80e9, 3.35e12),
    _nvidia("h200", "H200", _HOPPER, 989.4e12, 494.7e12, 141e9, 4.8e12),
    _nvidia("a100", "A100-SXM4-80GB", _AMPERE, 312e12, 156e12, 80e9, 2.039e12),
    _nvidia("rtx3090", "GeForce RTX 3090", _AMPERE, 71e12, 35.6e12, 24e9, 0.936e12),
    _nvidia("rtx4090", "GeForce RTX 4090", _ADA, 165.2e12, 82.6e12, 24e9, 1.008e12),
    Hardware("tpu-v5e", _TPU, 197e12, 197e12, 16e9, 0.819e12, ("TPU v5 ?lite", "TPU v5e")),
    Hardware("tpu-v5p", _TPU, 459e12, 459e12, 95e9, 2.765e12, ("TPU v5p?",)),
)
"""Tensor cores' figures without sparsity, with sums in float32. H100 and H200 are the SXM ones, of
which 989.4 and 494.7 are half of what is published with sparsity; A100 is the SXM one of 80 GB.
https://www.nvidia.com/en-us/data-center/h100/, https://www.nvidia.com/en-us/data-center/h200/,
https://www.nvidia.com/en-us/data-center/a100/;
https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf, table 9;
https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, table 2;
https://cloud.google.com/tpu/docs/v5e, https://cloud.google.com/tpu/docs/v5p."""


def named(text: str) -> Hardware:
    """The hardware that `--device` names.

    Raises:
        UserError: it names none.
    """
    if text == "cpu":
        return cpu()
    for one in KNOWN:
        if one.name == text:
            return one
    if ":" in text:
        return _described(text)
    names = ", ".join(one.name for one in KNOWN)
    raise UserError(f"--device {text}: none of {names}, cpu; or describe it as {FORM}")


def of_kind(device_kind: str) -> Hardware | None:
    """The hardware that JAX calls so; None where it is not known, as of any CPU."""
    matches = (one for one in KNOWN if any(re.fullmatch(kind, device_kind) for kind in one.kinds))
    return next(matches, None)


def at_hand() -> Hardware:
    """Of this machine's first device; starts JAX."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return cpu()
    known = of_kind(device.device_kind)
    own = known or Hardware(device.device_kind, target(), None, None, memory_bytes(), None)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return own
    return own._replace(memory_bytes=float(stats["bytes_limit"]), is_preallocated=False)


def cpu() -> Hardware:
    """This machine as one device; nobody publishes what a CPU multiplies."""
    return Hardware("cpu", _CPU, None, None, memory_bytes(), None)


def _described(text: str) -> Hardware:
    """Hardware as a user describes it. How its programs are made is taken to be as for a recent
    GPU."""
    name, *figures = text.split(":")
    try:
        flops, size, bandwidth = map(float, figures)
    except ValueError:
        raise UserError(f"--device {text}: not {FORM}, as in mine:300e12:48e9:0.9e12") from None
    if not name or not all(math.isfinite(x) and x >= 1 for x in (flops, size, bandwidth)):
        raise UserError(f"--device {text}: {FORM} has a name and figures from 1 on")
    return Hardware(name, _AMPERE, flops, flops, size, bandwidth)


def _preallocated_share() -> float:
    given = (os.environ[name] for name in SHARE_VARIABLES if name in os.environ)
    try:
        share = float(next(given, PREALLOCATED_SHARE))
    except ValueError:
        return PREALLOCATED_SHARE
    return share if 0 < share <= 1 else PREALLOCATED_SHARE
