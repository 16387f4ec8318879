"""seconds_per_call, seconds_per_step and speedup, on a simulated device."""

import statistics
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from assignment.systems.tests.simulated_device import COMPILE, DISPATCH, Device
from assignment.tests.mistakes import check, explained

DURATIONS = [2.0, 2.0, 3.0, 32.0, 2.5]
"""Seconds of calls on the device, over and over. One of five is disturbed."""
TIMES = [DISPATCH + seconds for seconds in DURATIONS[1:] + DURATIONS[:1]]
"""Of five calls after one."""
A_TREE = {
    "has no attribute 'block_until_ready'": (
        "results are often trees of arrays, here a dictionary with a tuple in it:"
        " jax.block_until_ready waits for all arrays of a tree"
    )
}
NOT_WAITED = (
    "this is how long it takes to hand over the work: JAX returns before the device has computed"
    " anything. Wait with jax.block_until_ready before you look at the clock"
)


def test_seconds_per_call_are_the_median_of_what_is_waited_for(code: ModuleType) -> None:
    device = Device()
    function = device.function(lambda call: DURATIONS[call % 5])
    with explained(A_TREE):
        found = code.seconds_per_call(function, "x", calls=5, clock=device.clock)
    with_compiling = [COMPILE + DURATIONS[0], *TIMES[:4]]
    whole = COMPILE + DURATIONS[0] + sum(TIMES[:4])
    check(
        found,
        statistics.median(TIMES),
        {
            NOT_WAITED: DISPATCH,
            "the mean: one call was disturbed, and took fifteen times as long. The median is what a"
            " call takes": statistics.mean(TIMES),
            "the smallest: the median is asked for": min(TIMES),
            "the sum of all calls": sum(TIMES),
            "the first call compiles, and belongs to the warm-up": (
                statistics.median(with_compiling)
            ),
            "the mean, and the first call compiles: it belongs to the warm-up": whole / 5,
        },
    )


def test_seconds_per_call_wait_for_the_warm_up(code: ModuleType) -> None:
    device = Device()
    function = device.function(lambda call: 8.0 if call == 0 else 2.0)
    with explained(A_TREE):
        found = code.seconds_per_call(function, calls=1, clock=device.clock)
    compiled_too = COMPILE + 8
    check(
        found,
        DISPATCH + 2,
        {
            "the first call compiles, and belongs to the warm-up": compiled_too,
            "the work of the warm-up is measured, too, as the device still computes it when the"
            " clock starts: wait for it": 8 + 2,
            NOT_WAITED: DISPATCH,
            f"the first call compiles, and belongs to the warm-up; and {NOT_WAITED}": COMPILE,
        },
    )


def test_seconds_per_call_work_with_jax(code: ModuleType) -> None:
    assert 0 < code.seconds_per_call(jax.jit(jnp.sin), jnp.ones(3), calls=3) < 60


def test_seconds_per_step_wait_for_the_last_one(code: ModuleType) -> None:
    device = Device()
    step = device.function(lambda call: 4.0 if call == 0 else 2.0)
    with explained(A_TREE):
        found = code.seconds_per_step(step, "state", 8, clock=device.clock)
    check(
        found,
        (DISPATCH + 8 * 2) / 8,
        {
            NOT_WAITED: DISPATCH,
            "this waits for every step. A training loop doesn't: while the device computes, Python"
            " hands over the next step, so handing over costs nothing. Wait for the last one": (
                DISPATCH + 2
            ),
            "the first step compiles: take it before the clock starts": (COMPILE + 4 + 7 * 2) / 8,
            "the first step is still being computed when the clock starts: wait for it": (
                (4 + 8 * 2) / 8
            ),
            "this is the time of all steps together": DISPATCH + 8 * 2,
        },
        rtol=1e-9,
        atol=0,
    )


def test_seconds_per_step_hand_the_state_on(code: ModuleType) -> None:
    states = []

    def step(state: int) -> int:
        states.append(state)
        return state + 1

    code.seconds_per_step(step, 0, 4)
    assert states == [0, 1, 2, 3, 4], (
        f"the states of a first step and of four more were {states}: each step gets what the one"
        " before returned"
    )


def test_speedup_is_that_of_neighbours(code: ModuleType) -> None:
    device = Device()

    def slower_with_time(seconds: float) -> float:
        return seconds * (1 + device.now / 64)  # as when a machine gets hot

    before = device.function(lambda _: slower_with_time(4.0))
    after = device.function(lambda _: slower_with_time(2.0))
    with explained(A_TREE):
        found = code.speedup(before, after, "x", rounds=5, clock=device.clock)
    assert found != pytest.approx(1), f"1 time as fast? {NOT_WAITED}"
    assert found > 1, (
        f"{found:.2f}: 2 is right, about. Twice as fast is 2, not ½; or all calls of `before` came"
        " first, and this machine gets slower with time: take turns"
    )
    assert 1.6 < found < 2.1, (
        f"{found:.2f}: 2 is right, about. This machine gets slower with time, so if all calls of"
        " one function come first, the other one seems slow. Take turns: one call of each in a"
        " round"
    )


def test_speedup_is_not_disturbed(code: ModuleType) -> None:
    device = Device()
    before = device.function(lambda call: 64.0 if call == 2 else 4 - DISPATCH)
    after = device.function(lambda _: 2 - DISPATCH)
    with explained(A_TREE):
        found = code.speedup(before, after, rounds=5, clock=device.clock)
    ratios = [2, (64 + DISPATCH) / 2, 2, 2, 2]
    check(
        found,
        2,
        {
            NOT_WAITED: 1,
            "½ means half as fast: divide the time before by the time after": 0.5,
            "the mean of ratios: one call was disturbed. Take the median": statistics.mean(ratios),
            "the ratio of sums: one call was disturbed. Take the median of the rounds' ratios": (
                (4 * 4 + 64 + DISPATCH) / (5 * 2)
            ),
        },
    )
