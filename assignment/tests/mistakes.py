"""Comparisons whose failures say which mistake gives what was found."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np


def check(
    found: Any,
    expected: Any,
    mistakes: Mapping[str, Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Fail unless two trees of arrays are the same up to rounding. If what was found is what a
    mistake gives, say which.

    Args:
        mistakes: results by what to say. None of them may be right.
    """
    __tracebackhide__ = True
    for why, wrong in (mistakes or {}).items():
        assert not _is_close(wrong, expected, rtol, atol), f"not a mistake: {why}"
        assert not _is_close(found, wrong, rtol, atol), why
    for ours, theirs in zip(_arrays(found), _arrays(expected), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol, atol)


@contextmanager
def explained(errors: Mapping[str, str]) -> Iterator[None]:
    """Say more about an exception inside, by a part of its own text."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        for part, why in errors.items():
            if part in f"{type(error).__name__}: {error}":
                raise AssertionError(why) from error
        raise


def _is_close(found: Any, expected: Any, rtol: float, atol: float) -> bool:
    ours, theirs = _arrays(found), _arrays(expected)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and np.allclose(a, b, rtol, atol, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
