"""The lowest loss that a model can reach on a batch."""

import math
from typing import Any

import numpy as np
import pytest

from rungs.checks.model import frequency_loss, reachable_loss
from tests.support.configs import model_config

LN2 = math.log(2)
NO_LAYERS = {"n_layers": 0}


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "expected"),
    [
        ({}, [[5, 1], [6, 1]], [[1, 2], [1, 3]], 0),
        ({}, [[1, 5], [1, 6]], [[2, 4], [3, 4]], LN2 / 2),
        (NO_LAYERS, [[5, 1], [6, 1]], [[1, 2], [1, 3]], LN2 / 2),
        (NO_LAYERS, [[5, 1], [6, 1]], [[1, 2], [1, -1]], 0),
        (NO_LAYERS, [[1, 1, 1, 1]], [[2, 2, 2, 3]], 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        ({"sliding_window": 2}, [[4, 5, 1], [6, 5, 1]], [[5, 1, 2], [5, 1, 3]], LN2 / 3),
        ({"sliding_window": 3}, [[4, 5, 1], [6, 5, 1]], [[5, 1, 2], [5, 1, 3]], 0),
        ({"final_soft_cap": 1.0}, [[1]], [[2]], math.log(1 + 31 * math.exp(-2))),
    ],
)
def test_reachable_loss(
    model: dict[str, Any], inputs: list[list[int]], targets: list[list[int]], expected: float
) -> None:
    found = reachable_loss(model_config(**model), np.array(inputs), np.array(targets))
    assert found == pytest.approx(expected)


def test_one_global_layer_sees_beyond_the_window() -> None:
    model = model_config(sliding_window=1, layer_pattern=["sliding", "global"])
    inputs, targets = np.array([[4, 1], [5, 1]]), np.array([[1, 2], [1, 3]])
    assert reachable_loss(model, inputs, targets) == 0


def test_frequency_loss() -> None:
    assert frequency_loss(np.array([[1, 2, -1], [1, 2, -1]])) == pytest.approx(LN2)
