"""A model with its optimizer: born on the mesh, or described in the abstract to be restored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import LoraConfig
from rungs.model.gpt import GPT
from rungs.model.lora import add_low_rank
from rungs.optim.optimizer import MultiSteps
from rungs.parallel.axes import DATA, VOCABULARY, dotted
from rungs.parallel.mesh import Layout, keep_layout

Arrays = dict[str, jax.Array]
AbstractArrays = dict[str, jax.ShapeDtypeStruct]
Shapes = dict[str, tuple[int, ...]]

LOW_RANK = 0x10A
"""Sets the random numbers of low-rank additions apart from those that start the weights."""


def create_model_and_optimizer(
    config: RunConfig, total_steps: int, mesh: Mesh | None = None, weights: Arrays | None = None
) -> tuple[GPT, MultiSteps]:
    """A model and a fresh optimizer, each array born on its devices.

    Args:
        mesh: devices that share the work, in the mode of `config.train.sharding`; the first device
            alone where absent.
        weights: the model's parameters to start from, by dotted name; their memory is taken over.
            Parameters that are not among them are fresh.

    Raises:
        ValueError: the mesh does not fit the mode, or the model's dimensions do not divide by it.
    """
    layout = Layout.of(config.train.sharding, mesh)
    if lines := layout.problems(config.model):
        raise ValueError("\n".join(lines))

    def create(weights: Arrays) -> tuple[GPT, MultiSteps]:
        model, optimizer = _build(config, total_steps, layout)
        _fill(model, weights)
        keep_layout(layout, model, optimizer)
        return model, optimizer

    return nnx.jit(create, donate_argnums=0)(weights or {})


class AbstractState:
    """The shapes, types and places of a run's model and optimizer, by dotted name.

    Attributes:
        weights: of the model's parameters.
        trained: names of the parameters that the optimizer changes.
        optimizer: of the optimizer's state.
        shapes: of the model's parameters in files.
        is_padded: whether some have more rows in memory than in files.

    Raises:
        ValueError: the mesh does not fit the mode.
    """

    def __init__(self, config: RunConfig, total_steps: int, mesh: Mesh | None = None) -> None:
        layout = Layout.of(config.train.sharding, mesh)
        build = functools.partial(_build, config, total_steps, layout)
        self._model, self._optimizer = nnx.eval_shape(build)
        self.weights = _abstract_arrays(nnx.state(self._model), layout)
        self.trained = set(_abstract_arrays(nnx.state(self._model, self._optimizer.wrt), layout))
        self.optimizer = _abstract_arrays(nnx.state(self._optimizer), layout)
        self.shapes = _shapes(self._model, config.model.vocab_size)
        self.is_padded = any(leaf.shape != self.shapes[n] for n, leaf in self.weights.items())

    def fill(self, weights: Arrays, optimizer: Arrays) -> tuple[GPT, MultiSteps]:
        """The model and optimizer with these arrays."""
        _fill(self._model, weights)
        _fill(self._optimizer, optimizer)
        return self._model, self._optimizer


class AbstractModel:
    """The shapes, types and places of a model's parameters, by dotted name, on one device."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = abstract_model(config)
        self.weights = _abstract_arrays(nnx.state(self._model), Layout.of(None))
        self.shapes = shapes_of(config)

    def fill(self, weights: Arrays) -> GPT:
        """The model with these parameters, in the types they have."""
        _fill(self._model, weights)
        return self._model


def shapes_of(config: ModelConfig, lora: LoraConfig | None = None) -> Shapes:
    """Shape of each of a model's parameters, low-rank additions among them, by dotted name."""
    return _shapes(abstract_model(config, lora), config.vocab_size)


def abstract_model(config: ModelConfig, lora: LoraConfig | None = None) -> GPT:
    """A model of which there are only shapes and types."""

    model: GPT = nnx.eval_shape(lambda: build_model(config, lora, jax.random.key(0)))
    return model


