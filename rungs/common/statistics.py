"""Intervals of measured shares."""

import math

_Z = 1.959964
"""The standard normal distribution is within ± this with probability 95 %."""


def wilson_interval(mean: float, items: int) -> tuple[float, float]:
    """Return a 95 % interval of the mean of numbers between 0 and 1: Wilson's score interval for as
    many yes-or-no outcomes (Wilson 1927). Their variance is the largest that such numbers can have,
    so the interval is wide enough for estimates from several completions, too.

    Args:
        mean: over items.
        items: how many there are, at least 1.
    """
    weight = _Z**2 / items
    middle = (mean + weight / 2) / (1 + weight)
    reach = _Z * math.sqrt(mean * (1 - mean) / items + weight / (4 * items)) / (1 + weight)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)
