"""The forms in which weights are used for generation: matrices in the compute dtype, or quantized
to 8 bits. Norms and biases stay as they are."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.blocks import Convert, read
from rungs.model.kernels.int8_matmul import quantize
from rungs.model.kernels.stored_matrix import OutputMajorMatrix, StoredMatrix, outputs_first
from rungs.model.layers import LowRankParam
from rungs.parallel import target_device
from rungs.parallel.names import POSITION, VOCABULARY

WeightFormat = Literal["dtype", "int8"]
Store = Callable[[Array, tuple[int, ...], jnp.dtype], StoredMatrix]
"""From matrix_OI, its parameter's shape and the compute dtype."""


def is_possible(weights: WeightFormat, config: ModelConfig) -> bool:
    """Return whether a model's weights have this form: a mixture of experts can't be quantized."""
    return weights == "dtype" or not config.n_experts


def cast(dtype: jnp.dtype) -> Convert:
    """Return a function that casts what is an operand of a matmul, and embedding tables."""
    return lambda param, array: param.replace(array.astype(dtype) if param.inputs else array)


def converter(weights: WeightFormat, config: ModelConfig, dtype: jnp.dtype) -> Convert:
    """Return a function that brings parameters into a form.

    With "int8", all matrices that a token is multiplied with are quantized; an embedding table, if
    it is the output head, too. Embedding tables that are only looked up, and low-rank additions,
    are cast. On a CPU, 16-bit matrices have a row for each output.

    Raises:
        ValueError: the model is a mixture of experts, which can't be quantized.
    """
    if not is_possible(weights, config):
        raise ValueError("int8 weights: not for a mixture of experts")
    store: Store | None = None
    if weights == "int8":
        store = _quantized
    elif dtype.itemsize == 2 and target_device.platform() == "cpu":
        store = _output_major
    return cast(dtype) if store is None else _storing(store, config, dtype)


def convert_all(state: nnx.State, convert: Convert) -> nnx.State:
    """Return parameters, each converted."""

    def convert_one(param: nnx.Param) -> nnx.Variable:
        # jnp.asarray would copy twice; what was read is freed before it is converted
        array = jax.block_until_ready(jax.device_put(read(param)))
        converted: nnx.Variable = jax.block_until_ready(convert(param, array))
        return converted

    return jax.tree.map(convert_one, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _storing(store: Store, config: ModelConfig, dtype: jnp.dtype) -> Convert:
    """Return a function that stores matrices and casts the rest."""

    def convert(param: nnx.Param, array: Array) -> nnx.Variable:
        first_axis = param.axes[0]
        if config.tied_embeddings and first_axis == VOCABULARY:
            return param.replace(_stored(array, store, None, dtype))
        is_looked_up = first_axis in (VOCABULARY, POSITION)
        is_of_experts = first_axis == "experts"
        is_low_rank = isinstance(param, LowRankParam)
        if not param.inputs or is_looked_up or is_of_experts or is_low_rank:
            return cast(dtype)(param, array)
        return param.replace(_stored(array, store, param.inputs, dtype))

    return convert


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _stored(array: Array, store: Store, inputs: int | None, dtype: jnp.dtype) -> Any:
    """Return a kernel that sums over its first `inputs` axes, or a table that sums over its last
    axis, stored."""
    matrix_OI = array if inputs is None else outputs_first(array, inputs)
    return store(matrix_OI, array.shape, dtype)


def _quantized(matrix_OI: Array, shape: tuple[int, ...], _: jnp.dtype) -> StoredMatrix:
    return quantize(matrix_OI, shape)


def _output_major(matrix_OI: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> StoredMatrix:
    return OutputMajorMatrix(matrix_OI.astype(dtype), shape)
