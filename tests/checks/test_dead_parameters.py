"""Parameters that receive no gradient, and those that need none."""

from typing import Any

import numpy as np
import pytest

from rungs.checks.dead_parameters import (
    CheckedBatch,
    DeadParameters,
    find_dead_parameters,
)
from tests.support.configs import model_config

INPUTS = np.array([[1, 2], [3, 2]])
TARGETS = np.array([[2, -1], [2, 1]])
QUERY, KEY_BIAS = "blocks.attention.query.kernel", "blocks.attention.key.bias"
DOWN = "blocks.attention.query.low_rank.down"
UP = "blocks.attention.query.low_rank.up"
EXPERTS = "blocks.feed_forward.up.kernel"
TOKENS, POSITIONS = "token_embedding.embedding", "position_embedding.embedding"
MIXTURE: dict[str, Any] = {"n_experts": 2, "experts_per_token": 1}


def found(
    gradient: dict[str, np.ndarray],
    parameters: dict[str, np.ndarray] | None = None,
    expert_tokens: list[list[int]] | None = None,
    **model: Any,
) -> DeadParameters:
    counts_LE = None if expert_tokens is None else np.array(expert_tokens)
    batch = CheckedBatch(INPUTS, TARGETS, counts_LE)
    return find_dead_parameters(model_config(**model), gradient, parameters or gradient, batch)


def test_one_layer_can_be_dead() -> None:
    gradient = np.ones((2, 3))
    gradient[1] = 0
    assert found({QUERY: gradient}).dead == [f"{QUERY} of layer 1"]
    assert found({"head.kernel": np.zeros(3)}).dead == ["head.kernel"]


def test_the_smallest_gradient_is_named() -> None:
    norm, name = found({QUERY: np.array([[3.0, 4.0], [1e-20, 0]])}).smallest
    assert (norm, name) == (pytest.approx(1e-20), f"{QUERY} of layer 1")


def test_a_key_bias_is_exempt_if_softmax_ignores_it() -> None:
    gradient = {KEY_BIAS: np.zeros((2, 3))}
    assert found(gradient).dead == []
    assert len(found(gradient).exemptions) == 1
    for effect in ({"positions": "rope"}, {"qk_norm": True}, {"attention_soft_cap": 5.0}):
        assert len(found(gradient, **effect).dead) == 2


def test_lora_a_is_exempt_while_b_is_zero() -> None:
    gradient, ones = {DOWN: np.zeros((2, 3))}, np.ones((2, 3))
    assert found(gradient, {DOWN: ones, UP: 0 * ones}).dead == []
    assert len(found(gradient, {DOWN: ones, UP: ones}).dead) == 2
    assert len(found({UP: 0 * ones}, {DOWN: ones, UP: 0 * ones}).dead) == 2


def test_experts_without_tokens_are_exempt() -> None:
    gradient = {EXPERTS: np.zeros((2, 2, 3))}
    result = found(gradient, expert_tokens=[[4, 0], [2, 2]], **MIXTURE)
    assert result.exemptions == ["no token went to expert 1 of layer 0"]
    assert result.dead == [
        f"{EXPERTS} of layer 0, expert 0",
        f"{EXPERTS} of layer 1, expert 0",
        f"{EXPERTS} of layer 1, expert 1",
    ]


def test_embedding_rows_of_counted_targets_are_parts() -> None:
    tokens, positions = np.ones((32, 3)), np.ones((8, 3))
    tokens[[3, 9]] = positions[[0, 5]] = 0
    result = found({TOKENS: tokens, POSITIONS: positions})
    assert result.dead == [f"{TOKENS}, token 3", f"{POSITIONS}, position 0"]
    assert result.parts == 5
