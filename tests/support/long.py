"""Which parameters of a test are long."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def long_except(
    kept: Collection[Any], values: Iterable[Any], key: Callable[[Any], Any] = lambda value: value
) -> list[Any]:
    """Return values for `pytest.mark.parametrize`, all long but those whose key is in `kept`.

    Raises:
        ValueError: something in `kept` is the key of no value.
    """
    values = list(values)
    if unknown := set(kept) - set(map(key, values)):
        raise ValueError(f"no such parameter: {unknown}")
    return [
        value if key(value) in kept else pytest.param(value, marks=pytest.mark.long)
        for value in values
    ]