def build_model(config: ModelConfig, lora: LoraConfig | None, key: jax.Array) -> GPT:
    """Return the model that a run with this random key starts from, its vocabulary not padded."""
    model = GPT(config, key)
    if lora is not None:
        add_low_rank(model, lora, jax.random.fold_in(key, LOW_RANK))
    return model


def named_arrays(module: nnx.Module | nnx.Optimizer, vocab_size: int | None = None) -> Arrays:
    """Every array of a model or optimizer by its dotted name.

    Args:
        vocab_size: of the model, to leave out the rows that a vocabulary has in memory only.
    """
    flat = nnx.to_flat_state(nnx.state(module))
    return {dotted(path): _without_padding(variable, vocab_size) for path, variable in flat}


def host_copies(module: nnx.Module | nnx.Optimizer, vocab_size: int) -> dict[str, np.ndarray]:
    """As `named_arrays`, copied into this process's memory, all at once on their way there. Rows
    that a vocabulary has in a device's memory only are left out here, not in more memory there."""
    flat = nnx.to_flat_state(nnx.state(module))
    for _, variable in flat:
        variable.get_value().copy_to_host_async()
    return {dotted(path): _host_copy(variable, vocab_size) for path, variable in flat}


def _host_copy(variable: nnx.Variable, vocab_size: int) -> np.ndarray:
    array, axis = variable.get_value(), _vocabulary_axis(variable)
    # On a CPU JAX lends NumPy the memory itself, which the next step takes over.
    is_lent = next(iter(array.devices())).platform == "cpu"
    copy = np.array(array) if is_lent else np.asarray(array)
    if axis is None or copy.shape[axis] == vocab_size:
        return copy
    return copy.take(range(vocab_size), axis)


def _build(config: RunConfig, total_steps: int, layout: Layout) -> tuple[GPT, MultiSteps]:
    model = build_model(config.model, config.train.lora, jax.random.key(config.train.seed))
    _pad_vocabulary(model, layout.padded(config.model.vocab_size))
    return model, MultiSteps(model, config.train, total_steps)


def _pad_vocabulary(model: GPT, rows: int) -> None:
    """Add rows of zeros that stand for no token; the step never changes them."""
    state = nnx.state(model)
    for _, variable in nnx.to_flat_state(state):
        axis, array = _vocabulary_axis(variable), variable.get_value()
        if axis is not None:
            added = [(0, rows - array.shape[axis] if at == axis else 0) for at in range(array.ndim)]
            variable.set_value(jnp.pad(array, added))
    nnx.update(model, state)


def _without_padding(variable: nnx.Variable, vocab_size: int | None) -> jax.Array:
    array: jax.Array = variable.get_value()
    axis = _vocabulary_axis(variable)
    if vocab_size is None or axis is None or array.shape[axis] == vocab_size:
        return array
    assert isinstance(array.sharding, NamedSharding)
    spec = [name if name == DATA else None for name in array.sharding.spec]
    place = NamedSharding(array.sharding.mesh, PartitionSpec(*spec))
    return _first_rows(array, vocab_size, axis, place)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _first_rows(array: jax.Array, rows: int, axis: int, place: NamedSharding) -> jax.Array:
    first = jax.lax.slice_in_dim(array, 0, rows, axis=axis)
    return jax.lax.with_sharding_constraint(first, place)


def _shapes(model: GPT, vocab_size: int) -> Shapes:
    """Of each parameter, as files have it."""
    shapes = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape = list(variable.get_value().shape)
        if (axis := _vocabulary_axis(variable)) is not None:
            shape[axis] = vocab_size
        shapes[dotted(path)] = tuple(shape)
    return shapes


def _vocabulary_axis(variable: nnx.Variable) -> int | None:
    axes = variable.get_metadata().get("axes", ())
    return axes.index(VOCABULARY) if VOCABULARY in axes else None


def _abstract_arrays(state: nnx.State, layout: Layout) -> AbstractArrays:
    places = dict(nnx.to_flat_state(layout.shardings(state)))
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
