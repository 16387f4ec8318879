"""A model with its optimizer: born on the mesh, or described in the abstract to be restored."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from config import RunConfig
from model import GPT
from optimizer import MultiSteps
from sharding import state_shardings


def create_model_and_optimizer(
    config: RunConfig, total_steps: int, mesh: Mesh
) -> tuple[GPT, MultiSteps]:
    """A fresh model and optimizer, each array born on its devices."""

    @nnx.jit
    def create() -> tuple[GPT, MultiSteps]:
        both = _build(config, total_steps)
        state = nnx.state(both)
        nnx.update(both, jax.lax.with_sharding_constraint(state, state_shardings(state, mesh)))
        return both

    return create()


class AbstractState:
    """The shapes, types and places of a run's model and optimizer, by dotted name.

    Attributes:
        weights: `jax.ShapeDtypeStruct`s of the model's parameters.
        optimizer: the same of the optimizer's state.
    """

    def __init__(self, config: RunConfig, total_steps: int, mesh: Mesh) -> None:
        self._model, self._optimizer = nnx.eval_shape(lambda: _build(config, total_steps))
        self.weights = _abstract_arrays(nnx.state(self._model), mesh)
        self.optimizer = _abstract_arrays(nnx.state(self._optimizer), mesh)

    def fill(
        self, weights: dict[str, jax.Array], optimizer: dict[str, jax.Array]
    ) -> tuple[GPT, MultiSteps]:
        """The model and optimizer with these arrays."""
        _fill(self._optimizer, optimizer)
        return self.fill_model(weights), self._optimizer

    def fill_model(self, weights: dict[str, jax.Array]) -> GPT:
        """The model alone with these weights."""
        _fill(self._model, weights)
        return self._model


def named_arrays(module: nnx.Module | nnx.Optimizer) -> dict[str, jax.Array]:
    """Every array of a model or optimizer by its dotted name."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {dotted(path): variable.get_value() for path, variable in flat}


def dotted(path: tuple[Any, ...]) -> str:
    """A path of attributes as the name that checkpoints use."""
    return ".".join(str(part) for part in path)


def _build(config: RunConfig, total_steps: int) -> tuple[GPT, MultiSteps]:
    model = GPT(config.model, jax.random.key(config.train.seed))
    return model, MultiSteps(model, config.train, total_steps)


def _abstract_arrays(state: nnx.State, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    places = dict(nnx.to_flat_state(state_shardings(state, mesh)))
    return {
        dotted(path): jax.ShapeDtypeStruct(
            variable.get_value().shape, variable.get_value().dtype, sharding=places[path]
        )
        for path, variable in nnx.to_flat_state(state)
    }


def _fill(module: nnx.Module | nnx.Optimizer, arrays: dict[str, jax.Array]) -> None:
    state = nnx.state(module)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(arrays[dotted(path)])
    nnx.update(module, state)
