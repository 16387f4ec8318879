"""Weights in the forms for generation: matrices in the compute dtype, or quantized to 8 bits. Norms
and biases stay as they are."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.model.kernels.stored_matrix import (
    OutputMajorMatrix,
    StoredMatrix,
    outputs_first,
    quantize,
)
from rungs.model.layers import LowRankParam, layers_with
from rungs.parallel import sharding, target_device

WeightFormat = Literal["dtype", "int8"]
Convert = Callable[[nnx.Param, Array], nnx.Variable]
"""From a parameter and its array, or one layer's, to the parameter in another form."""
_CAST_AXES = (sharding.VOCABULARY, sharding.POSITION, "experts", "latent")
"""First axes of parameters that aren't stored: tables that are looked up, experts, and projections
of latents, which are multiplied from both sides."""
_PART_BYTES = 1 << 22
"""Maximum size of a part of a table that is read at once."""


class UnreadTensor(abc.ABC):
    """A parameter's value in a file, read part by part while it is converted for generation, so
    that it is never wholly in memory in its stored form."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, *part: slice) -> np.ndarray:
        """Return it, or a slice of its first axes."""


def cast(dtype: jnp.dtype) -> Convert:
    """Return a function that casts matmul operands and embedding tables."""
    return lambda param, array: param.replace(array.astype(dtype) if param.inputs else array)


def refuse_impossible(weights: WeightFormat, config: ModelConfig) -> None:
    """Raise UserError for a mixture of experts that can't be quantized."""
    if weights == "int8" and config.n_experts:
        raise UserError("--weights int8: not for a mixture of experts; leave it out")


def converter(weights: WeightFormat, config: ModelConfig, dtype: jnp.dtype) -> Convert:
    """Return a function that converts parameters to a form. "int8" quantizes all matrices that
    tokens are multiplied with, including an embedding table used as output head; other tables and
    low-rank additions are cast. Matrices have one row per output on CPUs, on GPUs if 16-bit.

    Raises:
        UserError: the model is a mixture of experts, which can't be quantized."""
    refuse_impossible(weights, config)
    platform = target_device.platform()
    is_output_major = platform == "cpu" or (platform == "gpu" and dtype.itemsize == 2)
    is_stored = weights == "int8" or is_output_major
    return _storing(weights, config, dtype) if is_stored else cast(dtype)


def unstack_layers(stacked: nnx.State, layers: int, convert: Convert) -> list[nnx.State]:
    """Return a converted copy of each layer's parameters.

    Args:
        stacked: the state of `make_blocks`' module. An `UnreadTensor` is read one layer at a time.
        convert: from the parameter and a layer's array to that layer's parameter, in its final
            form."""
    unstacked: list[list[Any]] = [[] for _ in range(layers)]
    for path, param in nnx.to_flat_state(stacked):
        column, array = [], param.get_value()
        for row, layer in enumerate(layers_with(param, layers)):
            if isinstance(array, UnreadTensor):
                own = jax.device_put(array.read(slice(row, row + 1))[0])
            else:
                own = jnp.asarray(array[row])
            column.append(convert(param, own))
            unstacked[layer].append((path, column[-1]))
        jax.block_until_ready(column)  # so that what was read can be freed
    return [nnx.from_flat_state(own) for own in unstacked]


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def convert_all(state: nnx.State, convert: Convert) -> nnx.State:
    """Return unstacked parameters, each converted."""

    def convert_one(param: nnx.Param) -> nnx.Variable:
        array = param.get_value()
        if isinstance(array, UnreadTensor):
            return _convert_as_read(param, array, convert)
        return jax.block_until_ready(convert(param, array))

    return jax.tree.map(convert_one, state, is_leaf=_is_param)


def _convert_as_read(param: nnx.Param, tensor: UnreadTensor, convert: Convert) -> nnx.Variable:
    """Convert a parameter; a large vocabulary is read one part at a time, as outputs are
    independent in any form."""
    has_vocabulary = sharding.VOCABULARY in param.axes
    axis = param.axes.index(sharding.VOCABULARY) if has_vocabulary else 0
    tokens, part_tokens = tensor.shape[axis], tensor.shape[axis]
    if has_vocabulary:
        token_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize // tokens
        part_tokens = max(_PART_BYTES // token_bytes, 1)
    abstract = jax.eval_shape(
        lambda array: convert(param, array).get_value(),
        jax.ShapeDtypeStruct(tensor.shape, tensor.dtype),
    )
    arrays, tree = jax.tree.flatten(abstract)
    of_outputs = 0 if isinstance(abstract, StoredMatrix) else axis
    whole = [_aligned(array.shape, array.dtype) for array in arrays]
    for start in range(0, tokens, part_tokens):
        part = slice(start, min(start + part_tokens, tokens))
        read = tensor.read(*[slice(None)] * axis, part)
        converted = convert(param, jax.device_put(read)).get_value()
        for array, values in zip(whole, jax.tree.leaves(converted), strict=True):
            array[(*[slice(None)] * of_outputs, part)] = values
    return param.replace(jax.tree.unflatten(tree, jax.device_put(whole)))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array that `jax.device_put` doesn't copy on a CPU: it begins at a
    multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def _storing(weights: WeightFormat, config: ModelConfig, dtype: jnp.dtype) -> Convert:
    """Return a function that stores matrices and casts the rest."""

    def convert(param: nnx.Param, array: Array) -> nnx.Variable:
        if config.tied_embeddings and param.axes == (sharding.VOCABULARY, "emb"):
            return param.replace(_stored(array, weights, None, dtype))
        is_low_rank = isinstance(param, LowRankParam)
        if not param.inputs or is_low_rank or param.axes[0] in _CAST_AXES:
            return cast(dtype)(param, array)
        return param.replace(_stored(array, weights, param.inputs, dtype))

    return convert


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _stored(array: Array, weights: WeightFormat, inputs: int | None, dtype: jnp.dtype) -> Any:
    """Return a stored kernel, summed over its first `inputs` axes, or table, over its last axis."""
    matrix_OI = array if inputs is None else outputs_first(array, inputs)
    if weights == "int8":
        return quantize(matrix_OI, array.shape)
    return OutputMajorMatrix(matrix_OI.astype(dtype), array.shape)
