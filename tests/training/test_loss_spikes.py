"""Loss spikes, and steps in a row without a finite loss."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from rungs.run.metrics import StepMetrics
from rungs.training.failed_steps import MIN_STEPS, WINDOW_STEPS, LossSpikeDetector


def taken(number: int, loss: float | None) -> StepMetrics:
    return StepMetrics(number, 0, loss, 1e-3, 1.0, False, 0, 1.0, 1.0)


def after(losses: Sequence[float | None]) -> LossSpikeDetector:
    return LossSpikeDetector((taken(step, loss) for step, loss in enumerate(losses)))


def noisy(count: int) -> list[float]:
    return list(np.random.default_rng(0).normal(2.0, 0.01, count) + np.linspace(1, 0, count))


def test_the_limit_is_six_deviations_above_the_median_of_the_window() -> None:
    losses = noisy(300)
    deviating = [*losses[:200], *(np.random.default_rng(1).normal(2.0, 0.5, 100))]
    # the limit does not use the step just before
    window = np.array(deviating[299 - 1 - WINDOW_STEPS : 299 - 1])
    median = np.sort(window)[WINDOW_STEPS // 2 - 1 : WINDOW_STEPS // 2 + 1].mean()
    distances = np.sort(np.abs(window - median))
    mad = distances[WINDOW_STEPS // 2 - 1 : WINDOW_STEPS // 2 + 1].mean()
    assert 6 * 1.4826 * mad > 0.5 * median
    limit = after(deviating[:299]).loss_limit(299)
    assert limit == pytest.approx(median + 6 * 1.4826 * mad, rel=1e-12)
    # if losses hardly differ, the limit is one and a half times their median
    assert after(losses).loss_limit(300) == pytest.approx(1.5 * np.median(losses[171:299]))


def test_near_zero_the_limit_is_a_tenth_of_a_nat_above_the_median() -> None:
    losses = list(np.abs(np.random.default_rng(0).normal(0.002, 0.0002, 200)))
    median = float(np.median(losses[200 - 2 - WINDOW_STEPS + 1 : 199]))
    assert after(losses).loss_limit(200) == pytest.approx(0.1 + median)


def test_the_limit_does_not_depend_on_the_unread_step_before() -> None:
    losses = noisy(200)
    for step in (40, 150, 199):
        assert after(losses[:step]).loss_limit(step) == after(losses[: step - 1]).loss_limit(step)
    assert after(losses[:150]).loss_limit(150) != after(losses[:150]).loss_limit(149)


def test_early_steps_have_no_limit_and_a_spike_does_not_hide_the_next() -> None:
    losses: list[float | None] = list(noisy(MIN_STEPS))
    assert after(losses).loss_limit(MIN_STEPS) == math.inf
    assert after([*losses, None, 2.0]).loss_limit(MIN_STEPS + 2) < 6
    spiked: list[float | None] = [*noisy(100), 300.0, 2.0, 2.0]
    assert after(spiked).loss_limit(103) < 6
