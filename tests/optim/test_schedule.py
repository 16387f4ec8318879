"""The learning rate of each step, by formula."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from rungs.config.optimization_config import Schedule
from rungs.optim.schedule import learning_rate_schedule, weight_decay_schedule
from tests.support.configs import train_config

TOTAL, WARMUP = 200, 20
AFTER_WARMUP: dict[Schedule, Callable[[float], float]] = {
    "cosine": lambda done: 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - 0.9 * done,
    "constant": lambda _: 1.0,
    "warmup_stable_decay": lambda done: 1 - 0.9 * max(0.0, (180 * done - 130) / 50),
}
"""Share of the peak, by the share that is done of what comes after the warm-up."""


@pytest.mark.parametrize("count", [int, jnp.uint32], ids=["int", "as nnx counts"])
@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_warms_up_then_falls_to_a_tenth(name: Schedule, count: Callable[[int], Any]) -> None:
    train = train_config(
        learning_rate=0.5, warmup_period_percent=10, schedule=name, decay_period_percent=25
    )
    schedule = learning_rate_schedule(train, TOTAL)
    for step in range(TOTAL + 1):
        if step < WARMUP:
            expected = 1e-5 + (1 - 1e-5) * step / WARMUP
        else:
            expected = AFTER_WARMUP[name]((step - WARMUP) / (TOTAL - WARMUP))
        # float32 at the size of the peak
        assert float(schedule(count(step))) == pytest.approx(0.5 * expected, abs=0.5 * 2e-7)


@pytest.mark.parametrize("warmup_of", [None, 40])
def test_a_branch_has_the_warmup_of_the_run_that_it_continues(warmup_of: int | None) -> None:
    lineage = {"like": "steady", "set": {"max_steps": 200}, "from_step": 10}
    train = train_config(
        learning_rate=0.5,
        warmup_period_percent=10,
        schedule="constant",
        lineage=lineage | {"warmup_of": warmup_of},
    )
    rates = [float(learning_rate_schedule(train, 200)(step)) for step in range(30)]
    warmup = 4 if warmup_of else 20
    assert rates[warmup:] == [0.5] * (30 - warmup)
    assert rates[warmup - 1] < 0.5


def test_a_decay_longer_than_what_is_left_begins_after_the_warmup() -> None:
    train = train_config(
        warmup_period_percent=50, schedule="warmup_stable_decay", decay_period_percent=90
    )
    schedule = learning_rate_schedule(train, 100)
    assert float(schedule(50)) == pytest.approx(0.01)
    assert float(schedule(75)) == pytest.approx(0.01 * 0.55)
    assert float(schedule(100)) == pytest.approx(0.001)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_weight_decay_falls_from_the_first_step_to_the_end(name: str) -> None:
    train = train_config(weight_decay=0.2, weight_decay_schedule=name)
    schedule = weight_decay_schedule(train, TOTAL)
    for step in range(0, TOTAL + 1, 10):
        done = step / TOTAL
        falls = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
        assert float(schedule(jnp.uint32(step))) == pytest.approx(0.2 - 0.2 * falls[name], abs=2e-7)


@pytest.mark.parametrize("name", AFTER_WARMUP)
@pytest.mark.parametrize("percent", [0, 50, 100])
@pytest.mark.parametrize("total_steps", [1, 2, 3])
def test_the_shortest_runs_have_a_schedule(
    total_steps: int, percent: float, name: Schedule
) -> None:
    train = train_config(warmup_period_percent=percent, schedule=name)
    schedule = learning_rate_schedule(train, total_steps)
    rates = [float(schedule(step)) for step in range(total_steps)]
    assert all(0 < rate <= 0.01 * (1 + 1e-6) for rate in rates)
    assert max(rates) == pytest.approx(0.01)
