"""The compiled measurement of a step. Axes as in `model/gpt.py`."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.config.train_config import TrainConfig
from rungs.inspect.watch_activations import activation_statistics
from rungs.inspect.watch_arrays import Change, array_statistics
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import Layout
from rungs.run.layer_record import ARRAYS
from rungs.step.forward import replicated
from rungs.step.objective import Objective
from rungs.step.train_step import dropout_key, step_function

Measure = Callable[..., dict[str, Any]]


def make_measurement(objective: Objective, train: TrainConfig, mesh: Mesh) -> Measure:
    """Return a compiled function of a step's arguments, see `make_step`, that returns what the
    fields of `layers.npy` are. It takes the step on copies and leaves its arguments unchanged, so
    the program of the step itself stays the same to the last bit whether or not it is watched."""
    layout = Layout.of(train.sharding, mesh)
    step = step_function(objective, train, layout, keeps_gradient=True)

    def measured(
        graph: Any, state: nnx.State, batch_ABS: tuple[Any, ...], options: dict[str, Array]
    ) -> dict[str, Any]:
        model, optimizer = nnx.merge(graph, state)
        key = dropout_key(train, optimizer.step[...])
        if optimizer.float8:
            optimizer.float8.start(model)
        activations = activation_statistics(objective, train, layout, model, batch_ABS, key)
        before = _parameters(model, optimizer)
        gradient = step(model, optimizer, *batch_ABS, **options).gradient
        change = Change(before, gradient, _parameters(model, optimizer))
        arrays = array_statistics(change, model.config.vocab_size)
        return replicated(layout, {ARRAYS: arrays} | activations)

    compiled = jax.jit(measured, static_argnums=0)

    def measure(
        model: GPT, optimizer: SkippingOptimizer, *batch_ABS: Any, **options: Array
    ) -> dict[str, Any]:
        graph, state = nnx.split((model, optimizer))
        return compiled(graph, state, batch_ABS, options)

    return measure


def _parameters(model: GPT, optimizer: SkippingOptimizer) -> nnx.State:
    """Return the trained parameters as they are now; the step changes the model in place."""
    return jax.tree.map(lambda array: array, nnx.state(model, optimizer.wrt))
