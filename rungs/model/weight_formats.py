"""The forms in which weights are used for generation: matrices in the compute dtype, or quantized
to 8 bits. Norms and biases stay as they are."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.blocks import Convert
from rungs.model.kernels.int8_matmul import Int8Matrix, quantize_kernel, quantize_table
from rungs.model.layers import LowRankParam
from rungs.parallel.names import POSITION, VOCABULARY

WeightFormat = Literal["dtype", "int8"]


def cast(dtype: jnp.dtype) -> Convert:
    """Return a function that casts what is an operand of a matmul, and embedding tables."""
    return lambda param, array: param.replace(array.astype(dtype) if param.inputs else array)


def converter(weights: WeightFormat, config: ModelConfig, dtype: jnp.dtype) -> Convert:
    """Return a function that brings parameters into a form.

    With "int8", all matrices that a token is multiplied with are quantized; an embedding table, if
    it is the output head, too. Embedding tables that are only looked up, and low-rank additions,
    are cast.

    Raises:
        ValueError: the model is a mixture of experts, which can't be quantized.
    """
    if weights == "dtype":
        return cast(dtype)
    if config.n_experts:
        raise ValueError("not for a mixture of experts")
    return functools.partial(_quantize, cast(dtype), config.tied_embeddings)


def convert_all(state: nnx.State, convert: Convert) -> nnx.State:
    """Return parameters, each converted."""
    return jax.tree.map(
        lambda param: convert(param, param[...]),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def _quantize(otherwise: Convert, is_tied: bool, param: nnx.Param, array: Array) -> nnx.Variable:
    rows = param.axes[0]
    if is_tied and rows == VOCABULARY:
        return param.replace(_jit_table(array))
    if not param.inputs or rows in (VOCABULARY, POSITION) or isinstance(param, LowRankParam):
        return otherwise(param, array)
    return param.replace(_jit_kernel(array, param.inputs))


@jax.jit
def _jit_table(array: Array) -> Int8Matrix:
    return quantize_table(array)


@functools.partial(jax.jit, static_argnames="inputs")
def _jit_kernel(array: Array, inputs: int) -> Int8Matrix:
    return quantize_kernel(array, inputs)
