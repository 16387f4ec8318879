"""A model with its optimizer: born on the mesh, or described in the abstract to be restored."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from config import RunConfig
from lora import add_low_rank
from model import GPT
from model_config import ModelConfig
from optimizer import MultiSteps
from sharding import state_shardings

Arrays = dict[str, jax.Array]
AbstractArrays = dict[str, jax.ShapeDtypeStruct]

LOW_RANK = 0x10A
"""Sets the random numbers of low-rank additions apart from those that start the weights."""


def create_model_and_optimizer(
    config: RunConfig, total_steps: int, mesh: Mesh, weights: Arrays | None = None
) -> tuple[GPT, MultiSteps]:
    """A model and a fresh optimizer, each array born on its devices.

    Args:
        weights: the model's parameters to start from, by dotted name; their memory is taken over.
            Parameters that are not among them are fresh.
    """

    def create(weights: Arrays) -> tuple[GPT, MultiSteps]:
        both = _build(config, total_steps)
        _fill(both[0], weights)
        state = nnx.state(both)
        nnx.update(both, jax.lax.with_sharding_constraint(state, state_shardings(state, mesh)))
        return both

    return nnx.jit(create, donate_argnums=0)(weights or {})


class AbstractState:
    """The shapes, types and places of a run's model and optimizer, by dotted name.

    Attributes:
        weights: of the model's parameters.
        trained: names of the parameters that the optimizer changes.
        optimizer: of the optimizer's state.
    """

    def __init__(self, config: RunConfig, total_steps: int, mesh: Mesh) -> None:
        self._model, self._optimizer = nnx.eval_shape(lambda: _build(config, total_steps))
        self.weights = _abstract_arrays(nnx.state(self._model), mesh)
        self.trained = set(_abstract_arrays(nnx.state(self._model, self._optimizer.wrt), mesh))
        self.optimizer = _abstract_arrays(nnx.state(self._optimizer), mesh)

    def fill(self, weights: Arrays, optimizer: Arrays) -> tuple[GPT, MultiSteps]:
        """The model and optimizer with these arrays."""
        _fill(self._model, weights)
        _fill(self._optimizer, optimizer)
        return self._model, self._optimizer


class AbstractModel:
    """The shapes, types and places of a model's parameters, by dotted name."""

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        self._model = abstract_model(config)
        self.weights = _abstract_arrays(nnx.state(self._model), mesh)

    def fill(self, weights: Arrays) -> GPT:
        """The model with these parameters, in the types they have."""
        _fill(self._model, weights)
        return self._model


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each of a model's parameters, by dotted name."""
    return {name: array.shape for name, array in named_arrays(abstract_model(config)).items()}


def abstract_model(config: ModelConfig) -> GPT:
    """A model of which there are only shapes and types."""
    model: GPT = nnx.eval_shape(lambda: GPT(config, jax.random.key(0)))
    return model


def named_arrays(module: nnx.Module | nnx.Optimizer) -> Arrays:
    """Every array of a model or optimizer by its dotted name."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {dotted(path): variable.get_value() for path, variable in flat}


def dotted(path: tuple[Any, ...]) -> str:
    """A path of attributes as the name that checkpoints use."""
    return ".".join(str(part) for part in path)


def _build(config: RunConfig, total_steps: int) -> tuple[GPT, MultiSteps]:
    key = jax.random.key(config.train.seed)
    model = GPT(config.model, key)
    if config.train.lora is not None:
        add_low_rank(model, config.train.lora, jax.random.fold_in(key, LOW_RANK))
    return model, MultiSteps(model, config.train, total_steps)


def _abstract_arrays(state: nnx.State, mesh: Mesh) -> AbstractArrays:
    places = dict(nnx.to_flat_state(state_shardings(state, mesh)))
    return {
        dotted(path): jax.ShapeDtypeStruct(
            variable.get_value().shape, variable.get_value().dtype, sharding=places[path]
        )
        for path, variable in nnx.to_flat_state(state)
    }


def _fill(module: nnx.Module | nnx.Optimizer, arrays: Arrays) -> None:
    """Set the variables that are named."""
    state = nnx.state(module)
    for path, variable in nnx.to_flat_state(state):
        if (name := dotted(path)) in arrays:
            variable.set_value(arrays[name])
    nnx.update(module, state)
