"""How long to wait before something that failed is tried again."""

FIRST_DELAY, LONGEST_DELAY = 10.0, 600.0
"""Seconds after the first failure; doubled after each further one, up to the second number."""


def delay_after(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row, at least one."""
    return min(FIRST_DELAY * 2.0 ** min(failures - 1, 99), LONGEST_DELAY)
