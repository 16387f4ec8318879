"""Times of kernels, added up by the part of the step that they belong to."""

from types import SimpleNamespace
from typing import Any

from benchmarks.step_cost.profiled_step import Profile, longest, table
from rungs.planning.compiled.profile import OTHER, SHARED, Kernel
from rungs.planning.compiled.roofline import Work

PARTS = {
    "norm": "norms and the rest",
    "loss": "head and loss",
    "again": "head and loss",
    "two": "head and loss",
    "one": SHARED,
}


def test_times_are_those_of_a_step_next_to_the_least() -> None:
    kernels = [
        *[Kernel("k", "loss", 0.004)] * 2,
        *[Kernel("k", "two", 0.002)] * 2,
        Kernel("memset", "", 0.004),
    ]
    bound: Any = SimpleNamespace(parts={"head and loss": Work(0, 0, 0.001, 0.002, 0.003)})
    found = Profile("gpu", 1, [0.01], kernels, 2, PARTS, bound)
    lines = [line.split() for line in table(found).splitlines()]
    assert lines[1] == ["head", "and", "loss", "6.00", "75.0%", "2.00", "3.00", "2.00"]
    assert lines[2] == [*OTHER.split(), "2.00", "25.0%"]
    assert lines[3] == ["sum", "8.00", "100.0%", "2.00", "3.00", "2.67"]


def test_the_longest_kernels_come_first_with_all_their_runs() -> None:
    loss = [*[Kernel("b", "loss", 0.002)] * 2, *[Kernel("b", "again", 0.002)] * 2]
    found = Profile("gpu", 1, [], [Kernel("a", "norm", 0.003), *loss], 2, PARTS, None)
    first, second = longest(found, 2)
    assert first == ("head and loss", "b", 2.0, 0.004)
    assert second == ("norms and the rest", "a", 0.5, 0.0015)
