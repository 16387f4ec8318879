"""How long something takes. Task: `assignment/systems/tasks/measuring.md`.

JAX returns arrays before the device has computed them: a call only hands over work. The first call
of a function compiles it as well. `clock` returns seconds; tests pass that of a simulated device.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

Clock = Callable[[], float]


def seconds_per_call(
    function: Callable[..., Any], *arguments: Any, calls: int = 5, clock: Clock = time.perf_counter
) -> float:
    """Return the median of how long one call takes until its results are there, each call measured
    by itself, without compiling."""
    jax.block_until_ready(function(*arguments))
    return statistics.median(_seconds(function, arguments, clock) for _ in range(calls))


def seconds_per_step(
    step: Callable[[Any], Any], state: Any, steps: int, clock: Clock = time.perf_counter
) -> float:
    """Return how long one step of a training loop takes, on average, without compiling. Each step
    gets the state that the one before returned. The next steps are handed over while the device
    computes: only the last state is waited for.

    Args:
        steps: those that are measured, all together; a first one is not.
    """
    state = jax.block_until_ready(step(state))
    start = clock()
    for _ in range(steps):
        state = step(state)
    jax.block_until_ready(state)
    return (clock() - start) / steps


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
    for function in (before, after):
        jax.block_until_ready(function(*arguments))
    ratios = [
        _seconds(before, arguments, clock) / _seconds(after, arguments, clock)
        for _ in range(rounds)
    ]
    return statistics.median(ratios)


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...], clock: Clock) -> float:
    start = clock()
    jax.block_until_ready(function(*arguments))
    return clock() - start
