"""Model and optimizer: created on the mesh, or described without arrays for restoring."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import LoraConfig
from rungs.config.run_config import AnyRunConfig
from rungs.model.gpt import GPT
from rungs.model.lora import LOW_RANK_NAMES, add_lora
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import TENSOR, Layout, constrain, dotted, padded_axis

Arrays = dict[str, jax.Array]
AbstractArrays = dict[str, jax.ShapeDtypeStruct]
Shapes = dict[str, tuple[int, ...]]
Stateful = nnx.Module | nnx.Optimizer

LOW_RANK = 0x10A
"""Folded into the seed, so that low-rank additions get other random numbers than weights."""


def create_model_and_optimizer(
    config: AnyRunConfig, total_steps: int, mesh: Mesh | None = None, weights: Arrays | None = None
) -> tuple[GPT, SkippingOptimizer]:
    """Return a model and a new optimizer, with each array created on its devices.

    Args:
        mesh: used in the mode of `config.train.sharding`; default: the first device.
        weights: parameters to start from, by dotted name, whose memory is reused. Others are
            initialized.

    Raises:
        ValueError: the mesh does not fit the mode, or does not divide the model's dimensions."""
    layout = Layout.of(config.train.sharding, mesh)
    if lines := layout.problems(config.model):
        raise ValueError("\n".join(lines))

    def create(weights: Arrays) -> tuple[GPT, SkippingOptimizer]:
        model, optimizer = _build(config, total_steps, layout)
        _fill(model, weights)
        constrain(layout, model)
        constrain(layout.for_updates, optimizer)
        return model, optimizer

    return nnx.jit(create, donate_argnums=0)(weights or {})


def create_model(config: AnyRunConfig, mesh: Mesh, weights: Arrays) -> GPT:
    """Return a model without an optimizer, with each array on its devices. `weights` are all
    parameters, by dotted name, and their memory is reused."""
    layout = Layout.of(config.train.sharding, mesh)

    def create(weights: Arrays) -> GPT:
        model = build_model(config.model, None, jax.random.key(0))
        _pad_vocabulary(model, layout.padded_vocab_size(config.model.vocab_size))
        _fill(model, weights)
        constrain(layout, model)
        return model

    return nnx.jit(create, donate_argnums=0)(weights)


def averaged_model(model: GPT, optimizer: SkippingOptimizer, layout: Layout) -> GPT:
    """Return a model with the averaged weights, in the layout of models. It is valid until the next
    step, as it may share arrays with the optimizer."""
    assert optimizer.ema is not None
    averaged = nnx.clone(model)
    shardings = nnx.as_pure(layout.shardings(nnx.state(averaged, optimizer.wrt)))
    place = jax.jit(lambda means: means, out_shardings=shardings)
    nnx.update(averaged, place(nnx.as_pure(optimizer.ema.weights)))
    return averaged


class AbstractState:
    """The shapes, dtypes and shardings of a run's model and optimizer, by dotted name.

    Attributes:
        weights: the model's parameters.
        trained: names of the parameters that the optimizer changes.
        optimizer: the optimizer's state.
        shapes: shapes of the model's parameters in files, without vocabulary padding.
        is_padded: whether some parameters have vocabulary padding in memory.

    Raises:
        ValueError: the mesh does not fit the mode."""

    def __init__(self, config: AnyRunConfig, total_steps: int, mesh: Mesh | None = None) -> None:
        layout = Layout.of(config.train.sharding, mesh)
        build = functools.partial(_build, config, total_steps, layout)
        self._model, self._optimizer = nnx.eval_shape(build)
        self.weights = _abstract_arrays(nnx.state(self._model), layout)
        self.trained = set(_abstract_arrays(nnx.state(self._model, self._optimizer.wrt), layout))
        self.optimizer = _abstract_arrays(nnx.state(self._optimizer), layout.for_updates)
        self.shapes = _shapes(self._model, config.model.vocab_size)
        self.is_padded = any(leaf.shape != self.shapes[n] for n, leaf in self.weights.items())

    def weights_in(self, layout: Layout) -> AbstractArrays:
        """Return the model's parameters in another layout."""
        return _abstract_arrays(nnx.state(self._model), layout)

    def fill(self, weights: Arrays, optimizer: Arrays) -> tuple[GPT, SkippingOptimizer]:
        """Return model and optimizer with these arrays."""
        _fill(self._model, weights)
        _fill(self._optimizer, optimizer)
        return self._model, self._optimizer


class AbstractModel:
    """The shapes, dtypes and shardings of a model's parameters, by dotted name. `layout` must not
    split the vocabulary; default: one device."""

    def __init__(self, config: ModelConfig, layout: Layout | None = None) -> None:
        self._model = abstract_model(config)
        self.weights = _abstract_arrays(nnx.state(self._model), layout or Layout.of(None))
        self.shapes = _shapes(self._model, config.vocab_size)

    def fill(self, weights: Mapping[str, Any]) -> GPT:
        """Return the model with these parameters, arrays or, for generation only,
        `UnreadTensor`s."""
        _fill(self._model, weights)
        return self._model


def shapes_of(config: ModelConfig, lora: LoraConfig | None = None) -> Shapes:
    """Return the shape of each parameter, low-rank additions included, by dotted name."""
    return _shapes(abstract_model(config, lora), config.vocab_size)


