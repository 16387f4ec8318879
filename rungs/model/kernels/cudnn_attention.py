"""Causal attention over full sequences by cuDNN, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels import blockwise_attention
from rungs.parallel import target_device

MAX_HEAD_SIZE = 128
"""The largest head size of cuDNN's fused attention on every GPU since Ampere."""


def supports(query_BSNH: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether cuDNN can compute attention of these queries: in 16 bits, with heads of a
    multiple of 8 elements, on an NVIDIA GPU since Ampere."""
    width = query_BSNH.shape[-1]
    is_supported = query_BSNH.dtype in (jnp.bfloat16, jnp.float16) and not width % 8
    return is_supported and width <= MAX_HEAD_SIZE and target_device.is_ampere_or_later()


def causal_attention(
    query_BSNH: Array,
    key_BSKH: Array,
    value_BSKH: Array,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    starts_BS: Array | None = None,
) -> Array:
    """Return the same as `blockwise_attention.causal_attention`, without a soft cap or documents.
    In a plan for another device that function stands in: it keeps as much for the backward pass."""
    assert soft_cap is None
    assert starts_BS is None
    if not target_device.is_compiled():
        return blockwise_attention.causal_attention(query_BSNH, key_BSKH, value_BSKH, scale, window)
    local_window = None if window is None else (window - 1, 0)
    y: Array = jax.nn.dot_product_attention(
        query_BSNH,
        key_BSKH,
        value_BSKH,
        scale=scale,
        is_causal=True,
        local_window_size=local_window,
        implementation="cudnn",
    )
    return y
