"""When communication takes longer than computing, by the published figures of the hardware.

Assumes that both overlap fully, that links and arithmetic reach their peaks, and that a collective
starts at once: a bound, which real runs stay below.
"""

from typing import NamedTuple

from benchmarks.device_scaling.cases import SEQUENCE, ScalingCase
from rungs.parallel.sharding import TENSOR
from rungs.planning.communication import link_bandwidth, planned_collectives
from rungs.planning.hardware import Hardware


class Balance(NamedTuple):
    """Communication of one global step of one microbatch, as a share of the time to compute it."""

    inner: float
    """Over the links within an island."""
    outer: float
    """Over the network."""
    even_tokens: float
    """Tokens per device in a microbatch at which communication takes as long as computing; infinite
    if more tokens do not help."""


def balance(case: ScalingCase, hardware: Hardware, flops_per_token: float) -> Balance:
    """Compare communication and computing of a case, with one sequence per device along `data`.

    The bytes are a constant plus a part that grows with the tokens, so two batch sizes give both.
    """
    assert hardware.flops
    computing = flops_per_token / hardware.flops
    tokens = SEQUENCE * case.data / case.devices
    one, two = (link_seconds(case, hardware, sequences) for sequences in (1, 2))
    even = max(_even_tokens(*link, tokens, computing) for link in zip(one, two, strict=True))
    inner, outer = (link / (computing * tokens) for link in one)
    return Balance(inner, outer, even)


def _even_tokens(one: float, two: float, tokens: float, computing: float) -> float:
    """Return the number of tokens from which on computing takes longer than a link.

    Args:
        one, two: seconds of the link for `tokens` tokens and for twice as many.
        computing: seconds per token.
    """
    growth = (two - one) / tokens
    constant = one - growth * tokens
    return constant / (computing - growth) if growth < computing else float("inf")


def link_seconds(case: ScalingCase, hardware: Hardware, sequences: int) -> tuple[float, float]:
    """Return the seconds of a step's communication over inner links and over the network."""
    assert hardware.links
    inner = outer = 0.0
    for one in planned_collectives(case.run(1, sequences=sequences), case.layout):
        bandwidth = link_bandwidth(one.axes, case.layout, hardware.links)
        if one.axes == (TENSOR,) or case.devices <= hardware.links.island:
            inner += one.moved_bytes / bandwidth
        else:
            outer += one.moved_bytes / bandwidth
    return inner, outer
