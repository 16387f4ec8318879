"""When communication takes longer than computing, on hardware as its makers describe it.

Both are taken to overlap fully, links and arithmetic to reach their peaks, and a collective to
start at once: a bound, which real runs stay below.
"""

from typing import NamedTuple

from benchmarks.scaling_cases import SEQUENCE, ScalingCase
from rungs.parallel.axes import TENSOR
from rungs.planning.communication import traffic
from rungs.planning.hardware import named


class LinkedHardware(NamedTuple):
    """What a device can do; bytes per second in one direction."""

    name: str
    flops: float
    """Per second, dense, in bfloat16."""
    memory_bytes: float
    island: int
    """Devices joined by the inner links."""
    inner: float
    """Of all inner links of a device together."""
    outer: float
    """Of a device's share of the network between islands."""


def _linked(label: str, name: str, island: int, inner: float, outer: float) -> LinkedHardware:
    one = named(name)
    assert one.flops is not None
    return LinkedHardware(label, one.flops, one.memory_bytes, island, inner, outer)


HARDWARE = (
    _linked("H100", "h100", 8, 450e9, 50e9),
    _linked("TPU v5p", "tpu-v5p", 8960, 600e9, 6.25e9),
)
"""H100 SXM in hosts of eight with NVLink and a 400 Gb/s adapter for each device:
https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html.
TPU v5p, a pod of which has inner links throughout: https://cloud.google.com/tpu/docs/v5p; its table
gives both directions together."""


class Balance(NamedTuple):
    """Communication of one global step of one microbatch, as a share of the time to compute it."""

    inner: float
    """Over the links within an island."""
    outer: float
    """Over the network."""
    even_tokens: float
    """Tokens for each device in a microbatch at which the longer one of the two takes as long as
    computing; infinite where more tokens do not help."""


def balance(case: ScalingCase, hardware: LinkedHardware, flops_per_token: float) -> Balance:
    """Of a case in which each device along `data` has one sequence.

    The bytes are a constant plus a part that grows with the tokens, so two lengths of the batch
    give both.
    """
    computing = flops_per_token / hardware.flops
    tokens = SEQUENCE * case.data / case.devices
    one, two = (seconds(case, hardware, sequences) for sequences in (1, 2))
    even = max(map(_even_tokens, one, two, (tokens,) * 2, (computing,) * 2))
    inner, outer = (link / (computing * tokens) for link in one)
    return Balance(inner, outer, even)


def _even_tokens(one: float, two: float, tokens: float, computing: float) -> float:
    """From so many tokens on computing takes longer than a link.

    Args:
        one, two: seconds of the link for `tokens` tokens and for twice as many.
        computing: seconds for each token.
    """
    growth = (two - one) / tokens
    constant = one - growth * tokens
    return constant / (computing - growth) if growth < computing else float("inf")


def seconds(case: ScalingCase, hardware: LinkedHardware, sequences: int) -> tuple[float, float]:
    """Of a step's communication over inner and outer links.

    The devices of an island stand together along `tensor` and then along `data`: a ring over all
    of them leaves each island once, so as many rings as it has devices share its network.
    """
    sent = traffic(case.run(1, sequences=sequences), case.layout)
    if case.devices <= hardware.island:
        return sum(one.moved_bytes for one in sent) / hardware.inner, 0.0
    neighbours = hardware.island // case.tensor
    tensor = sum(one.moved_bytes for one in sent if one.axes == (TENSOR,))
    data = sum(one.moved_bytes for one in sent) - tensor
    return tensor / hardware.inner, data / min(hardware.inner, neighbours * hardware.outer)
