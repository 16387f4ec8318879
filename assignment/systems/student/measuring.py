"""How long something takes. Task: `assignment/systems/tasks/measuring.md`.

JAX returns arrays before the device has computed them: a call only hands over work. The first call
of a function compiles it as well. `clock` returns seconds; tests pass that of a simulated device.
"""

import time
from collections.abc import Callable
from typing import Any

Clock = Callable[[], float]


def seconds_per_call(
    function: Callable[..., Any], *arguments: Any, calls: int = 5, clock: Clock = time.perf_counter
) -> float:
    """Return the median of how long one call takes until its results are there, each call measured
    by itself, without compiling."""
    raise NotImplementedError("seconds_per_call: see assignment/systems/tasks/measuring.md")


def seconds_per_step(
    step: Callable[[Any], Any], state: Any, steps: int, clock: Clock = time.perf_counter
) -> float:
    """Return how long one step of a training loop takes, on average, without compiling. Each step
    gets the state that the one before returned. The next steps are handed over while the device
    computes: only the last state is waited for.

    Args:
        steps: those that are measured, all together; a first one is not.
    """
    raise NotImplementedError("seconds_per_step: see assignment/systems/tasks/measuring.md")


def speedup(
    before: Callable[..., Any],
    after: Callable[..., Any],
    *arguments: Any,
    rounds: int = 5,
    clock: Clock = time.perf_counter,
) -> float:
    """Return how many times as fast `after` is as `before`: the median over rounds of the ratio of
    two calls, one after the other, without compiling. What slows a machine down from round to
    round, such as heat, slows both."""
    raise NotImplementedError("speedup: see assignment/systems/tasks/measuring.md")