def copy_bytes(config: AnyRunConfig) -> int:
    """Return the bytes, in float32, of a run's weights, and of two moments and the gradient of
    those that it trains. Starts no JAX backend."""
    lora = config.train.lora
    sizes = {name: math.prod(shape) for name, shape in shapes_of(config.model, lora).items()}
    trained = {n: s for n, s in sizes.items() if not lora or n.endswith(LOW_RANK_NAMES)}
    return 4 * sum(sizes.values()) + 12 * sum(trained.values())


def abstract_model(config: ModelConfig, lora: LoraConfig | None = None) -> GPT:
    """Return a model with shapes and dtypes but no arrays."""
    return nnx.eval_shape(lambda: build_model(config, lora, jax.random.key(0)))


def build_model(config: ModelConfig, lora: LoraConfig | None, key: jax.Array) -> GPT:
    """Return a run's initial model for a random key, without vocabulary padding."""
    model = GPT(config, key)
    if lora is not None:
        add_lora(model, lora, jax.random.fold_in(key, LOW_RANK))
    return model


def named_arrays(module: Stateful, vocab_size: int | None = None, only: Any = ...) -> Arrays:
    """Return a module's arrays by dotted name, `only` those of a type of variable; given
    `vocab_size`, without vocabulary padding."""
    flat = nnx.to_flat_state(nnx.state(module, only))
    return {dotted(path): _without_padding(variable, vocab_size) for path, variable in flat}


def host_copies(module: Stateful, vocab_size: int, only: Any = ...) -> dict[str, np.ndarray]:
    """Return `host_arrays` of a module's state, or `only` of a type of variable."""
    return host_arrays(nnx.state(module, only), vocab_size)


def host_arrays(state: nnx.State, vocab_size: int) -> dict[str, np.ndarray]:
    """Return host copies of every array by its dotted name, transferred concurrently. Vocabulary
    padding is removed on the host, so that devices need no memory for it."""
    flat = nnx.to_flat_state(state)
    for _, variable in flat:
        variable.get_value().copy_to_host_async()
    return {dotted(path): _host_copy(variable, vocab_size) for path, variable in flat}


def _host_copy(variable: nnx.Variable, vocab_size: int) -> np.ndarray:
    array, axis = variable.get_value(), padded_axis(variable)
    # On a CPU, np.asarray shares memory with JAX, which the next step reuses.
    is_shared = next(iter(array.devices())).platform == "cpu"
    copy = np.array(array) if is_shared else np.asarray(array)
    if axis is None or copy.shape[axis] == vocab_size:
        return copy
    return copy.take(range(vocab_size), axis)


def _build(config: AnyRunConfig, total_steps: int, layout: Layout) -> tuple[GPT, SkippingOptimizer]:
    model = build_model(config.model, config.train.lora, jax.random.key(config.train.seed))
    _pad_vocabulary(model, layout.padded_vocab_size(config.model.vocab_size))
    return model, SkippingOptimizer(model, config.train, total_steps)


def _pad_vocabulary(model: GPT, rows: int) -> None:
    """Add rows of zeros as vocabulary padding, which training never changes."""
    state = nnx.state(model)
    for _, variable in nnx.to_flat_state(state):
        axis, array = padded_axis(variable), variable.get_value()
        if axis is not None:
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, rows - array.shape[axis])
            variable.set_value(jnp.pad(array, widths))
    nnx.update(model, state)


def _without_padding(variable: nnx.Variable, vocab_size: int | None) -> jax.Array:
    array: jax.Array = variable.get_value()
    axis = padded_axis(variable)
    if vocab_size is None or axis is None or array.shape[axis] == vocab_size:
        return array
    assert isinstance(array.sharding, NamedSharding)
    spec = [None if name == TENSOR else name for name in array.sharding.spec]
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec(*spec))
    return _first_rows(array, vocab_size, axis, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _first_rows(array: jax.Array, rows: int, axis: int, sharding: NamedSharding) -> jax.Array:
    first = jax.lax.slice_in_dim(array, 0, rows, axis=axis)
    return jax.lax.with_sharding_constraint(first, sharding)


def _shapes(model: GPT, vocab_size: int) -> Shapes:
    """Return the shape of each parameter in files, without vocabulary padding."""
    shapes = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape = list(variable.get_value().shape)
        if (axis := padded_axis(variable)) is not None:
            shape[axis] = vocab_size
        shapes[dotted(path)] = tuple(shape)
    return shapes


def _abstract_arrays(state: nnx.State, layout: Layout) -> AbstractArrays:
    shardings = dict(nnx.to_flat_state(layout.shardings(state)))
    return {
        dotted(path): jax.ShapeDtypeStruct(
            variable.get_value().shape, variable.get_value().dtype, sharding=shardings[path]
        )
        for path, variable in nnx.to_flat_state(state)
    }


def _fill(module: nnx.Module | nnx.Optimizer, arrays: Mapping[str, Any]) -> None:
    """Set the variables named in `arrays`."""
    state = nnx.state(module)
    for path, variable in nnx.to_flat_state(state):
        if (name := dotted(path)) in arrays:
            variable.set_value(arrays[name])
    nnx.update(module, state)
