"""Counts in messages."""

import pytest

from rungs.common.shown_text import counted


@pytest.mark.parametrize(
    ("count", "thing", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2000, "token", "2,000 tokens"),
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (2, "process", "2 processes"),
    ],
)
def test_a_count_has_the_singular_only_for_one(count: int, thing: str, text: str) -> None:
    assert counted(count, thing) == text
