"""Attention over whole sequences by cuDNN, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels import blockwise_attention
from rungs.model.remat import save_for_backward
from rungs.parallel import target_device

WIDEST_HEAD = 128
"""Elements of a head that cuDNN's fused attention takes on every GPU since Ampere."""


def takes(query_BSNH: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether it can: on an NVIDIA GPU since Ampere, 16 bits, heads of whole eights."""
    width = query_BSNH.shape[-1]
    fits = query_BSNH.dtype in (jnp.bfloat16, jnp.float16) and not width % 8
    return fits and width <= WIDEST_HEAD and _is_ampere_or_later(target_device.target())


def causal_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scale: float, window: int | None
) -> Array:
    """As `kernels.causal_attention.causal_attention`, without a soft cap; where that is planned
    only, its stand-in, which keeps the same for the backward pass."""
    if not target_device.is_local():
        return blockwise_attention.causal_attention(query_BSNH, key_BSKH, value_BSKH, scale, window)
    before = None if window is None else (window - 1, 0)
    return save_for_backward(
        jax.nn.dot_product_attention(
            query_BSNH,
            key_BSKH,
            value_BSKH,
            scale=scale,
            is_causal=True,
            local_window_size=before,
            implementation="cudnn",
        )
    )


def _is_ampere_or_later(kind: target_device.Target) -> bool:
    generation = kind.compute_capability.split(".")[0]
    return generation.isdigit() and int(generation) >= 8
