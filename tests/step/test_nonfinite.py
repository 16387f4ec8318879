"""The first array that is not finite, in a step and in a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.config.run_config import RunConfig
from rungs.step.nonfinite import (
    ALL_FINITE,
    GRADIENT_NORM,
    checked_names,
    describe_first,
    finite_flags,
    first_nonfinite,
    nonfinite_names,
)
from rungs.step.state import create_model_and_optimizer, named_arrays
from rungs.step.train_step import StepResult
from tests.support.configs import model_config, train_config


def test_the_first_array_is_named() -> None:
    model, optimizer = create_model_and_optimizer(RunConfig(model_config(), train_config()), 10)
    names = checked_names(model, optimizer.wrt)
    gradient, first = nnx.state(model, optimizer.wrt), jax.jit(first_nonfinite)
    assert first((jnp.zeros(()), gradient)) == ALL_FINITE
    assert names[first((jnp.asarray(jnp.inf), gradient))] == "the loss"
    flat = nnx.to_flat_state(gradient)
    for path, variable in flat:
        former = variable.get_value()
        variable.set_value(former.ravel().at[-1].set(jnp.nan).reshape(former.shape))
        found = names[first((jnp.zeros(()), gradient))]
        assert found == "the gradient of " + ".".join(map(str, path))
        variable.set_value(former)


def test_a_step_result_has_its_loss_and_the_nonfinite_array_of_each_microbatch() -> None:
    def result(losses: list[float], weights: list[float], bad: list[Any], norm: float) -> Any:
        rest = np.False_, np.float32(1e-3), np.float32(norm), np.False_, None, None
        return StepResult(np.array(losses), np.array(weights), np.array(bad), *rest)  # type: ignore[arg-type]

    names = ["the loss", "the gradient of w"]
    # one without targets has a loss of 0 / 0, and counts nothing
    assert result([np.nan, 2.0, 4.0], [0.0, 0.5, 1.0], [ALL_FINITE] * 3, 1.0).loss == 10 / 3
    assert result([np.nan], [0.0], [ALL_FINITE], 0.0).loss is None
    left_out = result([1.0, np.inf, 3.0], [1.0, 1.0, 1.0], [ALL_FINITE, 0, 1], 1.0)
    assert left_out.loss == 1.0
    assert left_out.nonfinite(names) == {1: "the loss", 2: "the gradient of w"}
    assert describe_first(left_out.nonfinite(names)) == "the loss of microbatch 1"
    of_norm = result([1.0, 2.0], [1.0, 1.0], [ALL_FINITE, ALL_FINITE], np.inf)
    assert of_norm.loss is None
    assert of_norm.nonfinite(names) == {0: GRADIENT_NORM, 1: GRADIENT_NORM}
    assert describe_first(of_norm.nonfinite(names)) == GRADIENT_NORM


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_parameters_and_moments_are_named(value: float) -> None:
    model, optimizer = create_model_and_optimizer(RunConfig(model_config(), train_config()), 10)

    def names() -> list[str]:
        return nonfinite_names(finite_flags(named_arrays(model) | named_arrays(optimizer)))

    assert names() == []
    up = model.blocks.feed_forward.up.kernel  # type: ignore[union-attr]
    up[...] = up[...].at[1, 3, 5].set(value)
    moments = nnx.state(optimizer)
    name = "opt_state.1.nu.head.kernel"
    for path, variable in nnx.to_flat_state(moments):
        if ".".join(map(str, path)) == name:
            variable.set_value(variable.get_value().at[0, 0].set(value))
    nnx.update(optimizer, moments)
    assert name in named_arrays(optimizer)
    assert names() == ["blocks.feed_forward.up.kernel", name]
