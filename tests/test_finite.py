"""The first array that is not finite, in a step and in a model."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import model_config, train_config
from flax import nnx

from config import RunConfig
from finite import NONE, first_not_finite, not_finite, suspects
from state import create_model_and_optimizer, named_arrays


def test_the_first_array_is_named() -> None:
    model, optimizer = create_model_and_optimizer(RunConfig(model_config(), train_config()), 10)
    names = suspects(model, optimizer.wrt)
    gradient = nnx.state(model, optimizer.wrt)
    assert first_not_finite((jnp.zeros(()), gradient)) == NONE
    assert names[first_not_finite((jnp.asarray(jnp.inf), gradient))] == "the loss"
    flat = nnx.to_flat_state(gradient)
    for path, variable in flat:
        former = variable.get_value()
        variable.set_value(former.ravel().at[-1].set(jnp.nan).reshape(former.shape))
        found = names[first_not_finite((jnp.zeros(()), gradient))]
        assert found == "the gradient of " + ".".join(map(str, path))
        variable.set_value(former)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_a_model_or_its_moments_is_named(value: float) -> None:
    model, optimizer = create_model_and_optimizer(RunConfig(model_config(), train_config()), 10)
    assert not_finite(model, optimizer) == []
    up = model.blocks.feed_forward.up.kernel  # type: ignore[union-attr]
    up[...] = up[...].at[1, 3, 5].set(value)
    moments = nnx.state(optimizer)
    name = "opt_state.1.nu.head.kernel"
    for path, variable in nnx.to_flat_state(moments):
        if ".".join(map(str, path)) == name:
            variable.set_value(variable.get_value().at[0, 0].set(value))
    nnx.update(optimizer, moments)
    assert name in named_arrays(optimizer)
    assert not_finite(model, optimizer) == ["blocks.feed_forward.up.kernel", name]
    assert not_finite(optimizer) == [name]
