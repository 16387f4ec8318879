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
from rungs.model.blocks import Convert
from rungs.model.kernels.int8_matmul import quantize
from rungs.model.kernels.stored_matrix import OutputMajorMatrix, StoredMatrix, outputs_first
from rungs.model.layers import LowRankParam
from rungs.parallel import target_device
from rungs.parallel.names import POSITION, VOCABULARY

WeightFormat = Literal["dtype", "int8"]
Store = Callable[[Array, tuple[int, ...]], StoredMatrix]
"""From matrix_OI and its parameter's shape."""


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
    if weights == "int8" and config.n_experts:
        raise ValueError("int8 weights: not for a mixture of experts")
    store: Store | None = None
    if weights == "int8":
        store = quantize
    elif dtype.itemsize == 2 and target_device.platform() == "cpu":
        store = functools.partial(_output_major, dtype)
    return cast(dtype) if store is None else _storing(store, config, cast(dtype))


def convert_all(state: nnx.State, convert: Convert) -> nnx.State:
    """Return parameters, each converted."""
    return jax.tree.map(
        lambda param: convert(param, param[...]),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def _storing(store: Store, config: ModelConfig, otherwise: Convert) -> Convert:
    """Return a function that stores matrices."""

    def convert(param: nnx.Param, array: Array) -> nnx.Variable:
        first = param.axes[0]
        if config.tied_embeddings and first == VOCABULARY:
            return param.replace(_stored(array, store, None))
        is_looked_up, is_of_experts = first in (VOCABULARY, POSITION), first == "experts"
        is_small = isinstance(param, LowRankParam)
        if not param.inputs or is_looked_up or is_of_experts or is_small:
            return otherwise(param, array)
        return param.replace(_stored(array, store, param.inputs))

    return convert


@functools.partial(jax.jit, static_argnums=(1, 2))
def _stored(array: Array, store: Store, inputs: int | None) -> Any:
    """Return a kernel that sums over its first `inputs` axes, or a table that sums over its last
    axis, stored."""
    matrix_OI = array if inputs is None else outputs_first(array, inputs)
    return store(matrix_OI, array.shape)


def _output_major(dtype: jnp.dtype, matrix_OI: Array, shape: tuple[int, ...]) -> StoredMatrix:
    return OutputMajorMatrix(matrix_OI.astype(dtype), shape)
