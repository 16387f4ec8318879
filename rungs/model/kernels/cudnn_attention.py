"""Causal attention over full sequences by cuDNN, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels.blockwise_attention import Scoring
from rungs.parallel import target_device

MAX_HEAD_SIZE = 128
"""Largest head size of cuDNN's fused attention on every GPU since Ampere."""


def supports(query_BSNH: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether cuDNN supports these queries: 16 bits, a head size that is a multiple of 8, on
    an NVIDIA GPU since Ampere."""
    width = query_BSNH.shape[-1]
    is_supported = query_BSNH.dtype in (jnp.bfloat16, jnp.float16) and not width % 8
    return is_supported and width <= MAX_HEAD_SIZE and target_device.is_ampere_or_later()


def causal_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scoring: Scoring
) -> Array:
    """Like `blockwise_attention.causal_attention`, without soft cap or documents."""
    return jax.nn.dot_product_attention(
        query_BSNH,
        key_BSKH,
        value_BSKH,
        scale=scoring.scale,
        is_causal=scoring.is_causal,
        local_window_size=None if scoring.window is None else (scoring.window - 1, 0),
        implementation="cudnn",
    )
