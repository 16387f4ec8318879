"""Tiny models with random weights, and jit-compilation in little time."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rungs.model.gpt import GPT
from tests.support.configs import model_config

T = TypeVar("T")
Module = TypeVar("Module", bound=nnx.Module)
Path = tuple[Any, ...]

# For models so small that they take longer to compile than to run.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def bind_and_jit(function: Callable[..., T], module: nnx.Module) -> Callable[..., T]:
    """Return a function with its first argument bound to a module, jit-compiled."""
    graph, state = nnx.split(module)
    jitted = quick_jit(lambda state, *arrays: function(nnx.merge(graph, state), *arrays))
    return functools.partial(jitted, state)


def random_model(**changes: Any) -> GPT:
    """Return a tiny GPT-2 with config keys changed and every parameter random."""
    architecture = model_config(**changes)
    return with_random_parameters(lambda: GPT(architecture, jax.random.key(0)))


def with_random_parameters(
    make: Callable[[], Module], size_of: Callable[[Path], float] = lambda _: 0.2
) -> Module:
    """Return a module with every parameter random: a zero or a one could hide a mistake.
    `size_of` gives the standard deviation of the parameter at a path."""
    module = nnx.eval_shape(make)
    state, rng = nnx.state(module), np.random.default_rng(0)
    for path, param in nnx.to_flat_state(state):
        values = size_of(path) * rng.normal(size=param.get_value().shape) + (path[-1] == "scale")
        param.set_value(jnp.asarray(values, jnp.float32))
    nnx.update(module, state)
    return module


def random_tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(32, size=shape, dtype=np.int32)
