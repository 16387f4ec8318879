"""The loss that a model can reach: what it sees alike before different targets."""

import math
from typing import Any

import numpy as np
import pytest

from rungs.diagnostics.model_check.reachable_loss import frequency_loss, reachable_loss
from tests.support.configs import model_config

LN2 = math.log(2)
NO_LAYERS = {"n_layers": 0}
ROPE, NOPE = {"positions": "rope"}, {"positions": "none"}


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "expected"),
    [
        # after 1 comes 2 or 3: all layers see which row, from its second token on
        ({}, [[1, 1], [1, 1]], [[2, 3], [2, 3]], 0),
        ({}, [[5, 1], [6, 1]], [[1, 2], [1, 3]], 0),
        ({}, [[1, 5], [1, 6]], [[2, 4], [3, 4]], LN2 / 2),
        (NO_LAYERS, [[5, 1], [6, 1]], [[1, 2], [1, 3]], LN2 / 2),
        (NO_LAYERS, [[5, 1], [6, 1]], [[1, 2], [1, -1]], 0),
        (NO_LAYERS, [[1, 1, 1, 1]], [[2, 2, 2, 3]], 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        # a mean of equal values is the same of any number
        (ROPE, [[1, 1]], [[2, 3]], LN2),
        (ROPE, [[4, 5, 1], [5, 4, 1]], [[5, 1, 2], [4, 1, 3]], 0),
        (NOPE, [[4, 5, 1], [5, 4, 1]], [[5, 1, 2], [4, 1, 3]], LN2 / 3),
        ({"sliding_window": 2}, [[4, 5, 1], [6, 5, 1]], [[5, 1, 2], [5, 1, 3]], LN2 / 3),
        ({"sliding_window": 3}, [[4, 5, 1], [6, 5, 1]], [[5, 1, 2], [5, 1, 3]], 0),
        ({"final_soft_cap": 1.0}, [[1]], [[2]], math.log(1 + 31 * math.exp(-2))),
    ],
)
def test_what_inputs_leave_open(
    model: dict[str, Any], inputs: list[list[int]], targets: list[list[int]], expected: float
) -> None:
    found = reachable_loss(model_config(**model), np.array(inputs), np.array(targets))
    assert found == pytest.approx(expected)


def test_a_layer_that_sees_all_lifts_the_window() -> None:
    model = model_config(sliding_window=1, layer_pattern=["sliding", "global"])
    inputs, targets = np.array([[4, 1], [5, 1]]), np.array([[1, 2], [1, 3]])
    assert reachable_loss(model, inputs, targets) == 0


def test_what_frequencies_leave_open() -> None:
    assert frequency_loss(np.array([[1, 2, -1], [1, 2, -1]])) == pytest.approx(LN2)
